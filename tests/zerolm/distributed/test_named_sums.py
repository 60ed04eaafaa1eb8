"""Figures are summed by name on two ranks of which each lacks some of the names."""

import json
import sys
from pathlib import Path

import torch

from tests.launching import run_workers

SUMS = {
    "same": {"one": 3.0, "several": [1.0, 4.0]},
    "parts": {"first": 1.0, "both": [1.0, 3.0], "second": 7.0},
}


def test_a_name_that_a_rank_lacks_counts_as_zero_there(tmp_path) -> None:
    run_workers(2, Path(__file__), tmp_path / "sums.json")
    first, second, third, calls = json.loads((tmp_path / "sums.json").read_text())
    assert first == SUMS and [*first["parts"]] == [*SUMS["parts"]], "in the order of rank 0"
    assert second == {"parts": {"first": 1.0, "both": [0.0, 0.0], "second": 0.0}}
    assert third == {"parts": {"first": 0.0, "both": [0.0, 0.0], "second": 0.0, "late": 3.0}}
    assert calls == [1, 1, 2], "names are exchanged when a group or a name first occurs"


def worker(path: str) -> None:
    from zerolm.distributed import named_sums

    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    exchanges, gather = [], named_sums.gather_objects
    named_sums.gather_objects = lambda value: exchanges.append(value) or gather(value)

    def figures(*values: float) -> torch.Tensor:
        found = torch.tensor(values, dtype=torch.float64)
        return found[0] if len(values) == 1 else found

    sums = named_sums.NamedSums(torch.device("cpu"))
    same = {"one": figures(1.0 + rank), "several": figures(rank, 2.0)}
    if rank == 0:
        parts = {"first": figures(1.0), "both": figures(1.0, 1.0)}
    else:
        parts = {"both": figures(0.0, 2.0), "second": figures(7.0)}
    first, calls = sums.sum({"same": same, "parts": parts}), [len(exchanges)]
    second = sums.sum({"parts": {"first": figures(1.0)} if rank == 0 else {}})
    calls.append(len(exchanges))
    third = sums.sum({"parts": {"late": figures(1.0 + rank)}})
    calls.append(len(exchanges))
    if rank == 0:
        Path(path).write_text(json.dumps([first, second, third, calls]))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    worker(sys.argv[1])
