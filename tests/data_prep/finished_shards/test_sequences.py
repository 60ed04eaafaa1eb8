"""`python -m data_prep inspect` and `verify`: what training would read, as text."""

import json

import numpy as np
import pytest
from transformers import AutoTokenizer

from data_prep.__main__ import main
from tests.data_prep.small_corpus import TEXTS, data_prep, write_jsonl
from zerolm.data.window_text import read_window
from zerolm.shards.reader import open_source

SEQ_LEN = 24


@pytest.fixture(scope="module")
def shards(tmp_path_factory, tokenizer_directory):
    """The small corpus in shards of few documents."""
    directory = tmp_path_factory.mktemp("inspect")
    write_jsonl(directory / "a.jsonl", TEXTS)
    result = data_prep(
        *("tokenize", "--input", directory / "a.jsonl", "--tokenizer", tokenizer_directory),
        *("--output", directory / "s", "--shard_tokens", 100, "--workers", 1),
    )
    assert result.returncode == 0, result.stderr
    return directory / "s"


def all_ids(shards) -> np.ndarray:
    files = json.loads((shards / "manifest.json").read_text())["shards"]
    return np.concatenate([np.fromfile(shards / each["file"], "<u2") for each in files])


def test_windows_start_every_seq_len_tokens_and_name_their_documents(shards):
    """Each window and document against plain slices of all ids."""
    source, ids = open_source(shards), all_ids(shards)
    assert len(source.manifest["shards"]) > 2
    document_of = np.cumsum(np.r_[0, ids[:-1] == 0])
    for window in range((len(ids) - 1) // SEQ_LEN):
        start = window * SEQ_LEN
        parts = read_window(source, window, SEQ_LEN)
        shown = np.concatenate([part.token_ids for part in parts])
        assert shown.tolist() == ids[start : start + SEQ_LEN + 1].tolist()
        numbers = np.repeat([part.document for part in parts], [len(p.token_ids) for p in parts])
        assert numbers.tolist() == document_of[start : start + SEQ_LEN + 1].tolist()
        for part in parts:
            document = ids[document_of == part.document]
            assert part.length == len(document)
            assert part.token_ids.tolist() == document[part.start : part.stop].tolist()


def test_the_command_shows_the_text(shards):
    result = data_prep("inspect", shards, "--sequence", 2, "--seq-len", SEQ_LEN)
    assert result.returncode == 0, result.stderr
    ids = all_ids(shards)[2 * SEQ_LEN : 3 * SEQ_LEN + 1]
    text = AutoTokenizer.from_pretrained(shards / "tokenizer").decode(ids)
    lines = [line for line in result.stdout.splitlines()[1:] if not line.startswith("--- document")]
    assert "".join(lines) == text.replace("\n", "")
    assert "window 2, tokens 48 to 73, documents 1 to 2 of 7" in result.stdout
    assert "--- document 1 (" in result.stdout


def test_a_document_and_its_json(shards):
    ids = all_ids(shards)
    ends = np.flatnonzero(ids == 0) + 1
    result = data_prep("inspect", shards, "--document", 3, "--json")
    (found,) = [json.loads(line) for line in result.stdout.splitlines()]
    (document,) = found["documents"]
    text = AutoTokenizer.from_pretrained(shards / "tokenizer").decode(ids[ends[2] : ends[3]])
    assert document["text"] == text and document["num_tokens"] == ends[3] - ends[2]
    assert (document["document"], document["start"], document["stop"]) == (3, 0, ends[3] - ends[2])


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--sequence", "99", "--seq_len", "24"], "--sequence 99: "),
        (["--sequence", "-1", "--seq_len", "0"], "--sequence -1: is not a whole number"),
        (["--sequence", "0", "--seq_len", "9999"], "are too few for a window of --seq_len 9999"),
        (["--sequence", "0"], "--sequence: needs --seq_len"),
        (["--document", "7"], "--document 7: "),
        (["--document", "0", "--seq_len", "24"], "--seq_len 24: does not apply to --document"),
        ([], "needs --sequence N or --document N"),
        (["--sequence", "0", "--document", "0"], "needs --sequence N or --document N"),
    ],
)
def test_windows_that_do_not_exist_are_refused(shards, words, named, capsys):
    assert main(["inspect", str(shards), *words]) == 2
    assert named in capsys.readouterr().err


def test_verify_exits_with_2_on_any_damage(shards, tmp_path):
    assert data_prep("verify", shards).stdout.startswith(f"{shards}: complete. 7 documents, ")
    data = bytearray((shards / "shard-00001.bin").read_bytes())
    data[0] ^= 1
    (tmp_path / "copy").mkdir()
    for path in shards.rglob("*"):
        target = tmp_path / "copy" / path.relative_to(shards)
        if path.is_dir():
            target.mkdir()
        else:
            target.write_bytes(path.read_bytes())
    (tmp_path / "copy" / "shard-00001.bin").write_bytes(data)
    result = data_prep("verify", shards, tmp_path / "copy", tmp_path / "absent")
    assert result.returncode == 2 and "complete" in result.stdout
    _, first, second = result.stderr.splitlines()
    assert "shard-00001.bin: SHA-256" in first and "absent: no such directory" in second
