"""`python -m data_prep tokenize`: refusals before any work, and messages of failures."""

import os
import resource
import subprocess
import sys

import pytest

from data_prep.encode import manifests as shard_manifests
from tests import ROOT
from tests.data_prep.encode.tokenized import files_of, run_here
from tests.data_prep.small_corpus import TEXTS, data_prep, write_jsonl
from zerolm.common.errors import ZerolmError
from zerolm.shards.reader import open_source

BROKEN = {
    "json.jsonl": (b'{"text": "a"}\n{"text": \n', ":2: not valid JSON"),
    "field.jsonl": (b'{"text": "a"}\n{"body": "b"}\n', ":2: no key 'text'"),
    "utf8.jsonl": (b'{"text": "a"}\n{"text": "\xff"}\n', ":2: not UTF-8"),
    "latin.txt": (b"one\ntwo \xe9\n", ":2: not UTF-8"),
    "cut.jsonl.gz": (
        b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03\xabV*I\xad",
        ":1: the compressed data ends too early",
    ),
    "empty.jsonl": (b'\n{"text": ""}\n', "would contain no documents (0 were read, 2 skipped)"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_documents_are_refused_with_file_and_line(tmp_path, tokenizer_directory, name):
    content, named = BROKEN[name]
    (tmp_path / name).write_bytes(content)
    result = data_prep(
        *("tokenize", "--input", tmp_path / name, "--tokenizer", tokenizer_directory),
        *("--output", tmp_path / "s", "--workers", 1),
    )
    assert result.returncode == 2 and result.stdout == ""
    assert named in result.stderr and "Traceback" not in result.stderr
    assert len(result.stderr.splitlines()) == 2, result.stderr  # a heading and the problem
    assert not (tmp_path / "s").exists()


def test_every_problem_of_a_command_is_shown_before_any_work(tmp_path, tokenizer_directory):
    (tmp_path / "file").write_text("")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("")
    result = data_prep(
        *("tokenize", "--input", tmp_path / "absent.jsonl", tmp_path / "file"),
        *("--tokenizer", tmp_path / "none", "--output", tmp_path / "full"),
        *("--val_output", tmp_path / "full" / "val", "--workers", "many", "--shard_tokens", 0),
        *("--val_fraction", 1.5),
    )
    assert result.returncode == 2
    heading, *lines = result.stderr.splitlines()
    assert heading == "python -m data_prep tokenize: refused"
    for words in (
        "--workers many: is not a whole number from 1",
        "--shard_tokens 0: is not a whole number from 1 up",
        "--val_fraction 1.5: is not a number between 0 and 1",
        "is not empty (it contains 'thesis.txt')",
        "must not equal, contain or be inside --output",
        "absent.jsonl: no such file",
        "file is not one of .txt",
        "none: no such directory",
    ):
        assert sum(words in line for line in lines) == 1, (words, result.stderr)
    assert len(lines) == 8
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "full", "thesis.txt"]


def test_finished_shards_are_never_overwritten(tmp_path, tokenizer_directory):
    (tmp_path / "a.txt").write_text("a")
    command = (
        *("tokenize", "--input", tmp_path / "a.txt", "--tokenizer", tokenizer_directory),
        *("--output", tmp_path / "s"),
    )
    assert data_prep(*command).returncode == 0
    before = files_of(tmp_path / "s")
    result = data_prep(*command)
    assert result.returncode == 2 and "already holds token shards" in result.stderr
    assert files_of(tmp_path / "s") == before


@pytest.mark.parametrize(
    ("command", "tail"),
    [
        ("tokenize", ["--tokenizer", "{tokenizer}"]),
        ("train-tokenizer", ["--vocab-size", "300"]),
    ],
)
def test_an_output_inside_its_own_input_is_refused(tmp_path, tokenizer_directory, command, tail):
    """The copy of a tokenizer has text files, which the next command would read as documents."""
    (tmp_path / "a.txt").write_text("a")
    tail = [each.format(tokenizer=tokenizer_directory) for each in tail]
    result = data_prep(command, "--input", tmp_path, "--output", tmp_path / "out", *tail)
    assert result.returncode == 2, result.stderr
    assert f"--output {tmp_path / 'out'}: is inside --input {tmp_path}" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--val_fraction", "0.1"], "--val_fraction: needs --val_output too"),
        (["--val_output", "v"], "--val_output: needs --val_fraction too"),
        (["--worker", "2"], '--worker: no such flag. Did you mean "--workers"?'),
        (["--val_fraction", "1e-9", "--val_output", "{tmp}/v"], "v: would contain no documents"),
    ],
)
def test_contradictory_flags_are_refused(tmp_path, tokenizer_directory, words, named):
    (tmp_path / "a.txt").write_text("a")
    result = data_prep(
        *("tokenize", "--input", tmp_path / "a.txt", "--tokenizer", tokenizer_directory),
        *("--output", tmp_path / "s", *(word.format(tmp=tmp_path) for word in words)),
    )
    assert result.returncode == 2 and named in result.stderr, result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_an_output_that_cannot_be_published_is_reported_with_the_one_that_was(
    tmp_path, tokenizer_directory, monkeypatch
):
    publish = shard_manifests.publish_all

    def publish_with_something_in_the_way(directories, manifests):
        (directories[1].directory / "manifest.json.tmp").mkdir()
        publish(directories, manifests)

    monkeypatch.setattr(shard_manifests, "publish_all", publish_with_something_in_the_way)
    with pytest.raises(ZerolmError) as caught:
        run_here([f"text {number}" for number in range(99)], tmp_path, tokenizer_directory, 0.3)
    assert f"Published: {tmp_path / 'val'}; not published: {tmp_path / 'train'}" in str(
        caught.value
    )
    assert open_source(tmp_path / "val").num_documents > 0
    assert not (tmp_path / "train" / "manifest.json").exists()


def test_a_full_disk_prints_one_line(tmp_path, tokenizer_directory):
    """Simulated by a limit on file sizes, which makes the kernel fail the write in the same way."""
    limit = (tokenizer_directory / "tokenizer.json").stat().st_size
    write_jsonl(tmp_path / "a.jsonl", TEXTS * (limit // 10))
    result = subprocess.run(
        [
            *(sys.executable, "-m", "data_prep", "tokenize", "--workers", "1"),
            *("--input", str(tmp_path / "a.jsonl"), "--tokenizer", str(tokenizer_directory)),
            *("--output", str(tmp_path / "s")),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )
    assert result.returncode == 1 and len(result.stderr.splitlines()) == 1, result.stderr
    assert f"{tmp_path / 's'}: cannot be written" in result.stderr
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_standard_output_is_not_taken_for_a_full_disk(
    tmp_path, tokenizer_directory, unbuffered
):
    write_jsonl(tmp_path / "a.jsonl", TEXTS)
    with open("/dev/full", "w") as full:
        result = subprocess.run(
            [
                *(sys.executable, "-m", "data_prep", "tokenize", "--workers", "1"),
                *("--input", tmp_path / "a.jsonl", "--tokenizer", tokenizer_directory),
                *("--output", tmp_path / "s"),
            ],
            cwd=ROOT,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    assert result.returncode == 1 and len(result.stderr.splitlines()) == 1, result.stderr
    assert "cannot write to standard output (No space left on device)" in result.stderr
    assert "published and complete" in result.stderr and "othing was pub" not in result.stderr
    assert open_source(tmp_path / "s").num_documents == len(TEXTS)
