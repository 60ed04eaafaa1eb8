"""`zerolm data convert` names damaged files and wrong flags, and leaves nothing behind."""

import gzip
import json
import os
import resource
import shutil
import signal
import time

import numpy as np
import pytest

from data_prep.finished_shards import mds, megatron, nanogpt, parquet
from data_prep.finished_shards.items import InputFile, Items, ReadOptions
from data_prep.finished_shards.to_shards import Rules, _Reader
from data_prep.tokenizer import load
from tests.data_prep.encode.tokenized import documents_of
from tests.data_prep.finished_shards.conversions import convert, write_megatron
from zerolm.common.errors import ConfigError
from zerolm.shards.writer import ShardWriter


def cut(name, count):
    return lambda root: os.truncate(root / name, (root / name).stat().st_size - count)


def patch(name, place, data):
    def change(root):
        content = bytearray((root / name).read_bytes())
        content[place : place + len(data)] = data
        (root / name).write_bytes(content)

    return change


def null_dim(root):
    """Change an index to what litdata writes without `TokensLoader`."""
    index = json.loads((root / "lit1/index.json").read_text())
    for chunk in index["chunks"]:
        chunk["dim"] = None
    index["config"]["item_loader"] = "PyTreeLoader"
    (root / "lit1/index.json").write_text(json.dumps(index))


def write(name, content):
    return lambda root: (root / name).write_bytes(content)


def flat(*first):
    """Write a flat file with a header of 256 int32 values and 6 ids of uint16."""
    header = np.zeros(256, "<i4")
    header[: len(first)] = first
    return write("a.bin", header.tobytes() + np.arange(6, dtype="<u2").tobytes())


def swap_columns(root):
    """Change the encodings in an index, as if it were another shard's."""
    path = root / "mds1/index.json"
    path.write_text(path.read_text().replace('"ndarray:uint16"', '"ndarray:uint32"'))


def with_modes(root):
    """Mark a sequence of an index as an image, as Megatron-LM's multimodal data do."""
    path = root / "a.idx"
    path.write_bytes(path.read_bytes() + bytes([0, 0, 1, 0, 0]))


@pytest.mark.parametrize(
    ("given", "form", "damage", "expected"),
    [
        ("a", "megatron", cut("a.bin", 2), "a.bin: has 604 bytes, but its index lists 606"),
        ("a", "megatron", cut("a.idx", 8), "has 126 bytes, but needs 134 for its 5 sequences"),
        ("a", "megatron", cut("a.idx", 110), "a.idx: ends after 24 bytes"),
        ("a", "megatron", patch("a.idx", 0, b"X"), "a.idx: does not begin with b'MMIDIDX"),
        ("a", "megatron", patch("a.idx", 17, b"\7"), "a.idx: has version 1 and dtype code 7"),
        ("a", "megatron", patch("a.idx", 34 + 4, b"\2"), "a.idx: sequences from 0 on are not"),
        ("a", "megatron", patch("a.bin", 4, b"\xff\1"), "a.bin: id 511 at position 2 is outside"),
        ("a", "megatron", lambda root: (root / "a.bin").unlink(), "a.bin: no such file"),
        ("mds1", "mds", cut("mds1/shard.00000.mds", 1), "bytes, but index.json lists"),
        ("mds1", "mds", patch("mds1/shard.00000.mds", 0, b"\3"), "contains 3 items, but its index"),
        ("mds1", "mds", patch("mds1/shard.00000.mds", 8, b"\xff"), "not match its offsets"),
        ("mds3", "mds", lambda root: None, "Name the integer type of its bytes"),
        ("mds0", "mds", patch("mds0/index.json", 0, b"x"), "mds0/index.json"),
        ("lit1", "litdata", cut("lit1/chunk-0-1.bin", 2), "chunk-0-1.bin: has 602 bytes"),
        ("lit1", "litdata", patch("lit1/chunk-0-0.bin", 8, b"\x19"), "does not contain 7 ids of 2"),
        (
            "lit1", "litdata", null_dim,
            "index.json: chunks[].dim is null and item_loader is PyTreeLoader",
        ),
        ("absent", "litdata", lambda root: None, "absent/index.json: no such file"),
        ("mds0", "litdata", lambda root: None, "chunks: missing."),
        ("lit1", "mds", lambda root: None, "shards: missing."),
        ("absent", "nanogpt", lambda root: None, "absent: no such file"),
        ("a.bin", "nanogpt", cut("a.bin", 1), "605 bytes, which is not a multiple of 2 bytes"),
        ("a.bin", "nanogpt", flat(20250101, 1, 6), "with the numbers [20250101, 1, 6, 0], but"),
        ("a.bin", "nanogpt", flat(20240520, 2, 6), "with the numbers [20240520, 2, 6, 0], but"),
        ("a.bin", "nanogpt", flat(278895051, 1, 6, 3), "with the numbers [278895051, 1, 6, 3]"),
        ("a.bin", "nanogpt", flat(1, 2, 3), "with the numbers [1, 2, 3, 0], but"),
        ("a.bin", "nanogpt", flat(20240520, 1, 7), "1036 bytes, but its header states 7 ids"),
        ("a.idx", "nanogpt", lambda root: None, "is an index of Megatron: give --from megatron"),
        ("a.bin", "nanogpt", write("a.bin", gzip.compress(b"123")), "is compressed with gzip"),
        ("a.bin", "nanogpt", write("a.bin.metadata", b"gpt2|8"), "with 2 or 4 bytes per id"),
        ("f.npy", "nanogpt", lambda root: np.save(root / "f.npy", np.ones((2, 3))), "(2, 3), not"),
        ("a", "megatron", with_modes, "a.idx: sequence 2 has mode 1: it is an image"),
        ("mds1", "mds", patch("mds1/index.json", 346, b"3"), "version is 3, but only version 2"),
        ("mds1", "mds", swap_columns, "other columns than index.json"),
        ("a.bin", "parquet", lambda root: None, "a.bin: is not Parquet, or is damaged"),
    ],
)  # fmt: skip
def test_damaged_files_are_named_and_leave_nothing(
    peers, tmp_path, tokenizer_directory, capfd, given, form, damage, expected
):
    root = shutil.copytree(peers, tmp_path / "in")
    damage(root)
    words = ["--from", form, "--tokenizer", tokenizer_directory, "--output", tmp_path / "out"]
    assert convert(root / given, *words) == 2
    error = capfd.readouterr().err
    assert expected in error and "Traceback" not in error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("form", [nanogpt, parquet, megatron, mds])
def test_a_pointer_to_a_file_elsewhere_holds_no_ids(tmp_path, form):
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:7\nsize 1234\n"
    for name in ("a.bin", "a.idx", "a.parquet", "index.json"):
        (tmp_path / name).write_text(pointer)
    given = [tmp_path, *([tmp_path / "a.bin"] if form is nanogpt else [])]
    for path in given:
        with pytest.raises(ConfigError, match="is a pointer of Git LFS, not the file itself"):
            form.find(path, ReadOptions())


def test_a_file_that_is_rewritten_while_it_is_read_is_refused(tmp_path):
    path = tmp_path / "a.bin"
    path.write_bytes(bytes(8))

    def read():
        yield Items(np.array([1, 0]), np.array([2]))
        time.sleep(0.02)  # file systems count time in steps of up to 10 ms
        path.write_bytes(bytes(8))

    tokenizer = load.Tokenizer(str(tmp_path), 4, 0, "0", lambda directory: None)
    file = InputFile(path, "document", 8, 2, read)
    with pytest.raises(ConfigError, match=r"a\.bin: was written to or replaced"):
        list(_Reader([file], tokenizer, Rules()).documents())


def test_ids_that_end_in_no_eos_are_refused(tmp_path, tokenizer_directory, capfd):
    np.full(100, 5, "<u2").tofile(tmp_path / "train.bin")
    words = ["--from", "nanogpt", "--output", tmp_path / "s", "--tokenizer", tokenizer_directory]
    assert convert(tmp_path / "train.bin", *words) == 2
    assert "document 0 ends with id 5, not with the tokenizer's EOS id" in capfd.readouterr().err
    assert not (tmp_path / "s").exists()


def test_every_problem_is_named_before_anything_is_written(corpus, tmp_path, capfd):
    one, _, tokenizer = corpus
    flags = ["--column", "x", "--dtype", "int8", "--boundaries", "items"]
    words = ["--from", "nanogpt", "--output", one, "--shard_tokens", 0, *flags]
    (tmp_path / "some.bin").write_bytes(b"12")
    assert convert(tmp_path / "some.bin", tmp_path / "absent", *words) == 2
    error = capfd.readouterr().err
    for expected in ("already holds token shards", "--tokenizer: is missing", "--column: does not",
                     "files have no items", "--shard_tokens 0", "--dtype int8: is not one of",
                     "absent: no such file"):  # fmt: skip
        assert expected in error, expected
    words = ["--from", "megatron", "--output", tmp_path / "o", "--tokenizer", tokenizer]
    assert convert(one, *words) == 2
    assert "holds token shards already. Give it to --data" in capfd.readouterr().err


def test_a_full_disk_and_a_kill_leave_nothing_to_be_mistaken(corpus, tmp_path, capfd):
    one, two, tokenizer = corpus
    given = write_megatron(tmp_path / "m", documents_of(one) + documents_of(two))
    flags = [given, "--from", "megatron", "--tokenizer", tokenizer]
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    try:
        assert convert(*flags, "--output", tmp_path / "new") == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    error = capfd.readouterr().err
    assert "cannot be written (File too large)" in error and "Traceback" not in error
    assert not (tmp_path / "new").exists()
    child = os.fork()
    if child == 0:
        ShardWriter.finish_shard = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        convert(*flags, "--output", tmp_path / "new")
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    assert not (tmp_path / "new" / "manifest.json").exists()
    assert convert(*flags, "--output", tmp_path / "new") == 0
    assert convert(*flags, "--output", tmp_path / "expected") == 0
    files = {path.name for path in (tmp_path / "new").iterdir()}
    assert files == {path.name for path in (tmp_path / "expected").iterdir()}
    for name in files - {"manifest.json", "tokenizer"}:
        expected = (tmp_path / "expected" / name).read_bytes()
        assert (tmp_path / "new" / name).read_bytes() == expected, name
