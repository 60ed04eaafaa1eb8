"""Plain PyTorch that takes each step from the weights which a run had, and compares what came out.

Two loops that differ by a rounding may part after a step or two, and the distance then says how the
losses lie in the weights, not whether a step is right. Here nothing adds up: each step begins with
the run's own weights, as several_runs.py has written them.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

CERTAIN = 1e-5  # of a tensor's root mean square: how far from zero a value has a sure sign


class Compared(NamedTuple):
    """How far a step was from that of plain PyTorch.

    Attributes:
        updates: by tensor, the norm of the difference of the two updates over that of plain
            PyTorch's; of a stack of matrices, that of the worst one.
        most: the largest difference of a value, but for those of other signs.
        signs: how many values went the other way, by half a learning rate or more.
        sure: how many of them though what they take the sign of was not near zero.
    """

    updates: dict[str, float]
    most: float
    signs: int
    sure: int


class Followed:
    """An optimizer of plain_pytorch.train that goes on from the weights of a run after each step.

    Args:
        optimizer_of: makes the optimizer.
        directory: of the weights after each step.
    """

    def __init__(self, optimizer_of: Callable[..., torch.optim.Optimizer], directory: Path):
        self._optimizer_of = optimizer_of
        self._files = sorted(directory.glob("*.pt"))
        self.steps: list[Compared] = []

    def __call__(self, masters: dict[str, torch.Tensor], weight_decay: float) -> "Followed":
        self._masters = masters
        self._optimizer = self._optimizer_of(masters, weight_decay)
        return self

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self._optimizer.param_groups

    def step(self) -> None:
        before = {name: master.clone() for name, master in self._masters.items()}
        self._optimizer.step()
        found = torch.load(self._files[len(self.steps)])
        assert found.keys() == self._masters.keys()
        half = 0.5 * self.param_groups[0]["lr"]
        updates, most, signs, sure = {}, 0.0, 0, 0
        for name, master in self._masters.items():
            difference = (found[name] - master).double()
            update = (master - before[name]).double()
            if master.ndim < 2:
                difference, update = difference.view(1, -1), update.view(1, -1)
            sizes = [one.norm(dim=(-2, -1)) for one in (difference, update)]
            updates[name] = float((sizes[0] / sizes[1].clamp(min=1e-30)).max())
            apart = (found[name] - master).abs() > half
            most = max(most, float((found[name] - master)[~apart].abs().max()))
            signs += int(apart.sum())
            blend = self._optimizer.state[master].get("blend")
            if blend is not None:
                certain = blend.abs() > CERTAIN * blend.square().mean().sqrt()
                sure += int((apart & certain).sum())
            master.copy_(found[name])
        self.steps.append(Compared(updates, most, signs, sure))
