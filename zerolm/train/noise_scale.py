"""The gradient noise scale, from the gradients of micro-batches against that of the global batch.

With B_simple tokens in a batch its gradient is as much noise as signal: smaller batches train with
fewer tokens, larger ones with fewer steps. Two batch sizes are enough to tell noise from signal,
since the square of a mean gradient over b tokens is that of the true one plus its variance / b:

    |G|^2 = (B |G_B|^2 - b |G_b|^2) / (B - b)        tr(S) = (|G_b|^2 - |G_B|^2) / (1/b - 1/B)

Both are noisy, so both are averaged over steps, and only then divided: B_simple = tr(S) / |G|^2.
Source: McCandlish et al. (2018), arXiv 1812.06162, appendix A.1. Micro-batches are looked at while
their backward pass runs, before ZeRO reduces or accumulates anything: no second pass, no copy.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch

from zerolm.train.norms import square

DECAY = 0.95  # of the averages, from one measured step to the next: the last 20 of them count


class SmallBatches:
    """Sums over the micro-batches of a step of what this rank knows of their gradients.

    Args:
        parameters: of the model; a hook is on each of them only while `backward` is open.
        device: where collectives of this run work.
        counts: False where another rank has the same micro-batches, and counts them.

    Attributes:
        figures: (5,) float64, to be summed over the ranks for `SmallBatchSums`.
    """

    def __init__(self, parameters: Sequence[Any], device: torch.device, counts: bool = True):
        self._parameters = [each for each in parameters if each.requires_grad]
        self._device, self._counts = device, counts
        self.begin()

    def begin(self) -> None:
        """Begin a step."""
        self.figures = torch.zeros(5, dtype=torch.float64, device=self._device)

    @contextmanager
    def backward(self, num_targets: int) -> Iterator[None]:
        """Look at the gradients of a backward pass.

        A hook on a parameter is called once a pass, with all that the pass adds to its gradient,
        also for a tied one. If a pass should come to one several times (checkpointing that is
        re-entrant, of shared layers), the step is not measured.

        Args:
            num_targets: that the loss of the micro-batch sums over.
        """
        squares: dict[int, torch.Tensor] = {}
        twice: list[int] = []

        def look(number: int, gradient: torch.Tensor) -> None:
            if number in squares:
                twice.append(number)
            squares[number] = square(gradient)

        hooks = [
            parameter.register_hook(partial(look, number))
            for number, parameter in enumerate(self._parameters)
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        if twice or not squares or num_targets == 0:
            self.figures[4] += 1
            return
        found = torch.stack([squares[number] for number in sorted(squares)])
        self.figures[0] += found.sum().to(self._device) / num_targets**2
        if not self._counts:
            return
        self.figures[1] += 1.0 / num_targets
        self.figures[2] += num_targets
        self.figures[3] += 1.0


class SmallBatchSums(NamedTuple):
    """`SmallBatches.figures`, summed over all ranks.

    Attributes:
        squares: of the norms of the micro-batches' gradients, each over its targets' square.
        inverses: one over the targets of each.
        targets: of all.
        batches: how many micro-batches.
        unknown: micro-batches whose gradient is not known.
    """

    squares: float
    inverses: float
    targets: float
    batches: float
    unknown: float

    @property
    def are_equal(self) -> bool:
        """Whether all micro-batches have as many targets."""
        return math.isclose(self.inverses * self.targets, self.batches**2, rel_tol=1e-12)


class Estimate(NamedTuple):
    """What one step, or an average over steps, says of its gradient.

    Attributes:
        noise: trace of the covariance of a token's gradient, tr(S).
        signal: square of the norm of the true gradient, |G|^2; can be negative in a single step.
    """

    noise: float = 0.0
    signal: float = 0.0

    @property
    def noise_scale_tokens(self) -> float | None:
        """B_simple in tokens, or None where noise hides the signal."""
        if self.noise <= 0.0 or self.signal <= 0.0:
            return None
        return self.noise / self.signal


def estimate(
    sums: SmallBatchSums, grad_norm: float, replicas: int, loss_scale: float = 1.0
) -> Estimate | None:
    """Return what the micro-batches of a step against its whole batch say; None if nothing.

    A micro-batch of n of the N targets goes backward with the sum of its losses * replicas / N
    (zerolm/train/step.py), so the gradient of its mean loss is N / (n * replicas) times its own.
    Where they differ in n, 1 / b is the mean of their 1 / n.

    Args:
        grad_norm: of the global batch, before clipping, unscaled.
        loss_scale: that the micro-batches' gradients were multiplied by, of fp16.
    """
    if sums.unknown or sums.batches < 2 or not math.isfinite(sums.squares + grad_norm):
        return None
    factor = sums.targets / replicas / loss_scale
    small = sums.squares * factor**2 / sums.batches
    big, b, B = grad_norm**2, sums.batches / sums.inverses, sums.targets
    return Estimate(noise=(small - big) / (1 / b - 1 / B), signal=(B * big - b * small) / (B - b))


def average(before: Estimate, new: Estimate) -> Estimate:
    """Return the moving averages; both begin at zero, which their ratio does not see."""
    return Estimate(
        *(DECAY * old + (1.0 - DECAY) * each for old, each in zip(before, new, strict=True))
    )
