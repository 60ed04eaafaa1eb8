"""When a step is an anomaly, and what the ladder does about it. Pure: figures in, decisions out.

Knows nothing of torch, files or ranks. Every rank feeds the same all-reduced figures, so every rank
decides the same in the same step; what is remembered is in the checkpoint, so a resumed run decides
as one that was never interrupted. docs/stability.md is for users.

The median of the last accepted steps and their median absolute deviation (MAD) stand for what is
usual. Mean and standard deviation would not do: one spike in the window moves both, and hides the
next. Source: Leys et al., "Detecting outliers" (2013), for the MAD and its factor; OLMo-core's
SkipStepOptimizer for a window of 128 steps, six deviations, and half a window before it begins.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

MAD_TO_DEVIATION = 1.4826  # for normal noise: 1 / the 75% quantile
# The scale is never less than this share of the median: else a flat window makes a spike of every
# wiggle. Gradient norms have heavy tails that clipping deals with: six of their scales is four
# times the median.
LOSS_FLOOR, NORM_FLOOR = 0.02, 0.5
SKIPS_SPAN_STEPS = 1000  # `max_skips` is a number of refused steps in so many
# fp16 starts at a loss scale of 2^16 and halves it each time: 16 skips are its normal start.
MOST_OVERFLOWS_IN_A_ROW = 40

COOL_DOWN, ROLL_BACK, GIVE_UP = "cooldown", "rollback", "give_up"


@dataclass(frozen=True)
class Policy:
    """What is a spike, and which rungs the ladder has.

    Attributes:
        threshold: robust z-score above which a loss or gradient norm is a spike; 0: none is.
        window: accepted steps that are compared with; also the steps over which anomalies count.
        skip: refuse steps with a spike; those that are not finite are refused in any case.
        cooldown_after: anomalies in the window that lower the learning rate; 0: never.
        cooldown_factor: by this factor.
        cooldown_steps: for so many accepted steps.
        rollback_after: anomalies in the window that roll the run back; 0: never.
        max_skips: anomalies in `SKIPS_SPAN_STEPS` at which the run gives up; 0: no limit.
        watch_norm: False where the reported norm is not that of the gradient (Muon).
        overflows_are_normal: fp16 searches its loss scale by skipping steps.
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
    """What the ladder remembers, in the checkpoint as JSON.

    Attributes:
        losses, grad_norms: of the last accepted steps, at most a window of them.
        anomalies: steps of the last anomalies, ascending.
        cooldown_left: accepted steps for which the learning rate stays lowered.
        overflows: steps in a row that fp16 skipped.
    """

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    anomalies: list[int] = field(default_factory=list)
    cooldown_left: int = 0
    overflows: int = 0


def robust_z(value: float, window: Sequence[float], floor: float) -> float:
    """Return by how many robust deviations a value is above the median of a window.

    Args:
        window: at least one finite number.
        floor: least scale, as a share of the median's size.
    """
    median = statistics.median(window)
    deviation = MAD_TO_DEVIATION * statistics.median(abs(each - median) for each in window)
    scale = max(deviation, floor * abs(median))
    if scale == 0.0:
        return 0.0 if value == median else math.copysign(math.inf, value - median)
    return (value - median) / scale


class Ladder:
    """Judges each step, and says which rung it leads to.

    A step is judged in this order: `judge_loss`, `judge_norm`, `end_step`.

    Args:
        policy: which rungs there are.
        history: what earlier steps left.

    Attributes:
        history: what this step leaves, another object after each step.
        reason: why the step at hand is an anomaly, or None.
        refused: it must not be taken.
        spoilt: it was taken although it was not finite, and the weights are lost.
    """

    def __init__(self, policy: Policy, history: History):
        self.policy, self.history = policy, history
        self.reason: str | None = None
        self.refused = self.spoilt = False

    @property
    def factor(self) -> float:
        """What the learning rate of the next step is multiplied by."""
        return self.policy.cooldown_factor if self.history.cooldown_left else 1.0

    def judge_loss(self, loss: float) -> bool:
        """Begin to judge a step by its loss; return whether to refuse it."""
        self.reason = _anomaly("train/loss", loss, self.history.losses, LOSS_FLOOR, self.policy)
        self.refused = self.reason is not None and (self.policy.skip or not math.isfinite(loss))
        return self.refused

    def judge_norm(self, grad_norm: float) -> bool:
        """Judge the step by its gradient norm, a finite number; return whether to refuse it."""
        if self.policy.watch_norm and self.reason is None:
            norms = self.history.grad_norms
            self.reason = _anomaly("train/grad_norm", grad_norm, norms, NORM_FLOOR, self.policy)
            self.refused = self.reason is not None and self.policy.skip
        return self.refused

    def end_step(self, step: int, loss: float, grad_norm: float, applied: bool) -> str | None:
        """Take note of the judged step, and return the rung that it leads to, or None.

        Args:
            applied: the weights were changed.
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
            return GIVE_UP if new["overflows"] >= MOST_OVERFLOWS_IN_A_ROW else None
        span = max(SKIPS_SPAN_STEPS, policy.window)
        new["anomalies"] = [*(each for each in past.anomalies if step - each < span), step]
        self.history = replace(past, **new)
        self.spoilt = applied and not finite
        return self._rung(step)

    def _rung(self, step: int) -> str | None:
        policy, count = self.policy, len(self.recent(step))
        if self.spoilt or 0 < policy.rollback_after <= count:
            return ROLL_BACK
        if self.skips_are_spent(step):
            return GIVE_UP
        if 0 < policy.cooldown_after <= count and not self.history.cooldown_left:
            self.history = replace(self.history, cooldown_left=policy.cooldown_steps)
            return COOL_DOWN
        return None

    def recent(self, step: int) -> list[int]:
        """Return the steps of the anomalies that count together at `step`, ascending."""
        return [each for each in self.history.anomalies if step - each < self.policy.window]

    def skips_are_spent(self, step: int) -> bool:
        """Tell whether too many steps of the last `SKIPS_SPAN_STEPS` were anomalies."""
        within = [each for each in self.history.anomalies if step - each < SKIPS_SPAN_STEPS]
        return 0 < self.policy.max_skips <= len(within)


def _anomaly(
    name: str, value: float, window: Sequence[float], floor: float, policy: Policy
) -> str | None:
    """Return why a figure is an anomaly, or None."""
    if not math.isfinite(value):
        return f"{name} is {value}"
    if not policy.threshold or len(window) < max(2, policy.window // 2):
        return None
    z = robust_z(value, window, floor)
    if z <= policy.threshold:
        return None
    usual = statistics.median(window)
    return f"{name} {value:.4g} is {z:.1f} deviations above the usual {usual:.4g}"
