"""Compare each optimizer step of a run with plain PyTorch, starting each from the run's weights.

Two training loops that differ by one rounding may diverge after a few steps; their distance then
shows how sensitive the loss is, not whether a step is correct. Here differences do not accumulate:
each step starts from the run's own weights, as `runs_in_one_process` has written them.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

# A value this far from zero, in units of its tensor's root mean square, has a certain sign.
CERTAIN_SIGN = 1e-5


class StepDifference(NamedTuple):
    """The difference between a run's step and that of plain PyTorch.

    Attributes:
        updates: {tensor: norm of the difference of the two updates, divided by the norm of plain
            PyTorch's update}; for a stack of matrices, that of the worst matrix.
        max_value: largest absolute difference of a value whose update has the same sign in both.
        num_sign_flips: number of values whose updates differ by half a learning rate or more.
        num_certain_flips: how many of those should have had a certain sign (Lion).
    """

    updates: dict[str, float]
    max_value: float
    num_sign_flips: int
    num_certain_flips: int


class RunFollower:
    """An optimizer for `plain_pytorch.train` that adopts the weights of a run after each step.

    Args:
        optimizer_of: creates the optimizer to compare.
        directory: one file with the run's weights for each step.
    """

    def __init__(self, optimizer_of: Callable[..., torch.optim.Optimizer], directory: Path):
        self._optimizer_of = optimizer_of
        self._files = sorted(directory.glob("*.pt"))
        self.steps: list[StepDifference] = []

    def __call__(self, masters: dict[str, torch.Tensor], weight_decay: float) -> "RunFollower":
        self._masters = masters
        self._optimizer = self._optimizer_of(masters, weight_decay)
        return self

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self._optimizer.param_groups

    def step(self) -> None:
        before = {name: master.clone() for name, master in self._masters.items()}
        self._optimizer.step()
        weights = torch.load(self._files[len(self.steps)])
        assert weights.keys() == self._masters.keys()
        half_rate = 0.5 * self.param_groups[0]["lr"]
        updates, max_value, num_flips, num_certain = {}, 0.0, 0, 0
        for name, master in self._masters.items():
            difference = (weights[name] - master).double()
            update = (master - before[name]).double()
            if master.ndim < 2:
                difference, update = difference.view(1, -1), update.view(1, -1)
            norms = [tensor.norm(dim=(-2, -1)) for tensor in (difference, update)]
            updates[name] = float((norms[0] / norms[1].clamp(min=1e-30)).max())
            flipped = (weights[name] - master).abs() > half_rate
            max_value = max(max_value, float((weights[name] - master)[~flipped].abs().max()))
            num_flips += int(flipped.sum())
            blend = self._optimizer.state[master].get("blend")
            if blend is not None:
                certain = blend.abs() > CERTAIN_SIGN * blend.square().mean().sqrt()
                num_certain += int((flipped & certain).sum())
            master.copy_(weights[name])
        self.steps.append(StepDifference(updates, max_value, num_flips, num_certain))
