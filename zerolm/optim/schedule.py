"""The learning rate and the batch size as pure functions of a run's progress.

Progress is measured in data, not optimizer steps: in tokens for the learning rate, in sequences
for the batch size. So neither depends on the world size, the micro-batch size or gradient
accumulation, and resuming needs no state. Independent of torch.

To add a schedule, add an entry to `SCHEDULES`: the flag's choices, the defaults, the validation and
the rules for resuming are derived from that entry.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class LearningRate:
    """The learning rate of a step, computed from the tokens trained at the END of that step.

    Including the step's own tokens keeps warm-up from wasting its first step at zero, and makes
    the last step of a run use exactly the minimum.

    Args:
        kind: name of the curve after the linear warm-up, from `SCHEDULES`.
        peak: learning rate at the end of warm-up.
        minimum: learning rate at the end of the run, if the schedule uses this value.
        warmup_tokens: length of the warm-up from 0 to the peak in tokens.
        decay_tokens: length of the final decay in tokens, if the schedule uses this value.
    """

    kind: str
    peak: float
    minimum: float
    warmup_tokens: int
    decay_tokens: int
    total_tokens: int

    def __call__(self, tokens: int) -> float:
        if tokens < self.warmup_tokens:
            return self.peak * tokens / self.warmup_tokens
        return SCHEDULES[self.kind].rate(self, tokens)

    def decay(self, tokens: int, start: int, remaining: Callable[[float], float]) -> float:
        """Return the learning rate during a decay from the peak at `start` to the minimum at
        `total_tokens`.

        Args:
            remaining: a function from `DECAY_SHAPES`.
        """
        if tokens <= start:
            return self.peak
        done = min(1.0, (tokens - start) / max(1, self.total_tokens - start))
        return self.minimum + (self.peak - self.minimum) * remaining(done)


class Schedule(NamedTuple):
    """A learning-rate curve after warm-up, and the properties on which settings and resuming
    depend.

    Attributes:
        rate: takes a `LearningRate` and the number of tokens trained, which is past warm-up;
            returns the learning rate.
        uses_minimum: whether the rate depends on the minimum.
        uses_decay_tokens: whether `decay_tokens` is the length of the decay.
        needs_total: whether the curve depends on `total_tokens`, which must then stay the same
            when a run is resumed.
    """

    rate: Callable[[LearningRate, int], float]
    uses_minimum: bool = True
    uses_decay_tokens: bool = False
    needs_total: bool = True


# Each function maps the completed fraction of a decay to the remaining height, which falls from 1
# to 0.
DECAY_SHAPES: dict[str, Callable[[float], float]] = {
    "linear": lambda done: 1.0 - done,
    "cosine": lambda done: 0.5 * (1.0 + math.cos(math.pi * done)),
    "sqrt": lambda done: 1.0 - math.sqrt(done),
}


def _cosine(curve: LearningRate, tokens: int) -> float:
    """Decay along a half cosine, from the end of warm-up to the end of the run."""
    return curve.decay(tokens, curve.warmup_tokens, DECAY_SHAPES["cosine"])


def _linear(curve: LearningRate, tokens: int) -> float:
    """Decay linearly, from the end of warm-up to the end of the run."""
    return curve.decay(tokens, curve.warmup_tokens, DECAY_SHAPES["linear"])


def _wsd(curve: LearningRate, tokens: int) -> float:
    """Stay at the peak, then decay linearly over the last `decay_tokens` (arXiv 2404.06395)."""
    start = max(curve.warmup_tokens, curve.total_tokens - curve.decay_tokens)
    return curve.decay(tokens, start, DECAY_SHAPES["linear"])


def _constant(curve: LearningRate, tokens: int) -> float:
    """Stay at the peak."""
    return curve.peak


SCHEDULES = {
    "cosine": Schedule(_cosine),
    "wsd": Schedule(_wsd, uses_decay_tokens=True),
    "linear": Schedule(_linear),
    "constant": Schedule(_constant, uses_minimum=False, needs_total=False),
}
# For messages: schedules that use `decay_tokens`, and schedules whose runs can be extended.
WITH_DECAY_TOKENS = " or ".join(name for name, each in SCHEDULES.items() if each.uses_decay_tokens)
EXTENDABLE = " or ".join(name for name, each in SCHEDULES.items() if not each.needs_total)


@dataclass(frozen=True)
class BatchSchedule:
    """The global batch size, computed from the number of sequences already trained.

    A ramp increases the batch in equal increments from `start_sequences` to `batch_sequences` over
    the first `ramp_sequences` sequences. Each size is a multiple of `start_sequences`, so a world
    size that divides the first batch divides all of them.

    Args:
        batch_sequences: sequences in a full global batch.
        start_sequences: sequences in the first batch, a divisor of `batch_sequences`; 0: no ramp.
        ramp_sequences: length of the ramp in sequences; 0: no ramp.
    """

    batch_sequences: int
    start_sequences: int = 0
    ramp_sequences: int = 0

    def __call__(self, position: int) -> int:
        """Return the number of sequences in the global batch that starts at `position`."""
        if not self.start_sequences or position >= self.ramp_sequences:
            return self.batch_sequences
        multiples = self.batch_sequences // self.start_sequences
        return self.start_sequences * (1 + (multiples - 1) * position // self.ramp_sequences)

    def steps(self, position: int, end_position: int) -> int:
        """Return the number of optimizer steps from `position` until `end_position` is reached or
        passed.
        """
        steps = 0
        while position < min(end_position, self.ramp_sequences):
            position += self(position)
            steps += 1
        return steps + max(0, -(-(end_position - position) // self.batch_sequences))
