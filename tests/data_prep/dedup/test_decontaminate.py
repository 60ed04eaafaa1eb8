"""Decontamination: all planted items are found, and nothing else is dropped.

Brute force decides what is contaminated: sets of tuples of words, split one character at a time.
"""

import json
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_prep.dedup.decontaminate import run_decontaminate
from data_prep.dedup.evaluation_items import read_items
from data_prep.dedup.ngram_index import build_index
from data_prep.dedup.options import DecontaminateOptions
from data_prep.read.stage_files import read_records, read_stage
from data_prep.stages.documents import stage_documents
from data_prep.tasks.phases import LocalExecutor
from tests.data_prep.dedup.near_copies import shingles_of, words_of
from tests.data_prep.small_corpus import data_prep
from tests.data_prep.stage_cases import documents_of, write_stage
from tests.texts import items, paragraphs
from zerolm.common.errors import ConfigError

NUM_ITEMS = 30


def filler(generator: random.Random, count: int) -> list[str]:
    """Return random words."""
    words = sorted({word for text in paragraphs()[:300] for word in text.split()})
    return [generator.choice(words) for _ in range(count)]


def variants(text: str, generator: random.Random) -> list[str]:
    """Return an item in forms that it may have in a corpus."""
    words = text.split()
    marks = [word + generator.choice([",", ".", "!", " --", "”"]) for word in words]
    broken = ["".join(generator.choice(["\n", "\r\n\r\n\t", " "]) + word) for word in words]
    return [
        text,
        text.upper(),
        " ".join(word.capitalize() for word in words),
        "«" + " ".join(marks) + "»",
        "".join(broken),
        " ".join([*filler(generator, 2000), text, *filler(generator, 2000)]),
        " ".join([*filler(generator, 1), *words_of(text)[:13]]),  # the first n-gram alone
        " ".join([*words_of(text)[-13:], *filler(generator, 1)]),
    ]


@pytest.fixture(scope="module")
def hellaswag(tmp_path_factory) -> Path:
    """Items of HellaSwag's form whose texts have 13 words or more."""
    long = [item for item in items(200, seed=5) if len(item["ctx"].split()) >= 13][:NUM_ITEMS]
    path = tmp_path_factory.mktemp("evaluation") / "hellaswag.jsonl"
    path.write_text("".join(json.dumps(item) + "\n" for item in long))
    return path


@pytest.fixture(scope="module")
def corpus(hellaswag) -> list[tuple[str, bool]]:
    """Documents, and whether an item was planted in each."""
    generator = random.Random(7)
    documents = []
    for line in hellaswag.read_text().splitlines():
        item = json.loads(line)
        ending = item["endings"][generator.randrange(4)]
        for text in variants(f"{item['ctx']} {ending}", generator):
            documents.append((text, True))
        words = words_of(f"{item['ctx']} {ending}")
        start = generator.randrange(len(words) - 11)
        shared = words[start : start + 12]  # one word too few
        around = filler(generator, 400)
        documents.append((" ".join([*around[:200], "qqq", *shared, "qqq", *around[200:]]), False))
        gap = [*words[:12], "qqq", *words[12:24], "qqq", *words[24:36]]
        documents.append((" ".join(gap), False))
        documents.append((" ".join(around), False))
    generator.shuffle(documents)
    return documents


def run(source: Path, output: Path, workers: int = 1, **options) -> tuple[dict, list, list]:
    documents = stage_documents(read_stage(source))
    manifest = run_decontaminate(
        DecontaminateOptions(**options), documents, output, LocalExecutor(workers)
    )
    return manifest, documents_of(output), list(read_records(output / "contaminated.jsonl.zst"))


def test_documents_with_planted_items_are_dropped_and_no_others(hellaswag, corpus, tmp_path):
    source = write_stage(tmp_path / "in", [text for text, _ in corpus], 250)
    manifest, kept, dropped = run(source, tmp_path / "out", evaluation=(str(hellaswag),))
    expected = [f"d{number}" for number, (_, planted) in enumerate(corpus) if not planted]
    assert [record["id"] for record in kept] == expected
    assert kept == [record for record in documents_of(source) if record["id"] in set(expected)]
    assert manifest["dropped"] == {"contaminated": 8 * NUM_ITEMS} and manifest["items"] == NUM_ITEMS
    lines = hellaswag.read_text().splitlines()
    for note in dropped:  # check each note
        words = words_of(corpus[int(note["id"][1:])][0])
        found = note["words"].split()
        assert words[note["at_word"] : note["at_word"] + 13] == found and len(found) == 13
        place, _, line = note["item"].rpartition(":")
        item = json.loads(lines[int(line) - 1])
        texts = [f"{item['ctx']} {ending}" for ending in item["endings"]]
        bare = [
            text.replace(mark, " ") for text in texts for mark in ("[title]", "[header]", "[step]")
        ]
        assert place == str(hellaswag)
        assert any(tuple(found) in shingles_of(text) for text in [*texts, *bare])


def test_matches_equal_those_of_sets_of_ngrams(tmp_path):
    """Random texts of few distinct words, so that matches, repeats and near misses occur."""
    generator = random.Random(2)
    texts = [" ".join(generator.choices("ab", k=generator.randrange(0, 40))) for _ in range(400)]
    held = [" ".join(generator.choices("ab", k=generator.randrange(3, 14))) for _ in range(30)]
    held += [" ".join(generator.choices("abc", k=30)) for _ in range(5)]
    (tmp_path / "held.txt").write_text("\n\n".join(held))
    source = write_stage(tmp_path / "in", texts, 100)
    for ngram_index in (0.0, 0.2):
        _, kept, _ = run(
            source, tmp_path / f"out-{ngram_index}", evaluation=(str(tmp_path / "held.txt"),),
            ngram_words=10, min_item_words=7, min_overlap=ngram_index,
        )  # fmt: skip
        expected = []
        for number, text in enumerate(texts):
            for item in held:
                size = min(10, len(item.split()))
                runs = shingles_of(item, size)
                common = len(runs & shingles_of(text, size))
                if size >= 7 and common and common >= ngram_index * len(runs):
                    break
            else:
                expected.append(f"d{number}")
        assert [record["id"] for record in kept] == expected and 50 < len(expected) < 390


def test_short_items_are_matched_in_full_and_very_short_ones_are_counted(tmp_path):
    held = {
        "q": "Who wrote the Annals of Xanadu?",
        "a": ["Nobody did.", "It was the old emperor himself"],
    }
    path = tmp_path / "set.jsonl"
    path.write_text(json.dumps(held) + "\n")
    texts = [
        "He asked: who wrote THE annals, of Xanadu? Silence.",
        "who wrote the annals of xanadus",
        "so who wrote the annals",
        "nobody did.",
        "it was the old emperor himself!",
    ]
    source = write_stage(tmp_path / "in", texts, 10)
    manifest, kept, dropped = run(source, tmp_path / "out", evaluation=(f"{path}:q,a",))
    assert [record["id"] for record in kept] == ["d1", "d2", "d3"]
    assert manifest["texts_too_short"] == 1 and manifest["texts"] == 3
    assert dropped[0] == {
        "item": f"{path}:1", "words": "who wrote the annals of xanadu", "at_word": 2,
        "overlap": 1.0, "id": "d0",
    }  # fmt: skip


def test_a_collision_of_hashes_drops_nothing(monkeypatch):
    from data_prep.dedup import ngram_index
    from data_prep.dedup.word_hashes import hash_ngrams

    def colliding(words, ends, length):
        hashes, ngram_ends = hash_ngrams(words, ends, length)
        return hashes & ~hashes, ngram_ends  # every n-gram has the hash 0

    monkeypatch.setattr(ngram_index, "hash_ngrams", colliding)
    index = build_index([ngram_index.Item("f:1", ["one two three"])], 3, 1)
    assert [match.document for match in index.find(["four five six", "One, two: three"], 0)] == [1]


@pytest.mark.parametrize(
    "name",
    ["a.txt", "a.md", "a.jsonl", "a.json", "a.ndjson", "a.jsonl.gz", "a.jsonl.zst", "a.parquet"],
)
def test_items_are_read_from_every_kind_of_file(tmp_path, name):
    path, texts = tmp_path / name, ["first item\nof two lines", "zweites Stück"]
    if name.endswith(".parquet"):
        pq.write_table(pa.table({"text": texts, "n": [1, 2]}), path)
    elif name.endswith((".txt", ".md")):
        path.write_text(f"\n{texts[0]}\n \n\n{texts[1]}\n")
    else:
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
        compression = {".gz": "gzip", ".zst": "zstd"}.get(path.suffix)
        with pa.output_stream(str(path), compression=compression) as stream:
            stream.write(lines)
    found = read_items(str(path))
    assert [item.texts[0].strip() for item in found] == texts
    assert [item.place for item in found] == [f"{path}:1", f"{path}:2"]


def test_a_field_may_be_inside_an_object(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"question": {"stem": "What?", "choices": ["a", "b"]}}))
    (item,) = read_items(f"{path}:question.stem,question.choices")
    assert item.texts == ["What?", "a", "b"]
    with pytest.raises(ConfigError, match=r"no key 'question\.x'"):
        read_items(f"{path}:question.x")


@pytest.mark.soak
def test_dedup_and_decontaminate_run_in_sequence_as_commands(hellaswag, corpus, tmp_path):
    texts = [text for text, _ in corpus[:80]] * 2
    raw = tmp_path / "raw.jsonl"
    raw.write_text("".join(json.dumps({"text": text, "url": "u"}) + "\n" for text in texts) + "x\n")
    words = ("--input", raw, "--output", tmp_path / "one", "--workers", 1)
    refused = data_prep("dedup", *words)  # its last line is not a document
    assert refused.returncode == 2 and f"{raw}:161: not valid JSON" in refused.stderr
    words += ("--on_bad_input", "skip")
    result = data_prep("dedup", *words)
    assert "skipped     1 lines that are not JSON" in result.stdout
    assert result.returncode == 0, result.stderr
    assert "160 -> " in result.stdout and "exact duplicate" in result.stdout
    first = documents_of(tmp_path / "one")[0]
    assert first == {"id": f"{raw}:0", "text": texts[0], "url": "u"}
    words = ("--input", tmp_path / "one", "--output", tmp_path / "two", "--workers", 1)
    result = data_prep("decontaminate", *words, "--evaluation", hellaswag)
    assert result.returncode == 0, result.stderr
    planted = sum(planted for _, planted in corpus[:80])
    dropped = list(read_records(tmp_path / "two" / "contaminated.jsonl.zst"))
    near = list(read_records(tmp_path / "one" / "duplicates.jsonl.zst"))
    assert len(documents_of(tmp_path / "two")) + len(dropped) + len(near) == 160
    assert f"{len(dropped)} contaminated" in result.stdout and len(dropped) <= planted
    again = data_prep("decontaminate", *words, "--evaluation", hellaswag)  # nothing to do
    assert again.returncode == 0 and "decontaminate.scan" not in again.stderr


def test_every_problem_is_reported_and_nothing_is_written(tmp_path):
    (tmp_path / "set.jsonl").write_text('{"question": "x"}\nno json\n')
    (tmp_path / "set.bin").write_text("")
    (tmp_path / "set.csv").write_text("question\nx\n")  # which --input reads
    result = data_prep(
        *("decontaminate", "--input", tmp_path / "absent.jsonl", "--output", tmp_path / "out"),
        *("--evaluation", tmp_path / "set.jsonl", f"{tmp_path / 'set.jsonl'}:qestion"),
        *(tmp_path / "set.bin", tmp_path / "set.csv", "--min_overlap", 2, "--min_item_words", 20),
    )
    assert result.returncode == 2 and "Traceback" not in result.stderr
    shown = result.stderr
    assert "--min_overlap 2: is not a number from 0 to 1." in shown
    assert "line 2" in shown and "set.bin: is not one of" in shown and "absent.jsonl" in shown
    assert "set.csv: is not one of" in shown
    assert "--min_item_words: 20 is greater than ngram_words" in shown
    assert not (tmp_path / "out").exists()
    (tmp_path / "lfs.txt").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:7\n")
    with pytest.raises(ConfigError, match=r"lfs\.txt: is a pointer of Git LFS"):
        read_items(str(tmp_path / "lfs.txt"))
    (tmp_path / "set.jsonl").write_text('{"question": "x"}\n')
    with pytest.raises(ConfigError, match=r"no key 'qestion'.*Did you mean .question"):
        read_items(f"{tmp_path / 'set.jsonl'}:qestion")
