"""Adaptive gradient clipping: clips gradient norms that stand out from those of recent steps.

Pure; independent of torch, files and ranks. Every rank passes in the norm of the global gradient,
so every rank clips alike. The statistics are saved in the checkpoint, so a resumed run clips like
one that was never interrupted, on any number of ranks.

Source: Kumar et al. 2025, "ZClip" (arXiv 2504.02507), algorithm 1 with reciprocal clipping: a norm
that is z > Z standard deviations above the moving mean is clipped to mean + (Z^2 / z) deviations,
so the larger the outlier, the closer to the mean it is clipped. The mean and the variance are then
updated with the clipped norm.
"""

from dataclasses import dataclass, field, replace

# The paper's constants: averages over about the last 33 steps, initialised from the first 25.
SMOOTHING, WARMUP_STEPS = 0.97, 25
EPSILON = 1e-6


@dataclass(frozen=True)
class NormStatistics:
    """Moving statistics of the gradient norm; saved in the checkpoint as JSON.

    Attributes:
        first: norms of the first steps, until there are `WARMUP_STEPS` of them.
        mean: moving average from then on; None before.
        variance: moving variance from then on.
    """

    first: list[float] = field(default_factory=list)
    mean: float | None = None
    variance: float = 0.0


class Clipping:
    """Decides the norm to which the gradient of each step is clipped.

    Args:
        max_norm: fixed clipping norm, `gradient_clipping` of the ds config; 0 for none.
        threshold: standard deviations above the mean beyond which a norm is an outlier; 0 turns
            adaptive clipping off.

    Attributes:
        statistics: include all steps so far; replaced by a new object after each step.
    """

    def __init__(self, max_norm: float, threshold: float):
        self.max_norm, self.threshold = max_norm, threshold
        self.statistics = NormStatistics()

    @property
    def is_adaptive(self) -> bool:
        """Whether outliers are clipped."""
        return self.threshold > 0.0

    @property
    def is_active(self) -> bool:
        """Whether there is any clipping, fixed or adaptive."""
        return self.is_adaptive or self.max_norm > 0.0

    def bound(self, grad_norm: float) -> float:
        """Return the norm to which a gradient is clipped; 0 for no clipping.

        Args:
            grad_norm: norm of the gradient, a finite number.
        """
        adaptive = self._adaptive_bound(grad_norm)
        if adaptive is None:
            return self.max_norm
        return min(adaptive, self.max_norm) if self.max_norm else adaptive

    def _adaptive_bound(self, grad_norm: float) -> float | None:
        """Return the norm to which an outlier is clipped; None if the norm is not an outlier."""
        mean = self.statistics.mean
        if not self.is_adaptive or mean is None:
            return None
        deviation = self.statistics.variance**0.5
        z = (grad_norm - mean) / (deviation + EPSILON)
        return mean + self.threshold**2 * deviation / z if z > self.threshold else None

    def metrics(self, clipped_to: float) -> dict[str, float]:
        """Return the metrics of a step: the clipping norm, if it varies and was applied."""
        return {"train/clip_norm": clipped_to} if self.is_adaptive and clipped_to else {}

    def end_step(self, grad_norm: float) -> None:
        """Update the statistics with an applied step.

        Args:
            grad_norm: norm before clipping, a finite number.
        """
        if not self.is_adaptive:
            return
        old = self.statistics
        if old.mean is None:
            first = [*old.first, grad_norm]
            if len(first) < WARMUP_STEPS:
                self.statistics = replace(old, first=first)
                return
            mean = sum(first) / len(first)
            variance = sum((norm - mean) ** 2 for norm in first) / len(first)
            self.statistics = NormStatistics(mean=mean, variance=variance)
            return
        bound = self._adaptive_bound(grad_norm)
        value = grad_norm if bound is None else bound
        mean = SMOOTHING * old.mean + (1 - SMOOTHING) * value
        variance = SMOOTHING * old.variance + (1 - SMOOTHING) * (value - mean) ** 2
        self.statistics = NormStatistics(mean=mean, variance=variance)
