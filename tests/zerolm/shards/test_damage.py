"""Damaged token shards are found and named."""

import hashlib
import json
import os
from pathlib import Path

import numpy as np
import pytest

from tests.manifests import write_shard_manifest
from tests.zerolm.shards.small_shards import EOS, TOKENIZER, without_fine, write, writer
from zerolm.common.errors import ShardError, ShardReadError
from zerolm.data.window_readers import WindowReader
from zerolm.shards.reader import open_source, verify


def damage_flip(directory: Path) -> None:
    data = bytearray((directory / "shard-00000.bin").read_bytes())
    data[3] ^= 16
    (directory / "shard-00000.bin").write_bytes(data)


def damage_index(directory: Path) -> None:
    np.array([2, 5, 9], "<u8").tofile(directory / "shard-00000.idx")


def damage_truncate(directory: Path) -> None:
    data = (directory / "shard-00000.bin").read_bytes()
    (directory / "shard-00000.bin").write_bytes(data[:-2])


def damage_lose(directory: Path) -> None:
    (directory / "shard-00000.idx").unlink()


@pytest.mark.parametrize(
    ("damage", "named", "also_on_opening"),
    [
        (damage_flip, "shard-00000.bin: SHA-256", False),
        (damage_index, "shard-00000.idx: SHA-256", False),
        (damage_truncate, "shard-00000.bin: 16 bytes, but the manifest says 18", True),
        (damage_lose, "shard-00000.idx: the manifest lists it", True),
    ],
)
def test_damage_is_found_and_named(tmp_path, damage, named, also_on_opening):
    directory = write(tmp_path / "s")
    damage(directory)
    with pytest.raises(ShardError, match=named):
        verify(directory)
    if also_on_opening:
        with pytest.raises(ShardError, match=named):
            open_source(directory)


def test_all_damage_is_listed(tmp_path):
    directory = write(tmp_path / "s")
    damage_truncate(directory)
    damage_lose(directory)
    with pytest.raises(ShardError) as caught:
        open_source(directory)
    assert len(caught.value.problems) == 2


def with_tokenizer(directory: Path) -> Path:
    """Write shards with a tokenizer of one file."""
    content = b"{}"
    entry = {
        "file": "tokenizer.json",
        "size_bytes": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
    }
    with writer(directory) as open_writer:
        open_writer.tokenizer = {**TOKENIZER, "files": [entry]}
        (directory / "tokenizer").mkdir()
        (directory / "tokenizer" / "tokenizer.json").write_bytes(content)
        open_writer.add(np.array([1, EOS]))
    verify(directory)
    return directory / "tokenizer"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda copy: (copy / "tokenizer.json").write_bytes(b"[]"), r"tokenizer\.json: SHA-256"),
        (lambda copy: (copy / "tokenizer.json").unlink(), r"tokenizer\.json: the manifest lists"),
        (lambda copy: (copy / "custom.py").touch(), r"custom\.py: is not in the manifest"),
    ],
)
def test_a_changed_copy_of_the_tokenizer_is_found_and_never_loaded(tmp_path, change, named):
    copy = with_tokenizer(tmp_path / "s")
    assert open_source(tmp_path / "s").tokenizer_directory() == copy
    (copy / ".hidden").touch()
    change(copy)
    with pytest.raises(ShardError, match=named):
        verify(tmp_path / "s")
    with pytest.raises(ShardError, match=named):
        open_source(tmp_path / "s").tokenizer_directory()


def test_verify_checks_the_ids_and_not_only_the_checksums(tmp_path):
    directory = write(tmp_path / "s", [[1, 2], [3, 4]])  # not damaged, but without EOS ids
    with pytest.raises(ShardError, match="does not end in id 0"):
        verify(directory)


def test_a_file_truncated_or_removed_after_the_start_is_named(tmp_path):
    source = open_source(write(tmp_path / "s"))
    for change in (lambda path: os.truncate(path, 4), Path.unlink):
        change(tmp_path / "s" / "shard-00000.bin")
        with pytest.raises(ShardReadError, match=r"shard-00000\.bin: can no longer be opened"):
            source.ids(0, 0, 2)


def test_a_file_truncated_while_it_is_mapped_is_named(tmp_path):
    """Before its blocks are verified. Later a read is a SIGBUS, and the next start names it."""
    source = open_source(write(tmp_path / "s"))
    source.files._open_shard(0)
    os.truncate(tmp_path / "s" / "shard-00000.bin", 4)
    with pytest.raises(
        ShardReadError, match=r"shard-00000\.bin: 4 bytes, but the manifest says 18"
    ):
        source.ids(0, 0, 2)
    with pytest.raises(ShardError, match=r"shard-00000\.bin: 4 bytes, but the manifest says 18"):
        open_source(tmp_path / "s")


def test_a_mapped_file_that_is_removed_can_still_be_read(tmp_path):
    source = open_source(write(tmp_path / "s"))
    source.files._open_shard(0)
    (tmp_path / "s" / "shard-00000.bin").unlink()
    assert source.ids(0, 0, 3).tolist() == [1, 2, EOS]


@pytest.mark.parametrize("kind", ["local", "without checksums", "store"])
def test_an_id_beyond_the_vocabulary_is_named_with_its_shard_and_block(tmp_path, kind):
    """Written by another program: the checksums are right."""
    directory = write(tmp_path / "s", [[7] * 40_000 + [999, EOS]])
    values = json.loads((directory / "manifest.json").read_text())
    values["vocab_size"] = 999
    if kind == "without checksums":
        for key in [key for key in values["shards"][0] if key.startswith("sums")]:
            del values["shards"][0][key]
    write_shard_manifest(directory, values)
    where = r"" if kind == "store" else r" \(bytes from 65536, tokens 32768 to 40002\)"
    named = rf"shard-00000\.bin: block 1{where} contains token id 999, .* manifest's vocabulary"
    with pytest.raises(ShardError, match=named):
        source = open_source(f"file://{directory}" if kind == "store" else directory)
        assert source.ids(0, 0, 5).tolist() == [7] * 5
        source.ids(0, 39_998, 40_002)
    with pytest.raises(ShardError, match="token id 999 is not below the vocabulary size"):
        verify(directory)


def test_damaged_document_ends_are_never_used(tmp_path):
    directory = write(tmp_path / "s")
    index = directory / "shard-00000.idx"
    intact = index.read_bytes()
    for bit in range(8 * len(intact)):
        content = bytearray(intact)
        content[bit // 8] ^= 1 << bit % 8
        index.write_bytes(content)
        with pytest.raises(ShardReadError, match=r"shard-00000\.idx: its SHA-256 differs"):
            open_source(directory).document_ends(0)
    assert len(open_source(directory).index_problems()) == 1
    index.write_bytes(intact)
    source = open_source(directory)
    assert source.document_ends(0).tolist() == [3, 5, 9]
    index.unlink()
    with pytest.raises(ShardReadError, match=r"shard-00000\.idx: cannot be read \(No such file"):
        source.document_ends(0)


def test_damaged_checksums_are_never_used(tmp_path):
    sums = without_fine(write(tmp_path / "s")) / "shard-00000.sums"
    intact = sums.read_bytes()
    for bit in range(8 * len(intact)):
        content = bytearray(intact)
        content[bit // 8] ^= 1 << bit % 8
        sums.write_bytes(content)
        with pytest.raises(ShardReadError, match=r"shard-00000\.sums: its SHA-256 differs"):
            open_source(tmp_path / "s").ids(0, 0, 2)
    source = open_source(tmp_path / "s")
    source.files._open_shard(0)
    source.files._close_shard(0)  # before its checksums were read
    with pytest.raises(ShardReadError, match=r"shard-00000\.sums: its SHA-256 differs"):
        source.ids(0, 0, 2)


def test_damaged_small_checksums_neither_stop_a_run_nor_let_damage_pass(tmp_path):
    """Where one differs, the checksum of the block of 64 KiB decides."""
    directory = write(tmp_path / "s", [[7] * 40_000 + [EOS]])
    fine, data = directory / "shard-00000.fine", directory / "shard-00000.bin"
    intact = bytearray(fine.read_bytes())
    for bit in range(0, 8 * len(intact), 7):
        content = bytearray(intact)
        content[bit // 8] ^= 1 << bit % 8
        fine.write_bytes(content)
        assert open_source(directory).ids(0, 0, 40_001).tolist() == [7] * 40_000 + [EOS]
    with pytest.raises(ShardError, match=r"shard-00000\.fine: SHA-256"):
        verify(directory)
    damaged = bytearray(data.read_bytes())
    damaged[66_000] ^= 1
    data.write_bytes(damaged)
    for content in (intact, bytes(len(intact))):
        fine.write_bytes(content)
        source = open_source(directory)
        assert source.ids(0, 0, 4000).tolist() == [7] * 4000
        with pytest.raises(ShardReadError, match=r"block 1 \(bytes from 65536, tokens 32768 to 40"):
            source.ids(0, 32_990, 33_010)
    (directory / "shard-00000.sums").write_bytes(bytes(16))
    with pytest.raises(ShardReadError, match=r"shard-00000\.sums: its SHA-256 differs"):
        open_source(directory).ids(0, 0, 4000)


def test_windows_with_ids_beyond_the_vocabulary_are_refused_wherever_they_are(tmp_path):
    """Each window alone: the ids of many windows are compared together."""
    directory = write(tmp_path / "s", [[7] * 200 + [999, EOS]])
    manifest = json.loads((directory / "manifest.json").read_text())
    write_shard_manifest(directory, {**manifest, "vocab_size": 999})
    for seq_len in (5, 20):
        reader = WindowReader([open_source(directory)], seq_len)
        shards, offsets = reader.locate(*np.zeros((2, 1), int))
        assert reader.read(shards, offsets).max() == 7
        found = 0
        for window in range(reader.num_windows[0]):
            shards, offsets = reader.locate(np.zeros(2, int), np.array([0, window]))
            if window * seq_len <= 200 <= (window + 1) * seq_len:
                found += 1
                with pytest.raises(ShardReadError, match=r"block 0 .* contains token id 999"):
                    reader.read(shards, offsets)
            else:
                assert reader.read(shards, offsets).max() == 7
        assert found


def test_only_one_process_of_a_node_checks_the_files(tmp_path, monkeypatch):
    (write(tmp_path / "s") / "shard-00000.idx").unlink()
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert open_source(tmp_path / "s").num_tokens == 9
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(ShardError, match="is missing"):
        open_source(tmp_path / "s")
