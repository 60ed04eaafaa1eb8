"""One rank of test_zero_keys.py: trains with each ds config, resumes, and compares with torch.

The check returns the largest relative difference of a loss, and of a weight, from a plain loop.
"""

import tempfile
from typing import Any

import deepspeed
import torch
from torch import distributed, nn

from tests.ds_config_checks import run_checks

WIDTH, ROWS, STEPS, SAVED, ACCUMULATION = 16, 4, 6, 3, 2
OPTIONS: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
RATES = [1e-2 * (1 + step) / STEPS for step in range(STEPS)]


class Block(nn.Module):
    def __init__(self, inputs: int, hidden: int, outputs: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(inputs, hidden), nn.Linear(hidden, outputs)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.gelu(self.up(rows)))


class Model(nn.Module):
    """A first layer, blocks, and a last layer, as language models have them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH + 3, WIDTH)
        self.blocks = nn.Sequential(Block(WIDTH, 8, WIDTH), Block(WIDTH, 8, WIDTH + 3))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.last(self.blocks(self.first(rows)))


def new_model() -> nn.Module:
    torch.manual_seed(0)
    return Model()


def loss(model: Any, step: int, micro: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank + 1)
    inputs = torch.randn(ROWS, WIDTH, generator=generator)
    return (model(inputs) - inputs.flip(1)).square().mean()


def by_torch(config: dict, ranks: int) -> tuple[list[float], list[torch.Tensor]]:
    """Return the losses of the steps that are compared and the last weights, of a plain loop."""
    model, found = new_model(), []
    optimizer = torch.optim.AdamW(model.parameters(), **OPTIONS)
    for step, rate in enumerate(RATES):
        optimizer.param_groups[0]["lr"] = rate
        parts = [(micro, rank) for micro in range(ACCUMULATION) for rank in range(ranks)]
        mean = torch.stack([loss(model, step, *part) for part in parts]).mean()
        optimizer.zero_grad()
        mean.backward()
        nn.utils.clip_grad_norm_(model.parameters(), config["gradient_clipping"])
        optimizer.step()
        found.append(float(mean))
    return found, [each.detach() for each in model.parameters()]


def train(
    config: dict, folder: str, steps: range, rank: int, resume: bool
) -> tuple[Any, list[float]]:
    model = new_model()
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=list(model.parameters()), config=config
    )
    if resume:
        engine.load_checkpoint(folder, "saved")
    found = []
    for step in steps:
        for group in engine.optimizer.param_groups:
            group["lr"] = RATES[step]
        mean = torch.zeros(())
        for micro in range(ACCUMULATION):
            one = loss(engine, step, micro, rank)
            engine.backward(one)
            engine.step()
            mean += one.detach() / ACCUMULATION
        distributed.all_reduce(mean)
        found.append(float(mean) / distributed.get_world_size())
    return engine, found


def differences(config: dict) -> Any:
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    folder = [tempfile.mkdtemp() if rank == 0 else ""]
    distributed.broadcast_object_list(folder)
    try:
        engine, found = train(config, folder[0], range(SAVED), rank, False)
        engine.save_checkpoint(folder[0], "saved")
        engine.destroy()
        engine, more = train(config, folder[0], range(SAVED, STEPS), rank, True)
        weights = []
        for each in engine.module.parameters():
            with deepspeed.zero.GatheredParameters(each):
                weights.append(each.detach().clone().flatten())
        engine.destroy()
    except Exception as error:
        import traceback

        traceback.print_exc()
        return f"{type(error).__name__}: {error}"
    losses, expected = by_torch(config, ranks)
    ours, theirs = torch.cat(weights), torch.cat([each.flatten() for each in expected])
    pairs = zip([*found, *more], losses, strict=True)
    return [
        max(abs(one - other) / other for one, other in pairs),
        float((ours - theirs).abs().max() / theirs.abs().max()),
    ]


if __name__ == "__main__":
    run_checks(differences)
