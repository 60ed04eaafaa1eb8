"""One rank of test_gradients.py: for each ds config, the gradient of an engine and of plain torch.

RANK=0 WORLD_SIZE=2 ... python gradients_worker.py REPORT.json CONFIG.json ...
"""

import os
from types import SimpleNamespace
from typing import Any

import deepspeed
import torch
from torch import nn

from tests import ROOT
from tests.ds_config_checks import run_checks
from zerolm.distributed.collectives import gather_objects
from zerolm.distributed.named_sums import NamedSums
from zerolm.engine.gradient_sums import spare_memory_traffic
from zerolm.engine.gradients import gradients

WORDS, USED, WIDTH = 37, 20, 9  # odd sizes, so that all partitions have padding
MICRO_BATCHES, ROWS = 2, 5


def new_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, 13), nn.GELU())


def losses(model: Any, rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    inputs = torch.randint(0, USED, (MICRO_BATCHES, ROWS), generator=generator)
    for ids in inputs:
        yield model(ids).float().square().mean()


def documented_feature() -> Any:
    """Return the class of docs/architecture.md's recipe for a metric of the gradient."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    example = text.partition("**A metric of the gradient")[2].split("```python\n")[1]
    names: dict[str, Any] = {}
    exec(example.partition("```")[0], names)
    return names["ZeroGradients"]


def figures(config: dict) -> dict[str, Any]:
    plain, world_size = new_model(), torch.distributed.get_world_size()
    for rank in range(world_size):
        for loss in losses(plain, rank):
            (loss / world_size).backward()
    expected = {name: each.grad.flatten() for name, each in plain.named_parameters()}

    stage = config["zero_optimization"]["stage"]
    with deepspeed.zero.Init(config_dict_or_path=config, enabled=stage == 3):
        model = new_model()
    if stage == 3:
        for name, parameter in model.named_parameters():
            with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
                parameter.data.copy_(plain.get_parameter(name))
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=list(model.parameters()), config=config
    )
    spare_memory_traffic(engine)
    for number, loss in enumerate(losses(engine, int(os.environ["RANK"]))):
        engine.set_gradient_accumulation_boundary(number == MICRO_BATCHES - 1)
        engine.backward(loss, scale_wrt_gas=False)

    own = [(name, values.float().cpu().clone()) for name, values in gradients(engine)]
    found: dict[str, list[torch.Tensor]] = {name: [] for name in expected}
    for parts in gather_objects(own):
        for name, values in parts:
            found[name].append(values.flatten())
    complete = {name: torch.cat(parts) for name, parts in found.items()}

    feature = documented_feature()(SimpleNamespace(settings=None))
    feature.attach(SimpleNamespace(engine=engine))
    feature.summed(NamedSums(engine.device).sum(feature.sums([])))
    (share,) = feature.row(None).values()
    total = sum(each.numel() for each in expected.values())
    result = {
        "sizes": {name: each.numel() for name, each in complete.items()},
        "expected sizes": {name: each.numel() for name, each in expected.items()},
        "error": max(
            float((complete[name] - each).norm() / each.norm()) for name, each in expected.items()
        ),
        "zeros": share * total,
        "expected zeros": sum(int((each == 0).sum()) for each in expected.values()),
    }
    engine.destroy()
    return result


if __name__ == "__main__":
    run_checks(figures)
