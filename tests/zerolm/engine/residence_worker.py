"""One rank of test_parameters.py: compares each parameter's values with those of its residence.

RANK=0 WORLD_SIZE=2 ... python residence_worker.py REPORT.json CONFIG.json ...
"""

from typing import Any

import deepspeed
import torch
from transformers import AutoConfig

from tests.ds_config_checks import run_checks
from tests.launching import LLAMA
from zerolm.engine.parameters import is_partitioned, own_values, residence
from zerolm.model.build import build_model


def built(config: dict | None) -> Any:
    return build_model(
        AutoConfig.for_model(**LLAMA), seed=0, dtype=torch.float32, zero3_config=config,
        attn_implementation="sdpa", gradient_checkpointing=False, device=torch.device("cpu"),
    )  # fmt: skip


def figures(config: dict) -> dict[str, Any]:
    whole = {name: each.detach().clone() for name, each in built(None).named_parameters()}
    stage = config["zero_optimization"]["stage"]
    engine, *_ = deepspeed.initialize(model=built(config if stage == 3 else None), config=config)
    wrong, dims = [], set()
    for name, parameter in engine.module.named_parameters():
        found, expected = residence(parameter), whole[name]
        assert found.shape == expected.shape, name
        if found.dim is None and found.group is not None:
            expected = expected.flatten()[found.start : found.start + found.length]
        elif found.dim is not None:
            expected = expected.narrow(found.dim, found.start, found.length)
        own = own_values(parameter) if is_partitioned(parameter) else parameter
        wrong += [name] * (not torch.equal(own, expected))
        dims.add((found.group is not None, found.dim))
    return {"wrong": wrong, "dims": sorted(dims, key=str)}


if __name__ == "__main__":
    run_checks(figures)
