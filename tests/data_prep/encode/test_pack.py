"""`python -m data_prep pack`: the index, compared with the content of the shards."""

import fcntl
import json
import os

import numpy as np
import pytest

from data_prep.__main__ import main
from data_prep.encode.pack import efficiency, pack
from tests.launching import write_shards
from tests.texts import write_tokenizer
from zerolm.common.errors import ShardError, ShardReadError
from zerolm.config.settings import BEST_FIT
from zerolm.data.packing import index_file, open_packing, verify_packings
from zerolm.data.sources import Sources, source_problems
from zerolm.parts.settings import RunSettings
from zerolm.shards.reader import open_source

SEQ_LEN = 64
SETTINGS = RunSettings(packing=BEST_FIT)


@pytest.fixture
def shards(tmp_path):
    return write_shards(tmp_path / "shards", 400, seed=5)


def documents(source):
    """Return (start, end) of every document, read from the files."""
    found, start = [], 0
    for file in sorted(source.directory.glob("*.idx")):
        base = start
        for end in np.fromfile(file, "<u8").astype(int).tolist():
            found.append((start, base + end))
            start = base + end
    return found


def rows_of(source, packing):
    found = []
    for row in range(packing.num_rows):
        starts, lengths = packing.pieces(row)
        found.append(list(zip(starts.tolist(), lengths.tolist(), strict=True)))
    return found


@pytest.mark.parametrize("block_pieces", [1 << 20, 57])
def test_an_index_contains_every_document_once_and_cuts_only_long_ones(shards, block_pieces):
    source = open_source(shards)
    assert len(source.manifest["shards"]) > 1
    pack(source, SEQ_LEN, block_pieces)
    rows = rows_of(source, open_packing(source, SEQ_LEN))
    assert all(0 < sum(length for _, length in row) <= SEQ_LEN + 1 for row in rows)
    pieces = sorted(piece for row in rows for piece in row)
    expected = []
    for start, end in documents(source):
        while end - start > SEQ_LEN + 1:
            expected.append((start, SEQ_LEN + 1))
            start += SEQ_LEN
        expected.append((start, end - start))
    assert pieces == expected


def test_the_command_prints_padding_and_cut_documents(shards, capsys):
    assert main(["pack", str(shards), "--seq_len", str(SEQ_LEN)]) == 0
    printed = capsys.readouterr().out.splitlines()
    source = open_source(shards)
    concat, best = json.loads(index_file(shards, SEQ_LEN).read_text())["efficiency"]
    ends = [end for _, end in documents(source)]
    windows = (ends[-1] - 1) // SEQ_LEN
    spans = [(w * SEQ_LEN, w * SEQ_LEN + SEQ_LEN + 1) for w in range(windows)]
    cut = [
        end - start
        for start, end in documents(source)
        if not any(first <= start and end <= last for first, last in spans)
    ]
    assert (concat["rows"], concat["cut_documents"]) == (windows, len(cut))
    assert concat["cut_tokens"] == sum(cut)
    long = [end - start for start, end in documents(source) if end - start > SEQ_LEN + 1]
    assert (best["cut_documents"], best["cut_tokens"]) == (len(long), sum(long))
    rows = rows_of(source, open_packing(source, SEQ_LEN))
    held = sum(length for row in rows for _, length in row)
    assert best["padding"] == len(rows) * (SEQ_LEN + 1) - held
    assert printed[0].endswith(f"{len(rows):,} rows") and len(printed) == 4
    assert efficiency(source, SEQ_LEN, {"num_rows": 1, "num_padding": 0})[0].rows == windows


def test_packing_is_deterministic_and_an_existing_index_is_kept(shards, tmp_path):
    source = open_source(shards)
    pack(source, SEQ_LEN)
    before = {path.name: path.read_bytes() for path in shards.glob("packing-*")}
    assert len(before) == 3
    stamp = index_file(shards, SEQ_LEN).stat().st_mtime_ns
    pack(source, SEQ_LEN)
    assert index_file(shards, SEQ_LEN).stat().st_mtime_ns == stamp
    for path in shards.glob("packing-*"):
        path.unlink()
    pack(source, SEQ_LEN)
    assert {path.name: path.read_bytes() for path in shards.glob("packing-*")} == before


def test_a_stale_index_is_refused_and_written_again(shards, tmp_path):
    source = open_source(shards)
    pack(source, SEQ_LEN)
    other = open_source(write_shards(tmp_path / "other", 300, seed=6))
    for path in shards.glob("packing-*"):
        os.replace(path, other.directory / path.name)
    with pytest.raises(ShardError, match=r"built from other tokens\. Run: zerolm data pack"):
        open_packing(other, SEQ_LEN)
    with pytest.raises(ShardError, match=r"no such file.*--seq_len 64 needs it"):
        open_packing(source, SEQ_LEN)
    pack(other, SEQ_LEN)
    assert open_packing(other, SEQ_LEN).manifest["source_fingerprint"] == other.fingerprint


def test_a_damaged_index_is_reported(shards):
    source = open_source(shards)
    pack(source, SEQ_LEN)
    assert verify_packings(source) == []
    file = index_file(shards, SEQ_LEN, "pieces")
    data = bytearray(file.read_bytes())
    data[0] ^= 1
    file.write_bytes(data)
    assert "SHA-256 differs" in verify_packings(source)[0]
    assert main(["verify", str(shards)]) == 2
    with pytest.raises(ShardError, match="SHA-256 differs"):
        raise ShardError(source_problems(Sources([source], [1.0], []), SETTINGS, None, SEQ_LEN))
    file.write_bytes(data[:-12])
    with pytest.raises(ShardError, match=f"has {len(data) - 12} bytes, but its manifest says"):
        open_packing(source, SEQ_LEN)


def test_a_damaged_index_is_written_again(shards):
    source = open_source(shards)
    pack(source, SEQ_LEN)
    for part in ("rows", "pieces"):
        file = index_file(shards, SEQ_LEN, part)
        whole = file.read_bytes()
        file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        pack(source, SEQ_LEN)
        assert file.read_bytes() == whole and verify_packings(source) == []


@pytest.mark.parametrize(("part", "at"), [("pieces", 6), ("pieces", 9), ("rows", 1), ("rows", 6)])
def test_an_impossible_row_is_a_read_error(shards, part, at):
    """Damage after the run started: to the first row's start, its length, or its end."""
    source = open_source(shards)
    pack(source, SEQ_LEN)
    packing, file = open_packing(source, SEQ_LEN), index_file(shards, SEQ_LEN, part)
    data = bytearray(file.read_bytes())
    data[at] ^= 0x80
    file.write_bytes(data)
    with pytest.raises(
        ShardReadError, match=r"row 0 .*the index is damaged\. Run: zerolm data pack"
    ):
        packing.pieces(0)


def test_two_processes_do_not_write_the_same_index(shards):
    source = open_source(shards)
    lock = index_file(shards, SEQ_LEN, "lock")
    with open(lock, "ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(ShardError, match="another process is packing there"):
            pack(source, SEQ_LEN)
    pack(source, SEQ_LEN)  # what a killed one leaves is no obstacle
    assert not lock.exists()


def test_shards_in_a_store_are_refused(shards, capsys):
    assert main(["pack", "s3://bucket/web", f"file://{shards}", "--seq_len", "8"]) == 2
    said = capsys.readouterr().err
    assert "s3://bucket/web: the index is" in said and f"file://{shards}: the index is" in said


def test_a_crash_publishes_no_index(shards, monkeypatch):
    source = open_source(shards)

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("data_prep.encode.pack.order_rows", full)
        with pytest.raises(ShardError, match="No space left on device"):
            pack(source, SEQ_LEN)
    assert not list(shards.glob("packing-*"))


def test_invalid_arguments_are_reported_together(shards, tmp_path, capsys):
    words = ["pack", str(tmp_path / "absent"), str(shards), "--seq_len", "0"]
    assert main(words) == 2
    said = capsys.readouterr().err
    assert "--seq_len 0" in said and "absent" in said
    assert not list(shards.glob("packing-*"))


@pytest.mark.parametrize("words", [["pack", "--seq_len", str(SEQ_LEN)], ["stats"],
                                   ["inspect", "--document", "150"]])  # fmt: skip
def test_commands_refuse_damaged_document_ends(shards, words, capsys):
    write_tokenizer(shards / "tokenizer")
    flip_a_bit(shards / "shard-00001.idx")
    assert main([words[0], str(shards), *words[1:]]) != 0
    assert "shard-00001.idx: its SHA-256 differs" in capsys.readouterr().err
    assert not index_file(shards, SEQ_LEN).exists()


def test_a_run_with_best_fit_refuses_damaged_document_ends(shards):
    source = open_source(shards)
    pack(source, SEQ_LEN)
    assert source_problems(Sources([source], [1.0], []), SETTINGS, None, SEQ_LEN) == []
    flip_a_bit(shards / "shard-00001.idx")
    (line,) = source_problems(Sources([source], [1.0], []), SETTINGS, None, SEQ_LEN)
    assert "shard-00001.idx: its SHA-256 differs" in line and "`zerolm data pack` again" in line


def test_an_index_whose_document_ends_were_not_verified_is_written_again(shards):
    """As older releases did, which packed whatever the file said."""
    source = open_source(shards)
    expected = pack(source, SEQ_LEN)
    path = index_file(shards, SEQ_LEN)
    older = {
        key: value for key, value in expected.items() if key not in ("document_ends", "digest")
    }
    path.write_text(json.dumps({**older, "num_padding": 0}))
    assert open_packing(source, SEQ_LEN).num_rows == expected["num_rows"]
    assert pack(source, SEQ_LEN) == expected == json.loads(path.read_text())


@pytest.mark.parametrize("part", ["rows", "pieces"])
def test_rows_of_a_damaged_index_are_not_shown(shards, part, capsys):
    pack(open_source(shards), SEQ_LEN)
    write_tokenizer(shards / "tokenizer")
    words = ["inspect", str(shards), "--sequence", "7", "--seq_len", str(SEQ_LEN)]
    assert main([*words, "--packing", BEST_FIT]) == 0
    flip_a_bit(index_file(shards, SEQ_LEN, part))
    assert main([*words, "--packing", BEST_FIT]) == 2
    assert f"packing-{SEQ_LEN}.{part}: is damaged: its SHA-256" in capsys.readouterr().err


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[8] ^= 1
    path.write_bytes(content)
