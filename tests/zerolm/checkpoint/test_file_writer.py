import errno
import fcntl
import os
import resource
from contextlib import contextmanager

import pytest
import torch
import xxhash

from zerolm.checkpoint import file_writer
from zerolm.checkpoint.file_writer import Cancelled, verify_written, write_hashed


def test_torch_reads_what_was_written_and_the_hash_matches_the_file(tmp_path) -> None:
    origin = {"weights": torch.randn(1000, 300), "step": 7}
    entry = write_hashed(tmp_path / "file.pt", origin, lambda: False)
    content = (tmp_path / "file.pt").read_bytes()
    assert entry["xxh3_128"] == xxhash.xxh3_128_hexdigest(content)
    assert entry["size_bytes"] == (tmp_path / "file.pt").stat().st_size
    loaded = torch.load(tmp_path / "file.pt", weights_only=True)
    assert torch.equal(loaded["weights"], origin["weights"]) and loaded["step"] == 7


@contextmanager
def limit_of_file_size(size_bytes: int):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("size_bytes", [1_000, 500_000, 1_199_000])
def test_disk_error_is_raised_wherever_it_occurs(tmp_path, size_bytes) -> None:
    origin = {"first": torch.randn(1000), "second": torch.randn(300_000)}
    with limit_of_file_size(size_bytes), pytest.raises(OSError, match="File too large"):
        write_hashed(tmp_path / "file.pt", origin, lambda: False)


def test_write_can_be_cancelled_within_a_file(tmp_path) -> None:
    answers = iter([False, False, True])
    with pytest.raises(Cancelled):
        write_hashed(tmp_path / "file.pt", torch.zeros(4_000_000), lambda: next(answers, True))
    assert (tmp_path / "file.pt").stat().st_size == 2 * file_writer.BLOCK_BYTES


def test_file_that_reads_back_differently_is_refused(tmp_path) -> None:
    entry = write_hashed(tmp_path / "file.pt", torch.zeros(1000), lambda: False)
    content = bytearray((tmp_path / "file.pt").read_bytes())
    content[700] ^= 1
    (tmp_path / "file.pt").write_bytes(content)
    with pytest.raises(OSError, match="reads back"):
        verify_written(tmp_path / "file.pt", entry)


@pytest.mark.parametrize("case", ["no O_DIRECT", "O_DIRECT fails at the first write"])
def test_a_file_system_without_direct_writes_gets_the_same_file(
    tmp_path, monkeypatch, case
) -> None:
    state = {"weights": torch.arange(3_000_000)}
    entry = write_hashed(tmp_path / "direct.pt", state, lambda: False)
    refused, opened, written = [], os.open, os.write

    def open_(path, flags, *mode):
        if case == "no O_DIRECT" and flags & os.O_DIRECT:
            refused.append(path)
            raise OSError(errno.EINVAL, "Invalid argument")
        return opened(path, flags, *mode)

    def write(descriptor, data):
        if case != "no O_DIRECT" and fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            refused.append(descriptor)
            raise OSError(errno.EINVAL, "Invalid argument")
        return written(descriptor, data)

    monkeypatch.setattr(os, "open", open_)
    monkeypatch.setattr(os, "write", write)
    assert write_hashed(tmp_path / "other.pt", state, lambda: False) == entry and len(refused) == 1
    assert (tmp_path / "other.pt").read_bytes() == (tmp_path / "direct.pt").read_bytes()
