"""Weights that ZeRO-3 gathers by block: the same bits, in a sixth of the calls, and in time."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.launching import run_workers
from zerolm.engine.zero3_hooks import bound_gathers


def test_blocks_are_gathered_ahead_and_change_no_bit(tmp_path) -> None:
    output = tmp_path / "report.json"
    run_workers(2, Path(__file__).with_name("gathering_worker.py"), output)
    found = json.loads(output.read_text())
    for name, one in found.items():
        for key in ("losses", "norms"):
            assert one[key] == found["layers"][key], name
        way = name.removesuffix(" full").removesuffix(" selective")
        late, gathers = max(one["late"]), one["gathers"]
        if way == "layers":
            assert late == 0 and gathers > 5 * found["blocks"]["gathers"]
        elif way == "blocks":
            assert late == 0 and gathers == 12, "6 blocks, forward and backward"
            assert one["peak"] <= found["layers"]["peak"]
        else:
            assert late > 0.8, "the bucket for layers has little of a block"


@pytest.mark.parametrize("is_leaf", [True, False])
def test_gathers_wait_until_the_block_before_has_begun(is_leaf) -> None:
    log: list[str] = []

    class Event:
        def record(self) -> None:
            self.place = len([line for line in log if not line.startswith("wait")])

        def synchronize(self) -> None:
            log.append(f"wait {self.place}")

    coordinator = SimpleNamespace(
        fetch_sub_module=lambda module, forward: log.append(f"fetch {module.number}")
    )
    offload = SimpleNamespace(get_param_coordinator=lambda: coordinator)
    engine = SimpleNamespace(optimizer=SimpleNamespace(parameter_offload=offload))
    bound_gathers(engine, Event)
    blocks = [torch.nn.Linear(1, 1) for _ in range(3)]
    for number, block in enumerate(blocks):
        block.number, block._z3_leaf = number, is_leaf
        coordinator.fetch_sub_module(block, True)
        coordinator.fetch_sub_module(block, True)  # recomputed
    fetches = [line for line in log if line.startswith("fetch")]
    assert fetches == [f"fetch {number}" for number in (0, 0, 1, 1, 2, 2)]
    waits = [line for line in log if line.startswith("wait")]
    # Before a block is gathered, all that was launched before its predecessor has run.
    assert waits == (["wait 0", "wait 0", "wait 2"] if is_leaf else [])
