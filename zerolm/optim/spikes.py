"""Detects loss and gradient spikes, and chooses a response: skip, cool down, roll back or give up.

The functions here map figures to decisions, and are independent of torch, files and ranks. Every
rank passes in the same all-reduced figures, so every rank makes the same decision in the same step.
The history is saved in the checkpoint, so a resumed run makes the same decisions as an
uninterrupted run. docs/stability.md is the user's guide.

Normal values are estimated from the median and the median absolute deviation (MAD) over the last
accepted steps. Mean and standard deviation would not work: a spike in the window changes both and
so hides the next spike. Source: Leys et al., "Detecting outliers" (2013), for the MAD and its
factor; OLMo-core's SkipStepOptimizer for the window of 128 steps, the six deviations, and waiting
for half a window.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

MAD_TO_DEVIATION = 1.4826  # for normal noise: 1 / the 75% quantile
# Lower bound on the deviation, as a fraction of the median: otherwise any fluctuation after a flat
# window would be a spike. Gradient norms have heavy tails, which clipping handles: with this bound,
# a norm that is six deviations above the median is at least four times the median.
LOSS_FLOOR, NORM_FLOOR = 0.02, 0.5
SKIP_WINDOW_STEPS = 1000  # the window for `max_skips`
# fp16 starts at a loss scale of 2^16 and halves it at each overflow: 16 skips are a normal start.
MAX_CONSECUTIVE_OVERFLOWS = 40

COOL_DOWN, ROLL_BACK, GIVE_UP = "cooldown", "rollback", "give_up"


@dataclass(frozen=True)
class Policy:
    """What counts as a spike, and how to respond.

    Attributes:
        threshold: robust z-score above which a loss or gradient norm is a spike; 0: no detection.
        window: number of accepted steps to compare with, and number of steps over which anomalies
            are counted.
        skip: whether to refuse steps with a spike. Steps whose figures are not finite are always
            refused.
        cooldown_after: anomalies in the window after which the learning rate is lowered; 0: never.
        cooldown_factor: factor on the learning rate during a cooldown.
        cooldown_steps: length of a cooldown, in accepted steps.
        rollback_after: anomalies in the window after which the run is rolled back; 0: never.
        max_skips: anomalies within `SKIP_WINDOW_STEPS` steps at which the run gives up; 0: no
            limit.
        watch_norm: whether to check the gradient norm; False if the optimizer reports a different
            norm (Muon).
        overflows_are_normal: whether skipped steps are expected, as when fp16 searches for its loss
            scale.
    """

    threshold: float = 6.0
    window: int = 128
    skip: bool = True
    cooldown_after: int = 3
    cooldown_factor: float = 0.5
    cooldown_steps: int = 100
    rollback_after: int = 6
    max_skips: int = 30
    watch_norm: bool = True
    overflows_are_normal: bool = False


@dataclass(frozen=True)
class History:
    """The state of a `SpikeGuard`; saved in the checkpoint as JSON.

    Attributes:
        losses: losses of the accepted steps in the last window, for comparison.
        grad_norms: gradient norms of the steps in `losses`.
        anomalies: step numbers of the last anomalies, ascending.
        cooldown_left: number of accepted steps for which the learning rate remains lowered.
        overflows: number of consecutive steps skipped because of fp16 overflows.
    """

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    anomalies: list[int] = field(default_factory=list)
    cooldown_left: int = 0
    overflows: int = 0


def robust_z(value: float, window: Sequence[float], floor: float) -> float:
    """Return the number of robust deviations by which a value exceeds a window's median.

    Args:
        window: values to compare with, of which at least one is finite.
        floor: lower bound on the deviation, as a fraction of the absolute median.
    """
    median = statistics.median(window)
    deviation = MAD_TO_DEVIATION * statistics.median(abs(each - median) for each in window)
    scale = max(deviation, floor * abs(median))
    if scale == 0.0:
        return 0.0 if value == median else math.copysign(math.inf, value - median)
    return (value - median) / scale


class SpikeGuard:
    """Checks each step for anomalies and decides how to respond.

    In each step, call `check_loss`, `check_grad_norm` and `end_step`, in this order.

    Args:
        history: state from a resumed run's checkpoint.

    Attributes:
        history: the current state; replaced by a new object after each step.
        reason: why the current step is an anomaly, or None.
        refused: whether the current step must not be applied.
        weights_lost: whether a step that was not finite was applied to the weights.
    """

    def __init__(self, policy: Policy, history: History):
        self.policy, self.history = policy, history
        self.reason: str | None = None
        self.refused = self.weights_lost = False

    @property
    def factor(self) -> float:
        """Factor by which the next step's learning rate is multiplied."""
        return self.policy.cooldown_factor if self.history.cooldown_left else 1.0

    def check_loss(self, loss: float) -> bool:
        """Start checking a step with its loss; return whether to refuse the step."""
        self.reason = _anomaly("train/loss", loss, self.history.losses, LOSS_FLOOR, self.policy)
        self.refused = self.reason is not None and (self.policy.skip or not math.isfinite(loss))
        return self.refused

    def check_grad_norm(self, grad_norm: float) -> bool:
        """Check the step's gradient norm, a finite number; return whether to refuse the step."""
        if self.policy.watch_norm and self.reason is None:
            norms = self.history.grad_norms
            self.reason = _anomaly("train/grad_norm", grad_norm, norms, NORM_FLOOR, self.policy)
            self.refused = self.reason is not None and self.policy.skip
        return self.refused

    def end_step(self, step: int, loss: float, grad_norm: float, applied: bool) -> str | None:
        """Record the checked step; return the response, which is one of the three constants or
        None.

        Args:
            applied: whether the step changed the weights.
        """
        policy, past = self.policy, self.history
        finite = math.isfinite(loss) and math.isfinite(grad_norm)
        if self.reason is None and not finite and (applied or not policy.overflows_are_normal):
            self.reason = "the gradients are not finite"
        new: dict[str, Any] = {"overflows": 0}
        if applied:
            new["cooldown_left"] = max(0, past.cooldown_left - 1)
        if self.reason is None:
            if applied:
                new["losses"] = [*past.losses, loss][-policy.window :]
                new["grad_norms"] = [*past.grad_norms, grad_norm][-policy.window :]
            else:
                new["overflows"] = past.overflows + 1
            self.history = replace(past, **new)
            return GIVE_UP if new["overflows"] >= MAX_CONSECUTIVE_OVERFLOWS else None
        span = max(SKIP_WINDOW_STEPS, policy.window)
        new["anomalies"] = [*(each for each in past.anomalies if step - each < span), step]
        self.history = replace(past, **new)
        self.weights_lost = applied and not finite
        return self._response(step)

    def _response(self, step: int) -> str | None:
        policy, count = self.policy, len(self.recent(step))
        if self.weights_lost or 0 < policy.rollback_after <= count:
            return ROLL_BACK
        if self.skips_exhausted(step):
            return GIVE_UP
        if 0 < policy.cooldown_after <= count and not self.history.cooldown_left:
            self.history = replace(self.history, cooldown_left=policy.cooldown_steps)
            return COOL_DOWN
        return None

    def recent(self, step: int) -> list[int]:
        """Return the steps with an anomaly in the window that ends at `step`, in order."""
        return [each for each in self.history.anomalies if step - each < self.policy.window]

    def skips_exhausted(self, step: int) -> bool:
        """Return whether `max_skips` of the last `SKIP_WINDOW_STEPS` steps were anomalies."""
        within = [each for each in self.history.anomalies if step - each < SKIP_WINDOW_STEPS]
        return 0 < self.policy.max_skips <= len(within)


def _anomaly(
    name: str, value: float, window: Sequence[float], floor: float, policy: Policy
) -> str | None:
    """Return why a figure is an anomaly, or None if it is not."""
    if not math.isfinite(value):
        return f"{name} is {value}"
    if not policy.threshold or len(window) < max(2, policy.window // 2):
        return None
    z = robust_z(value, window, floor)
    if z <= policy.threshold:
        return None
    median = statistics.median(window)
    return f"{name} {value:.4g} is {z:.1f} deviations above the usual {median:.4g}"
