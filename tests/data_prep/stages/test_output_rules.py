"""Stages are never written over other files, nor where they would be read as input."""

import json
import os
import random
import resource
import subprocess
import sys

import pytest

from data_prep.__main__ import main
from data_prep.read.stage_files import StageWriter, stage_file
from tests import ROOT
from tests.data_prep.small_corpus import write_jsonl

TEXTS = [f"Document {n} has a few words." for n in range(5)]


def write_shard(directory) -> bytes:
    """Write a file of documents that is named as in a stage, and return its bytes."""
    with StageWriter(directory / stage_file(0)) as writer:
        for number, text in enumerate(TEXTS):
            writer.write({"text": text, "id": number}, len(text))
        writer.close()
    return (directory / stage_file(0)).read_bytes()


def command(name, *words) -> list[str]:
    more = {"clean": ("--filters", "filters.json"), "decontaminate": ("--evaluation", "e.txt")}
    return [name, *more.get(name, ()), *map(str, words)]


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "filters.json").write_text('[{"filter": "length", "min_words": 2}]')
    (tmp_path / "e.txt").write_text("a paragraph that has six words\n")
    write_shard(tmp_path / "corpus")
    return tmp_path / "corpus"


@pytest.mark.parametrize("name", ["clean", "dedup", "decontaminate"])
@pytest.mark.parametrize("output", ["corpus", "corpus/new", "others", "filters.json/x"])
def test_no_stage_is_written_over_other_files_or_among_its_input(name, output, corpus, capsys):
    others = corpus.parent / "others"
    write_shard(others)
    before = {path: path.stat().st_mtime_ns for path in sorted(corpus.parent.rglob("*"))}
    assert main(command(name, "--input", "corpus", "--output", output, "--workers", 1)) == 2
    assert f"--output {output}: " in capsys.readouterr().err
    after = {path: path.stat().st_mtime_ns for path in sorted(corpus.parent.rglob("*"))}
    assert after == before


@pytest.mark.parametrize("directory", ["corpus", "out", "others", "."])
def test_dropped_documents_are_only_written_to_a_new_directory(directory, corpus, capsys):
    write_shard(corpus.parent / "others")
    words = command("clean", "--input", "corpus", "--output", "out", "--keep_dropped", directory)
    assert main(words) == 2
    assert f"--keep_dropped {directory}: " in capsys.readouterr().err
    assert not (corpus.parent / "out").exists()


@pytest.mark.parametrize("name", ["clean", "dedup", "decontaminate"])
def test_a_full_disk_prints_one_line_and_leaves_no_file(name, corpus):
    """A limit on the size of files makes the kernel fail the write in the same way."""
    texts = ["two " + random.Random(n).randbytes(40000).hex() for n in range(50)]
    write_jsonl(corpus / "a.jsonl", texts)
    (corpus / stage_file(0)).unlink()
    result = subprocess.run(
        [sys.executable, "-m", "data_prep", *command(name, "--input", "corpus", "--output", "out")]
        + ["--workers", "1"] + (["--near", "off"] if name == "dedup" else []),
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, 500_000)),
    )  # fmt: skip
    assert result.returncode == 1 and "Traceback" not in result.stderr, result.stderr
    assert "File too large" in result.stderr
    assert not list((corpus.parent / "out").rglob("*.jsonl.zst*"))


def test_a_glob_that_matches_the_output_is_refused(corpus, capsys):
    words = command("clean", "--input", "corpus/**/*.zst", "--output", "corpus/new")
    assert main(words) == 0
    (corpus / "new" / "stage.json").unlink()  # as after a kill
    assert main(words) == 2
    assert "which --input corpus/**/*.zst reads" in capsys.readouterr().err


def test_a_recipe_whose_output_is_inside_its_input_is_refused(corpus, capsys):
    recipe = corpus.parent / "r.json"
    write_jsonl(corpus / "a.jsonl", TEXTS)
    recipe.write_text(json.dumps({"output": "corpus/out", "sources": {"a": {"input": ["corpus"]}}}))
    assert main(["run", str(recipe)]) == 2
    assert "sources.a: output" in capsys.readouterr().err
    assert not (corpus / "out").exists()


def test_filters_that_are_null_are_refused(corpus, capsys):
    (corpus.parent / "filters.json").write_text("null")
    assert main(command("clean", "--input", "corpus", "--output", "out")) == 2
    assert "is not a list of filters" in capsys.readouterr().err
