"""`python -m data_prep stats`: every statistic against a direct count in Python."""

import json
import math
from collections import Counter

import numpy as np
import pytest

from data_prep.finished_shards import stats
from data_prep.tasks.progress import Progress
from tests.data_prep.small_corpus import data_prep
from zerolm.shards.reader import open_source
from zerolm.shards.writer import ShardWriter

VOCABULARY, EOS = 300, 2


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Documents of Zipf-like ids, some of them several times, in small shards: (directory, all)."""
    generator = np.random.default_rng(4)
    documents = []
    for _ in range(400):
        length = int(generator.lognormal(4, 1.2)) + 1
        documents.append(np.append(np.minimum(generator.zipf(1.3, length) + 2, 250), EOS))
    documents += [documents[number] for number in (3, 3, 3, 17, 40, 41)]
    directory = tmp_path_factory.mktemp("stats") / "zipf"
    tokenizer = {"name": "test", "fingerprint": "test", "files": []}
    with ShardWriter(
        directory, vocab_size=VOCABULARY, eos_id=EOS, tokenizer=tokenizer, shard_tokens=9000
    ) as writer:
        for document in documents:
            writer.add(document)
    return directory, documents


@pytest.mark.parametrize("workers", [1, 2])
def test_statistics_equal_direct_counts(corpus, monkeypatch, workers):
    directory, documents = corpus
    if workers == 1:  # pieces and partitions far smaller than the data
        monkeypatch.setattr("data_prep.finished_shards.documents.PIECE_TOKENS", 500)
        monkeypatch.setattr(stats, "PARTITION_DOCUMENTS", 50)
    (found,) = stats.measure_shards([open_source(directory)], workers, 5, Progress("stats", None))
    times = Counter(int(token) for document in documents for token in document)
    lengths = np.array([len(document) for document in documents])
    assert found["num_tokens"] == lengths.sum() and found["num_documents"] == len(documents)
    ranked = sorted(range(VOCABULARY), key=lambda token: (-times[token], token))
    assert found["ids"]["most_frequent"] == [
        {"id": token, "times": times[token]} for token in ranked[:5]
    ]
    assert found["ids"]["unused"] == VOCABULARY - len(times)
    assert found["ids"]["eos_inside_documents"] == 0
    so_far = np.cumsum([times[token] for token in ranked])
    assert found["ids"]["half_of_tokens"] == 1 + sum(so_far < lengths.sum() / 2)
    length = found["length"]
    assert length["mean"] == pytest.approx(lengths.mean())
    assert (length["shortest"], length["longest"]) == (lengths.min(), lengths.max())
    assert length["longest_document"] == lengths.argmax()
    for limit in length["longer_than"]:
        above = lengths[lengths > limit["tokens"]]
        assert (limit["documents"], limit["of_tokens"]) == (len(above), above.sum())
    for share, value in length["quantiles"].items():
        exact = np.quantile(lengths, float(share), method="inverted_cdf")
        assert value == pytest.approx(exact, rel=2 ** (1 / stats.BINS_PER_OCTAVE) - 1, abs=1)
    assert sum(row[1] for row in length["histogram"]) == len(documents)
    assert sum(row[2] for row in length["histogram"]) == lengths.sum()
    same = Counter(tuple(document.tolist()) for document in documents)
    twice = found["duplicates"]
    assert twice["again"] == len(documents) - len(same)
    assert twice["groups"] == sum(count > 1 for count in same.values())
    first: dict[tuple, int] = {}
    for number, document in enumerate(documents):
        first.setdefault(tuple(document.tolist()), number)
    expected = sorted(
        ((-count, first[key]) for key, count in same.items() if count > 1),
    )[: stats.MAX_SHOWN_REPEATS]
    shown = [(-each["times"], each["document"]) for each in twice["most_repeated"]]
    assert shown == expected


def test_the_command_prints_a_table_and_writes_json(corpus, tmp_path):
    directory, documents = corpus
    result = data_prep("stats", directory, "--json", tmp_path / "s.json")
    assert result.returncode == 0, result.stderr
    assert f"documents      {len(documents)}, " in result.stdout
    (found,) = json.loads((tmp_path / "s.json").read_text())["sources"]
    assert found["num_documents"] == len(documents) and math.isfinite(found["length"]["mean"])


def test_unreadable_inputs_and_outputs_are_refused(corpus, tmp_path):
    result = data_prep(
        "stats", corpus[0], tmp_path / "absent", "--json", tmp_path / "no" / "s.json"
    )
    assert result.returncode == 2 and "Traceback" not in result.stderr
    assert "absent: no such directory" in result.stderr and "no is not a directory" in result.stderr
