"""One rank of test_resolve.py: checks how DeepSpeed reduces gradients, for each ds config given.

What it finds is the relative difference between DeepSpeed's gradient norm and the norm of the
float32 mean of the ranks' gradients.
"""

import os

import deepspeed
import torch
from torch import nn

from tests.ds_config_checks import run_checks

WIDTH, ROWS = 48, 8


def new_model() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)]
    return nn.Sequential(*layers).to(torch.bfloat16)


def loss_of_rank(model: nn.Module, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank + 1)
    inputs = torch.randn(ROWS, WIDTH, generator=generator).to(torch.bfloat16)
    return model(inputs).float().square().mean()


def expected_norm(world_size: int) -> float:
    """Return the norm of the float32 mean of every rank's gradient, by plain torch."""
    sums = torch.zeros(())
    for rank in range(world_size):
        model = new_model()
        loss_of_rank(model, rank).backward()
        sums = sums + torch.cat([each.grad.double().flatten() for each in model.parameters()])
    return float((sums / world_size).norm())


def difference(config: dict) -> float:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    model = new_model()
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=list(model.parameters()), config=config
    )
    engine.backward(loss_of_rank(engine, rank))
    engine.step()
    assert engine.was_step_applied()
    norm, expected = float(engine.get_global_grad_norm()), expected_norm(world_size)
    engine.destroy()
    return abs(norm - expected) / expected


if __name__ == "__main__":
    run_checks(difference)
