from types import SimpleNamespace

import torch

from zerolm.checkpoint import snapshot
from zerolm.checkpoint.snapshot import HostCopy


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


def test_memory_that_cannot_be_pinned_is_used_as_it_is_and_named_once(monkeypatch, capsys) -> None:
    pending = []  # CUDA's last error, which its next kernel reports

    def register(*arguments: int) -> int:
        pending.append(1)
        return 1

    def next_kernel(*sizes: int, device: str) -> None:
        if pending:
            pending.clear()
            raise RuntimeError("CUDA error: invalid argument")

    runtime = SimpleNamespace(cudaHostRegister=register)
    buffers = [torch.zeros(4), torch.zeros(2)]
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch, "ones", next_kernel)
    for buffer in buffers:
        snapshot._pin(buffer)
        assert not pending
    assert capsys.readouterr().out.count("cannot be pinned (cudaHostRegister: error 1)") == 1
