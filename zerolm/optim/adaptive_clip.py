"""Clipping at what is usual: gradient norms that stand out from the last ones are cut back. Pure.

Knows nothing of torch, files or ranks. Every rank feeds the norm of the global batch's gradient, so
every rank clips alike; what is remembered is in the checkpoint, so a resumed run clips as one that
was never interrupted, on any number of ranks.

Source: Kumar et al. 2025, "ZClip" (arXiv 2504.02507), algorithm 1 with its reciprocal clipping: a
norm that is z > Z deviations above the moving mean is clipped to mean + (Z^2 / z) deviations, so
that the more it stands out, the closer to the mean it comes; the mean and the variance then take in
the clipped norm.
"""

from dataclasses import dataclass, field, replace

# The paper's: a moving average over about the last 33 steps, begun with the mean of the first 25.
SMOOTHING, WARMUP_STEPS = 0.97, 25
EPSILON = 1e-6


@dataclass(frozen=True)
class Usual:
    """What gradient norms are usual, in the checkpoint as JSON.

    Attributes:
        first: norms of the first steps, until there are `WARMUP_STEPS` of them.
        mean, variance: moving averages from then on.
    """

    first: list[float] = field(default_factory=list)
    mean: float | None = None
    variance: float = 0.0


class Clipping:
    """What the gradient of each step is clipped to.

    Args:
        fixed: norm that no gradient exceeds, `gradient_clipping` of the ds config; 0: none.
        threshold: deviations above the mean from which on a norm stands out; 0: none does.

    Attributes:
        usual: what this step leaves, another object after each step.
        adapts: whether there is a threshold.
    """

    def __init__(self, fixed: float, threshold: float):
        self.fixed, self.threshold = fixed, threshold
        self.usual = Usual()

    @property
    def adapts(self) -> bool:
        return self.threshold > 0.0

    @property
    def clips(self) -> bool:
        """Whether there is any clipping."""
        return self.adapts or self.fixed > 0.0

    def bound(self, grad_norm: float) -> float:
        """Return the norm to which a gradient is clipped, 0 for not at all.

        Args:
            grad_norm: of it, a finite number.
        """
        outlier = self._outlier(grad_norm)
        if outlier is None:
            return self.fixed
        return min(outlier, self.fixed) if self.fixed else outlier

    def _outlier(self, grad_norm: float) -> float | None:
        """Return what a norm that stands out is clipped to, or None."""
        usual = self.usual
        if not self.adapts or usual.mean is None:
            return None
        deviation = usual.variance**0.5
        z = (grad_norm - usual.mean) / (deviation + EPSILON)
        return usual.mean + self.threshold**2 * deviation / z if z > self.threshold else None

    def row(self, clipped_to: float) -> dict[str, float]:
        """Return the metric of a step: where its clipping began, while that changes."""
        return {"train/clip_norm": clipped_to} if self.adapts and clipped_to else {}

    def end_step(self, grad_norm: float) -> None:
        """Take note of a step that was taken.

        Args:
            grad_norm: before clipping, a finite number.
        """
        if not self.adapts:
            return
        usual = self.usual
        if usual.mean is None:
            first = [*usual.first, grad_norm]
            if len(first) < WARMUP_STEPS:
                self.usual = replace(usual, first=first)
                return
            mean = sum(first) / len(first)
            variance = sum((each - mean) ** 2 for each in first) / len(first)
            self.usual = Usual(mean=mean, variance=variance)
            return
        outlier = self._outlier(grad_norm)
        value = grad_norm if outlier is None else outlier
        mean = SMOOTHING * usual.mean + (1 - SMOOTHING) * value
        variance = SMOOTHING * usual.variance + (1 - SMOOTHING) * (value - mean) ** 2
        self.usual = Usual(mean=mean, variance=variance)
