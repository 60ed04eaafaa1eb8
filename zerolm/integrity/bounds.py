"""Normal ranges for a step's figures, estimated from the run's own recent steps.

Everything is computed on the figures' device, so checking a step needs no synchronisation with the
host. A suspicious figure only causes the step to be recomputed, so a false alarm costs only time.
Each false alarm widens the bounds, which keeps that time short for any kind of figures.
"""

import math

import torch

WINDOW_STEPS, MIN_STEPS, UPDATE_STEPS = 128, 32, 16
DEVIATIONS = 8.0  # number of robust deviations of the logarithm
LEAST_FACTOR = 4.0  # ratio to the median below which a figure is never suspicious
MAD_TO_DEVIATION = 1.4826  # for normal noise
# A false alarm widens the bounds, which return to their old width within a few thousand steps. So
# in the long run, at most one step in ln(1.5) / 0.001 = 400 is a false alarm, 0.25% of the time.
WIDEN, NARROW = 1.5, 0.999
TINY = 1e-30  # smaller figures are replaced by this
LARGE = 1e4  # exceeds any logarithm of a float32
LARGEST = torch.finfo(torch.float32).max


class Bounds:
    """Bounds on positive figures, computed from the medians and the median absolute deviations of
    their logarithms.

    A step uses few operations, because each of them is expensive on a GPU: logarithms are computed
    only when the bounds are updated.

    Args:
        non_finite_is_odd: False if all figures except the last may be infinite.
    """

    def __init__(self, non_finite_is_odd: bool = True) -> None:
        self._non_finite_is_odd = non_finite_is_odd
        self._seen: torch.Tensor | None = None  # (WINDOW_STEPS, figures)
        self._count = 0
        self._width = 1.0
        self._low = self._high = torch.empty(0)

    def add(self, figures: torch.Tensor) -> torch.Tensor:
        """Add a step's figures, float32 (figures,); return whether one is suspicious, as a scalar
        tensor.

        A figure is suspicious if it is not finite or far outside the normal range.
        """
        if self._seen is None:
            self._seen = figures.new_zeros(WINDOW_STEPS, len(figures))
            self._low = torch.zeros_like(figures)
            self._high = torch.full_like(figures, LARGEST)
        self._seen[self._count % WINDOW_STEPS] = figures
        self._count += 1
        if not self._non_finite_is_odd:
            figures = figures.clone()
            figures[:-1] = figures[:-1].where(torch.isfinite(figures[:-1]), self._low[:-1])
        odd = (figures.clamp(self._low, self._high) != figures).any()  # NaN differs from itself
        self._width = max(1.0, self._width * NARROW)
        if self._count >= MIN_STEPS and self._count % UPDATE_STEPS == 0:
            self._update(self._seen[: self._count])
        return odd

    def _update(self, figures: torch.Tensor) -> None:
        logs = figures.clamp_min(TINY).log()
        seen = logs.where(torch.isfinite(logs), torch.nan)
        center = seen.nanmedian(0).values
        deviation = MAD_TO_DEVIATION * (seen - center).abs().nanmedian(0).values
        half = self._width * torch.clamp(DEVIATIONS * deviation, min=math.log(LEAST_FACTOR))
        half = half.nan_to_num(LARGE)  # for a figure that was never finite
        center = center.nan_to_num(0.0)
        self._low, self._high = (center - half).exp(), (center + half).exp().clamp_max(LARGEST)

    def widen(self) -> None:
        """Widen the bounds after a false alarm."""
        self._width *= WIDEN
        if self._count >= MIN_STEPS and self._seen is not None:
            self._update(self._seen[: self._count])
