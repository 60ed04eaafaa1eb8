"""One rank of test_experts.py: gradients, norms and copies of a parameter that is divided over two
ranks, beside one that all have.

    RANK=0 WORLD_SIZE=4 ... python experts_worker.py REPORT.json

For each way to reduce gradients, and for ZeRO-3, rank 0 writes the largest difference between the
gradients on all ranks and the means over ranks that plain sums give, and the number of values that
the ranks have. For ZeRO-1 and ZeRO-3, whether a gathered and a set parameter have the values of the
whole, and the norm of all weights. For ZeRO-1, which ranks are named for a weight that has another
bit.
"""

import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.utils import safe_get_full_fp32_param
from torch import distributed, nn

from zerolm.distributed.collectives import gather_objects, sum_over_ranks
from zerolm.distributed.layout import Layout
from zerolm.engine import experts, reduction_choice
from zerolm.engine.gradient_sums import spare_memory_traffic
from zerolm.engine.gradients import gradients
from zerolm.engine.parameters import gathered, partitioned_while_built, replace, residence
from zerolm.engine.states import master_slice, set_master, states
from zerolm.health.norms import parameter_norm
from zerolm.integrity.checks import _odd, flip_bit
from zerolm.integrity.seal import Seal

DEGREE, EXPERTS, WIDTH, BUCKET = 2, 6, 5, 20
RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
LAYOUT = Layout(RANKS, experts=DEGREE)
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 1, "reduce_bucket_size": BUCKET, "overlap_comm": True},
    "bf16": {"enabled": True},
    "data_types": {"grad_accum_dtype": "fp32"},
    "communication_data_type": "fp32",
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
}


def whole() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    shapes = {"dense": (7, WIDTH), "experts": (EXPERTS, WIDTH, 3)}
    return {name: torch.randn(shape).bfloat16() for name, shape in shapes.items()}


class Model(nn.Module):
    """Its gradients are `factors`, whatever the input; each rank has half of the experts."""

    def __init__(self) -> None:
        super().__init__()
        for name, values in whole().items():
            setattr(self, name, nn.Parameter(values))

    def divide(self) -> None:
        own = whole()["experts"].chunk(DEGREE)[LAYOUT.axis("experts", RANK).index]
        parameter = nn.Parameter(own.clone())
        experts.mark(parameter, DEGREE)
        replace(self.experts, parameter)
        self.experts = parameter

    def forward(self, factors: dict[str, torch.Tensor]) -> torch.Tensor:
        return sum((getattr(self, name) * each).sum() for name, each in factors.items())


def engine_of(stage: int = 1) -> Any:
    config = {**CONFIG, "zero_optimization": {**CONFIG["zero_optimization"], "stage": stage}}
    if stage == 3:
        config["zero_optimization"] |= {"stage3_param_persistence_threshold": 40}
    with partitioned_while_built(config if stage == 3 else None):
        model = Model()
    model.divide()
    groups = [
        {"params": [model.dense]},
        {"params": [model.experts], "moe": True, "name": experts.group_name(DEGREE)},
    ]
    with experts.recognized(model, stage):
        engine, *_ = deepspeed.initialize(model=model, model_parameters=groups, config=config)
    spare_memory_traffic(engine)
    return engine


def start_on(engine: Any, name: str, index: int) -> int:
    """Return the index of this rank's first value among those that it and its copies have."""
    parameter = engine.module.get_parameter(name)
    if engine.zero_optimization_stage() == 3:
        number = EXPERTS // DEGREE * WIDTH * 3 if name == "experts" else parameter.ds_numel
        return master_slice(engine, parameter).start % number
    group = engine.optimizer.real_dp_process_group[index]
    size = engine.optimizer.fp32_groups_gradient_flat_partition[index].numel()
    return distributed.get_rank(group) * size


def reduced(max_latency: float, stage: int = 1) -> dict[str, Any]:
    reduction_choice.MAX_LATENCY = max_latency
    engine = engine_of(stage)
    generator = torch.Generator().manual_seed(RANK)
    shapes = {"dense": (7, WIDTH), "experts": (EXPERTS // DEGREE, WIDTH, 3)}
    factors = {name: torch.randn(each, generator=generator) for name, each in shapes.items()}
    engine.backward(engine(factors))
    expected = {name: each.bfloat16().float() for name, each in factors.items()}
    distributed.all_reduce(expected["dense"])
    copies = LAYOUT.axis("expert_copies", RANK).ranks
    of_all = gather_objects(expected["experts"].tolist())
    expected["experts"] = sum(torch.tensor(of_all[rank]) for rank in copies)
    worst, number = 0.0, {}
    for name, values in gradients(engine):
        flat, index = expected[name].flatten() / RANKS, {"dense": 0, "experts": 1}[name]
        start = start_on(engine, name, index)
        part = flat[start : start + len(values)]
        worst = max(worst, float((values - part).abs().max()))
        number[name] = len(values)
    sizes = gather_objects(number)
    return {
        "worst": max(gather_objects(worst)),
        "values": {name: sum(each.get(name, 0) for each in sizes) for name in expected},
    }


def gathered_and_set(engine: Any) -> dict[str, Any]:
    values, parameter = whole(), engine.module.experts
    with gathered([parameter, engine.module.dense], modifier_rank=3):
        report = {"gathered": torch.equal(parameter.data, values["experts"])}
        report["dense"] = torch.equal(engine.module.dense.data, values["dense"])
        if RANK == 3:
            parameter.data += 1
    now = values["experts"] + 1
    with gathered([parameter]):
        report["changed"] = all(gather_objects(torch.equal(parameter.data, now)))
    set_master(parameter, values["experts"].float() * 2)
    found = safe_get_full_fp32_param(parameter)
    half = values["experts"].float().chunk(DEGREE)[LAYOUT.axis("experts", RANK).index] * 2
    report["set"] = all(gather_objects(torch.equal(found, half)))
    squares = values["dense"].double().square().sum() + now.double().square().sum()
    report["norm"] = [parameter_norm(engine, LAYOUT), math.sqrt(float(squares))]
    place = residence(parameter)
    report["start"] = gather_objects(place.start)
    return report


def main(output: str) -> None:
    deepspeed.init_distributed("gloo", verbose=False)
    experts.create_groups(DEGREE)
    report: dict[str, Any] = {"owners": reduced(math.inf), "one call": reduced(0.0)}
    report["ZeRO-3"] = reduced(0.0, stage=3)
    engine = engine_of()
    report[1], report[3] = gathered_and_set(engine), gathered_and_set(engine_of(3))
    report["named"] = []
    for group, guilty in ((0, 2), (1, 3)):
        seal = Seal(engine, replicated=LAYOUT.weights_have_copies())
        found = [copies_differ(seal)]
        weights = [state.values for state in states(engine) if state.kind == "weights"]
        if guilty == RANK:
            flip_bit(weights[group], bit=0)
        seal.drop()
        found.append(copies_differ(seal))
        digests = gather_objects(seal.digests_of_copies())
        odd = [_odd(digests, share) for share in range(1 + DEGREE)]
        report["named"].append([*found, odd])
        if guilty == RANK:
            flip_bit(weights[group], bit=0)
    if RANK == 0:
        Path(output).write_text(json.dumps(report))
    distributed.barrier()
    os._exit(0)


def copies_differ(seal: Seal) -> bool:
    seal.close(0)
    changed, unequal = seal.agree(sum_over_ranks(seal.figures()).tolist())
    assert not changed
    return unequal


main(sys.argv[1])
