import resource
from contextlib import contextmanager

import pytest
import torch

from zerolm.checkpoint.snapshot import Cancelled, HostCopy, verify_written, write_hashed
from zerolm.common.files import sha256_file


class Scaler:
    """An object that training changes, with a tensor of its own."""

    def __init__(self) -> None:
        self.scale, self.history = 2.0, torch.zeros(2)


def state() -> dict:
    flat = torch.arange(12.0)
    scaler = Scaler()
    return {
        "module": {"tied": flat[:4], "also": flat[:4], "view": flat[4:10].view(2, 3)},
        "master": torch.nn.Parameter(flat.double(), requires_grad=True),
        "groups": [{"lr": 1e-3, "params": [0]}, (scaler, scaler)],
        "flat": flat,
        "empty": torch.empty(0, dtype=torch.bfloat16),
    }


def test_copy_is_equal_and_independent_of_the_original() -> None:
    origin, expected = state(), state()
    copied = HostCopy().copy(origin)
    origin["flat"].fill_(-1)
    origin["groups"][1][0].scale = 4.0
    origin["groups"][0]["lr"] = 0.0
    for name in ("tied", "also", "view"):
        assert torch.equal(copied["module"][name], expected["module"][name])
        assert copied["module"][name].untyped_storage().nbytes() == 4 * len(
            expected["module"][name].flatten()
        ), "views are compact"
    assert copied["module"]["tied"].data_ptr() == copied["module"]["also"].data_ptr()
    assert isinstance(copied["master"], torch.nn.Parameter) and copied["master"].requires_grad
    assert torch.equal(copied["master"], expected["master"])
    assert copied["empty"].dtype == torch.bfloat16
    first, second = copied["groups"][1]
    assert first is second and first.scale == 2.0 and copied["groups"][0]["lr"] == 1e-3


def test_copies_reuse_memory() -> None:
    host_copy, origin = HostCopy(), state()
    first = host_copy.copy(origin)
    size = host_copy.size_bytes
    origin["flat"] += 1
    host_copy.reset()
    second = host_copy.copy(origin)
    assert second["flat"].data_ptr() == first["flat"].data_ptr()
    assert host_copy.size_bytes == size == 4 * (4 + 6 + 12) + 8 * 12
    assert torch.equal(second["flat"], origin["flat"])


def test_torch_reads_what_was_written_and_the_hash_matches_the_file(tmp_path) -> None:
    origin = {"weights": torch.randn(1000, 300), "step": 7}
    entry = write_hashed(tmp_path / "file.pt", origin, lambda: False)
    assert entry["sha256"] == sha256_file(tmp_path / "file.pt")
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
        write_hashed(tmp_path / "file.pt", torch.randn(1000), lambda: next(answers, True))


def test_file_that_reads_back_differently_is_refused(tmp_path) -> None:
    entry = write_hashed(tmp_path / "file.pt", torch.zeros(1000), lambda: False)
    content = bytearray((tmp_path / "file.pt").read_bytes())
    content[700] ^= 1
    (tmp_path / "file.pt").write_bytes(content)
    with pytest.raises(OSError, match="reads back"):
        verify_written(tmp_path / "file.pt", entry)
