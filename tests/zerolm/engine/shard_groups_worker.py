"""One rank of test_shard_groups.py: the same steps with states sharded over all ranks, and inside
groups of two.

    RANK=0 WORLD_SIZE=4 ... python shard_groups_worker.py REPORT.json

Rank 0 writes for each way: `norms` of the steps, by rank, in hex; `sent`, values per parameter and
step of each collective, by the distance of its ranks; `states`, {state: digest} by rank;
`different`, {state gathered from the first group: distance from that without groups}; `update`, the
norm of the last update by `UpdateMeter`; `equal`, whether `Seal` finds all copies equal, before and
after a bit of a state has changed on the last rank.
"""

import hashlib
import json
import math
import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch import distributed, nn

from tests.zerolm.ds_config.ds_cases import shipped
from zerolm.distributed.collectives import gather_objects, sum_over_ranks
from zerolm.distributed.layout import Layout
from zerolm.engine import reduction_choice
from zerolm.engine.gradient_sums import spare_memory_traffic
from zerolm.engine.shard_groups import sharding_within
from zerolm.engine.states import states
from zerolm.engine.step_gate import StepGate
from zerolm.health.norms import Blocks, UpdateMeter
from zerolm.integrity.checks import flip_bit
from zerolm.integrity.seal import Seal

WIDTH, ACCUMULATION, STEPS, BUCKET, GROUP = 24, 2, 5, 200, 2
COLLECTIVES = {
    "all_reduce": distributed, "reduce": distributed, "reduce_scatter_tensor": distributed,
    "all_gather_into_tensor": deepspeed.comm,
}  # fmt: skip
RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH + 1, bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(inputs))).float().square().sum()

    def get_input_embeddings(self) -> nn.Module:
        return self.first


def engine_of(layout: Layout) -> Any:
    config = shipped(
        "zero1.json",
        hidden_size=WIDTH,
        micro_batch_size=1,
        accumulation=ACCUMULATION,
        replicas=RANKS,
    )
    config["zero_optimization"]["reduce_bucket_size"] = BUCKET
    torch.manual_seed(0)
    model = Model().to(torch.bfloat16)
    with sharding_within(layout.shard_within) as across:
        engine, *_ = deepspeed.initialize(
            model=model, model_parameters=list(model.parameters()), config=config
        )
    spare_memory_traffic(engine, across)
    return engine


@contextmanager
def counted(found: Counter) -> Iterator[None]:
    """Count the values of each collective: of all ranks, of neighbours, and of distant ranks."""
    usual = {name: getattr(module, name) for name, module in COLLECTIVES.items()}
    places = {(0, 1): "near", (2, 3): "near", (0, 2): "far", (1, 3): "far", (0, 1, 2, 3): "all"}

    def counts(name: str) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            given = [*args, *options.values()]
            values = max(each.numel() for each in given if torch.is_tensor(each))
            group = next(
                (each for each in given if isinstance(each, distributed.ProcessGroup)), None
            )
            ranks = tuple(distributed.get_process_group_ranks(group))
            if values > 1:  # not a norm
                found[f"{name}, {places[ranks]}"] += values
            return usual[name](*args, **options)

        return call

    for name, module in COLLECTIVES.items():
        setattr(module, name, counts(name))
    yield
    for name, module in COLLECTIVES.items():
        setattr(module, name, usual[name])


def train(engine: Any, layout: Layout) -> tuple[list[str], float]:
    """Return the norm of each step's gradient, and the norm of the last update."""
    norms, gate = [], StepGate(engine)
    meter = UpdateMeter(engine, Blocks(engine.module), layout)
    for batch in range(STEPS * ACCUMULATION):
        generator = torch.Generator().manual_seed(RANKS * batch + RANK)
        inputs = 3.0 * torch.randn(2, WIDTH, generator=generator)
        engine.backward(engine(inputs.bfloat16()))
        meter.before()
        gate.step(engine, False, lambda norm: False)
        if gate.grad_norm is not None:
            norms.append(gate.grad_norm.hex())
    squares = meter.squares(engine.device)
    return norms, math.sqrt(float(sum_over_ranks(squares).sum()))


def gathered(engine: Any) -> dict[str, torch.Tensor]:
    found = {}
    for name, parameter in engine.module.named_parameters():
        found[f"{name} master"] = safe_get_full_fp32_param(parameter)
        for key in ("exp_avg", "exp_avg_sq"):
            found[f"{name} {key}"] = safe_get_full_optimizer_state(parameter, key)
    return found


def digests(engine: Any) -> dict[str, str]:
    return {
        f"{state.kind} {state.group}": hashlib.sha256(
            state.values.view(torch.uint8).numpy().tobytes()
        ).hexdigest()
        for state in states(engine)
    }


def copies_are_equal(engine: Any, seal: Seal) -> bool:
    seal.close(0)
    changed, unequal = seal.agree(sum_over_ranks(seal.figures()).tolist())
    assert not changed
    return not unequal


def report_of(layout: Layout, max_latency: float) -> tuple[dict[str, Any], dict[str, Any]]:
    reduction_choice.MAX_LATENCY = max_latency
    engine, sent = engine_of(layout), Counter()
    with counted(sent):
        norms, update = train(engine, layout)
    size = sum(each.numel() for each in engine.module.parameters())
    complete, own = gathered(engine), digests(engine)
    seal = Seal(engine, replicated=True)
    equal = [copies_are_equal(engine, seal)]
    if RANK == RANKS - 1:
        flip_bit(next(s.values for s in states(engine) if s.kind == "exp_avg"), bit=0)
    equal.append(copies_are_equal(engine, seal))
    report = {
        "norms": gather_objects(norms), "states": gather_objects(own), "update": update,
        "sent": {name: values / STEPS / size for name, values in sent.items()}, "equal": equal,
    }  # fmt: skip
    return report, complete


def main(output: str) -> None:
    deepspeed.init_distributed("gloo", verbose=False)
    plain, groups = Layout(RANKS), Layout(RANKS, shard_within=GROUP)
    report, expected = report_of(plain, math.inf)
    reports = {"all": report}
    for way, max_latency in (("groups", math.inf), ("groups, one call", 0.0)):
        report, found = report_of(groups, max_latency)
        report["different"] = {
            name: float((each - found[name]).norm() / each.norm())
            for name, each in expected.items()
        }
        reports[way] = report
    if RANK == 0:
        Path(output).write_text(json.dumps(reports))
    distributed.barrier()
    os._exit(0)


main(sys.argv[1])
