"""Deduplication, compared with brute force: every pair, exact Jaccard index, plain Python."""

import itertools
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from data_prep.dedup.dedup import run_dedup
from data_prep.dedup.minhash import choose_bands
from data_prep.dedup.options import DedupOptions
from data_prep.read.stage_files import read_records, read_stage
from data_prep.stages.documents import stage_documents
from data_prep.stages.options import parse_options
from data_prep.tasks.phases import LocalExecutor
from tests import ROOT
from tests.data_prep.dedup.near_copies import planted_texts, shingles_of, similar_pairs, words_of
from tests.data_prep.stage_cases import documents_of, write_stage
from zerolm.common.errors import ConfigError
from zerolm.common.files import sha256_file

SHORT = ["a short one", "a short one", "A short one!", "", "", "--"]


@pytest.fixture(scope="module")
def texts() -> list[str]:
    planted = planted_texts(40, 4, seed=3)
    template = " ".join(f"row{n} of a page that is made from one template" for n in range(60))
    pages = [f"{template} {n}" for n in range(40)]
    return planted + planted[:9] + [planted[9].upper().replace(" ", "  ")] + SHORT + pages


@pytest.fixture(scope="module")
def pairs(texts) -> dict[tuple[int, int], float]:
    return similar_pairs(texts, 0.5)


def run(source: Path, output: Path, workers: int = 1, **options) -> tuple[dict, list, list]:
    documents = stage_documents(read_stage(source))
    chosen = DedupOptions(**options)
    manifest = run_dedup(chosen, documents, output, LocalExecutor(workers))
    return manifest, documents_of(output), list(read_records(output / "duplicates.jsonl.zst"))


def expected_kept(texts, pairs, threshold, exact=lambda text: text) -> set[int]:
    """Return the documents to keep, by the rule of docs/deduplication.md."""
    seen: dict = {}
    models = [n for n, text in enumerate(texts) if seen.setdefault(exact(text), n) == n]
    kept: set[int] = set()
    for number in models:
        similarities = [pairs.get((min(number, k), max(number, k)), 0) for k in kept]
        if not any(similarity >= threshold for similarity in similarities):
            kept.add(number)
    return kept


@pytest.fixture(scope="module")
def source(texts, tmp_path_factory) -> Path:
    return write_stage(tmp_path_factory.mktemp("dedup") / "clean", texts, 130)


@pytest.mark.parametrize("threshold", [0.8, 0.6])
def test_kept_documents_equal_those_of_brute_force(source, texts, pairs, tmp_path, threshold):
    manifest, kept, duplicates = run(source, tmp_path / "out", threshold=threshold)
    expected = expected_kept(texts, pairs, threshold)
    assert [record["id"] for record in kept] == [f"d{number}" for number in sorted(expected)]
    assert kept == [record for record in documents_of(source) if record in kept]  # unchanged
    assert manifest["documents_in"] == len(texts) == len(kept) + len(duplicates)
    assert sum(manifest["dropped"].values()) == len(duplicates) > 80
    for note in duplicates:
        dropped, model = int(note["id"][1:]), int(note["kept"][1:])
        assert model in expected and dropped not in expected
        if note["kind"] == "exact":
            assert texts[dropped] == texts[model] and note["similarity"] == 1.0
        else:
            assert note["similarity"] == pytest.approx(
                pairs[min(dropped, model), max(dropped, model)]
            )
            assert note["similarity"] >= threshold and texts[dropped] != texts[model]


@pytest.mark.parametrize("exact", ["text", "words"])
def test_only_exact_copies_are_dropped_without_near_duplicates(source, texts, tmp_path, exact):
    manifest, kept, duplicates = run(source, tmp_path / "out", exact=exact, near=False)
    key = {"text": lambda text: text, "words": lambda text: tuple(words_of(text))}[exact]
    expected = expected_kept(texts, {}, 0.8, exact=key)
    assert {record["id"] for record in kept} == {f"d{number}" for number in expected}
    assert manifest["dropped"] == {"exact_duplicate": len(duplicates)}
    assert all(key(texts[int(n["id"][1:])]) == key(texts[int(n["kept"][1:])]) for n in duplicates)


def test_results_do_not_depend_on_files_memory_or_workers(source, texts, tmp_path):
    _, kept, duplicates = run(source, tmp_path / "one")
    other = write_stage(tmp_path / "clean", texts, 90)
    _, again, notes = run(other, tmp_path / "two", workers=2, memory_bytes=1 << 20)
    assert again == kept and notes == duplicates


def test_comparisons_in_a_large_bucket_are_limited(tmp_path):
    template = " ".join(f"word{n}" for n in range(200))
    texts = [f"{template} {n}" for n in range(600)]
    manifest, kept, _ = run(write_stage(tmp_path / "in", texts, 300), tmp_path / "out")
    assert [record["id"] for record in kept] == ["d0"]
    assert manifest["candidate_pairs"] < 16 * len(texts) * 18 < math.comb(len(texts), 2)


KILLED = """
import sys
from pathlib import Path
from data_prep.dedup.dedup import run_dedup
from data_prep.dedup.options import DedupOptions
from data_prep.tasks.phases import LocalExecutor
from data_prep.stages.documents import stage_documents
from data_prep.stages.options import parse_options
from data_prep.read.stage_files import read_stage
run_dedup(DedupOptions(), stage_documents(read_stage(sys.argv[1])), Path(sys.argv[2]),
          LocalExecutor(1))
"""


def test_a_killed_run_resumes_with_the_same_bytes(source, tmp_path):
    run(source, tmp_path / "whole")
    command = [sys.executable, "-c", KILLED, str(source), str(tmp_path / "cut")]
    stages = ["dedup.signatures", "dedup.buckets", "dedup.members", "dedup.write"]
    for stage in stages:  # killed later each time, when the first record of the phase is written
        first = tmp_path / "cut" / ("" if stage == "dedup.write" else "work") / "records" / stage
        process = subprocess.Popen(command, cwd=ROOT)
        deadline = time.monotonic() + 60
        while process.poll() is None and not (first / "00000.json").exists():
            assert time.monotonic() < deadline
            time.sleep(0.001)
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
        process.wait()
        assert (first / "00000.json").exists() or (tmp_path / "cut" / "stage.json").exists()
    run(source, tmp_path / "cut")
    assert files_of(tmp_path / "cut") == files_of(tmp_path / "whole")
    assert not (tmp_path / "cut" / "work").exists()


def files_of(directory: Path) -> dict[str, str]:
    return {
        path.name: sha256_file(path)
        for path in directory.iterdir()
        if path.name.endswith((".jsonl.zst", "stage.json"))
    }


def test_a_finished_stage_is_kept_and_one_with_other_options_is_replaced(source, tmp_path):
    first, _, _ = run(source, tmp_path / "out")
    before = (tmp_path / "out" / "stage.json").stat().st_mtime_ns
    assert run(source, tmp_path / "out", memory_bytes=1 << 22)[0] == first
    assert (tmp_path / "out" / "stage.json").stat().st_mtime_ns == before
    other, kept, _ = run(source, tmp_path / "out", near=False)
    assert other["documents_out"] == len(kept) > first["documents_out"]


@pytest.mark.parametrize("threshold", [0.5, 0.7, 0.8, 0.9, 1.0])
def test_bands_find_999_of_1000_pairs_at_the_threshold(threshold):
    bands, rows = choose_bands(threshold)
    assert bands * rows <= 128

    def probability(similarity: float) -> float:
        return 1 - (1 - similarity**rows) ** bands

    assert probability(threshold) >= 0.999 and probability(0.05) < 0.1
    curve = [probability(step / 100) for step in range(101)]
    assert curve == sorted(curve) and curve[0] == 0 and curve[100] == 1


def test_signatures_agree_as_often_as_documents_are_similar(texts):
    """The estimate is unbiased: over many pairs, the share of equal bands is s^rows."""
    from data_prep.dedup.minhash import BandLayout, band_hashes
    from data_prep.dedup.word_hashes import hash_ngrams, hash_words

    long = [text for text in texts if len(shingles_of(text)) > 40][:120]
    hashes = band_hashes(*hash_ngrams(*hash_words(long), 13), BandLayout(128, 1))
    sets = [shingles_of(text) for text in long]
    errors = []
    for one, two in itertools.combinations(range(len(long)), 2):
        similarity = len(sets[one] & sets[two]) / len(sets[one] | sets[two])
        if 0.3 < similarity < 0.95:
            errors.append((hashes[one] == hashes[two]).mean() - similarity)
    assert len(errors) > 30
    assert abs(sum(errors) / len(errors)) < 0.02  # standard deviation of one: at most 0.044
    assert max(map(abs, errors)) < 0.2


def test_all_problems_of_dedup_options_are_reported():
    wrong = {"treshold": 0.8, "shingle_words": 2.5, "exact": 3, "near": 1}
    with pytest.raises(ConfigError) as caught:
        parse_options(DedupOptions, wrong, "r.json: dedup")
    assert len(caught.value.problems) == 4  # values are checked once types are right
    assert 'Did you mean "threshold"?' in caught.value.problems[0]
    with pytest.raises(ConfigError, match=r"dedup\.exact: 'best' is not text or words"):
        parse_options(DedupOptions, {"exact": "best"}, "r.json: dedup")
    assert parse_options(DedupOptions, {"threshold": 1}, "r").threshold == 1
