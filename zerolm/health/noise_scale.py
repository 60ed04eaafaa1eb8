"""Gradient noise scale, estimated from gradient norms of micro-batches and of the global batch.

With a batch of B_simple tokens, gradient noise is as large as the signal: smaller batches need
fewer tokens, and larger batches need fewer steps. The expected squared norm of a mean gradient over
b tokens is the true gradient's squared norm plus the per-token variance / b, so measurements at two
batch sizes determine both:

    |G|^2 = (B |G_B|^2 - b |G_b|^2) / (B - b)        tr(S) = (|G_b|^2 - |G_B|^2) / (1/b - 1/B)

Both estimates are noisy, so each is averaged over steps before the division: B_simple = tr(S) /
|G|^2. Source: McCandlish et al. (2018), arXiv 1812.06162, appendix A.1. Hooks observe micro-batch
gradients during the backward pass, before ZeRO reduces or accumulates them, so no second pass or
copy is needed.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch

from zerolm.health.norms import sum_of_squares

DECAY = 0.95  # weight of the old average; averages cover about the last 20 measured steps


class SmallBatches:
    """Sums over this rank's micro-batches in a step.

    Args:
        parameters: parameters to observe with hooks while `backward` is active.
        contributes: False if another rank has the same micro-batches and counts them.

    Attributes:
        figures: the sums in the order of `SmallBatchSums`, to be summed over ranks; a float64
            tensor of shape (5,).
    """

    def __init__(self, parameters: Sequence[Any], device: torch.device, contributes: bool = True):
        self._parameters = [each for each in parameters if each.requires_grad]
        self._device, self._contributes = device, contributes
        self.begin()

    def begin(self) -> None:
        """Start a step."""
        self.figures = torch.zeros(5, dtype=torch.float64, device=self._device)

    @contextmanager
    def backward(self, num_targets: torch.Tensor) -> Iterator[None]:
        """Record the gradient norm in a backward pass.

        Even for a tied parameter, the hook is called once per pass, with everything that the pass
        adds to the gradient. If a hook is called several times (re-entrant checkpointing of shared
        layers), the step is not measured.

        Args:
            num_targets: number of targets in the micro-batch, as a scalar tensor on the device.
        """
        squares: dict[int, torch.Tensor] = {}
        repeated: list[int] = []

        def record(number: int, gradient: torch.Tensor) -> None:
            if number in squares:
                repeated.append(number)
            squares[number] = sum_of_squares(gradient)

        hooks = [
            parameter.register_hook(partial(record, number))
            for number, parameter in enumerate(self._parameters)
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        if repeated or not squares:
            self.figures[4] += 1
            return
        found = torch.stack([squares[number] for number in sorted(squares)])
        counted = num_targets.to(self._device).double()
        known = counted > 0  # stays on the device, since reading the value would block
        sums = [found.sum().to(self._device) / counted**2, 1.0 / counted, counted, known.double()]
        if not self._contributes:
            sums[1:] = [torch.zeros_like(counted)] * 3
        self.figures[:4] += torch.stack(sums).where(known, 0.0)
        self.figures[4] += ~known


class SmallBatchSums(NamedTuple):
    """`SmallBatches.figures`, summed over all ranks.

    Attributes:
        squares: sum over micro-batches of (gradient norm / number of targets)^2.
        inverses: sum over micro-batches of 1 / number of targets.
        targets: number of targets in all micro-batches.
        batches: number of micro-batches.
        unknown: number of micro-batches with an unknown gradient norm.
    """

    squares: float
    inverses: float
    targets: float
    batches: float
    unknown: float

    @property
    def are_equal(self) -> bool:
        """Whether all micro-batches have the same number of targets."""
        return math.isclose(self.inverses * self.targets, self.batches**2, rel_tol=1e-12)


class Estimate(NamedTuple):
    """Noise and signal in the gradient, for a single step or averaged over steps.

    Attributes:
        noise: trace of the covariance of per-token gradients, tr(S).
        signal: squared norm of the true gradient, |G|^2; may be negative in a single step.
    """

    noise: float = 0.0
    signal: float = 0.0

    @property
    def noise_scale_tokens(self) -> float | None:
        """B_simple in tokens; None if the noise or the signal is not positive."""
        if self.noise <= 0.0 or self.signal <= 0.0:
            return None
        return self.noise / self.signal


def estimate(
    sums: SmallBatchSums, grad_norm: float, replicas: int, loss_scale: float = 1.0
) -> Estimate | None:
    """Return the estimate for a step; None if the sums do not determine it.

    A micro-batch with n of the N targets minimizes the sum of its losses * replicas / N
    (`MicroBatches`), so the gradient of its mean loss is N / (n * replicas) times the observed
    gradient. If micro-batches differ in size, 1 / b is the mean of 1 / n.

    Args:
        grad_norm: norm of the global batch's unscaled gradient before clipping.
        loss_scale: fp16 loss scale, a factor in the micro-batch gradients.
    """
    if sums.unknown or sums.batches < 2 or not math.isfinite(sums.squares + grad_norm):
        return None
    factor = sums.targets / replicas / loss_scale
    small = sums.squares * factor**2 / sums.batches
    big, b, B = grad_norm**2, sums.batches / sums.inverses, sums.targets
    return Estimate(noise=(small - big) / (1 / b - 1 / B), signal=(B * big - b * small) / (B - b))


def average(before: Estimate, new: Estimate) -> Estimate:
    """Return the updated moving averages.

    Both averages start at zero; the resulting bias cancels in their ratio.
    """
    return Estimate(
        *(DECAY * old + (1.0 - DECAY) * each for old, each in zip(before, new, strict=True))
    )
