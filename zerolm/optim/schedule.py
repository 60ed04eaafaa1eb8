"""The learning rate and the batch size as pure functions of a run's progress.

Both count data, not optimizer steps: tokens for the learning rate, sequences for the batch size. So
neither depends on the world size, the micro-batch or the accumulation, and a resume needs no state.
Independent of torch.

To add a schedule, add an entry to `SCHEDULES`: the choices of the flag, the defaults, the
validation and the rules for resuming follow from it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class LearningRate:
    """The learning rate of a step, from the number of tokens trained at the END of that step.

    Counting the step's own tokens keeps warm-up from wasting its first step at zero, and gives the
    last step of a run the minimum, not the value one step before it.

    Args:
        kind: name in `SCHEDULES` of the curve after the linear warm-up.
        peak: learning rate at the end of warm-up.
        minimum: learning rate at the end of the run, if the schedule uses it.
        warmup_tokens: length of the warm-up from 0 to the peak, in tokens.
        decay_tokens: length of the final decay, in tokens, if the schedule uses it.
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
        """Return the rate of a decay from the peak at `start` to the minimum at `total_tokens`.

        Args:
            remaining: one of `DECAY_SHAPES`.
        """
        if tokens <= start:
            return self.peak
        done = min(1.0, (tokens - start) / max(1, self.total_tokens - start))
        return self.minimum + (self.peak - self.minimum) * remaining(done)


class Schedule(NamedTuple):
    """The curve of a learning rate after warm-up, and what settings and resumes must know about it.

    Attributes:
        rate: (settings of the curve, tokens) -> learning rate, for tokens after warm-up.
        uses_minimum: whether the rate depends on the minimum.
        uses_decay_tokens: whether `decay_tokens` is the length of the decay.
        needs_total: whether the curve depends on `total_tokens`, which then must not change when a
            run is resumed.
    """

    rate: Callable[[LearningRate, int], float]
    uses_minimum: bool = True
    uses_decay_tokens: bool = False
    needs_total: bool = True


# Fraction of a decay that is done -> fraction of the way down that is left: from 1 at 0 to 0 at 1.
DECAY_SHAPES: dict[str, Callable[[float], float]] = {
    "linear": lambda done: 1.0 - done,
    "cosine": lambda done: 0.5 * (1.0 + math.cos(math.pi * done)),
    "sqrt": lambda done: 1.0 - math.sqrt(done),
}


def _cosine(curve: LearningRate, tokens: int) -> float:
    """Decay along a half cosine, from warm-up to the end."""
    return curve.decay(tokens, curve.warmup_tokens, DECAY_SHAPES["cosine"])


def _linear(curve: LearningRate, tokens: int) -> float:
    """Decay linearly, from warm-up to the end."""
    return curve.decay(tokens, curve.warmup_tokens, DECAY_SHAPES["linear"])


def _wsd(curve: LearningRate, tokens: int) -> float:
    """Warm up, stay at the peak, decay linearly over the last `decay_tokens` (arXiv 2404.06395)."""
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
# Names for messages: schedules that use `decay_tokens`, and schedules whose runs can be extended.
WITH_DECAY_TOKENS = " or ".join(name for name, each in SCHEDULES.items() if each.uses_decay_tokens)
EXTENDABLE = " or ".join(name for name, each in SCHEDULES.items() if not each.needs_total)


@dataclass(frozen=True)
class BatchSchedule:
    """The global batch size, from the number of sequences already consumed.

    A ramp grows the batch from `start_sequences` to `batch_sequences` over the first
    `ramp_sequences` sequences, in equal increments. Each size is a multiple of `start_sequences`,
    so a world size that divides the first batch divides all of them.

    Args:
        batch_sequences: sequences of a full global batch.
        start_sequences: sequences of the first batch, a divisor of `batch_sequences`; 0: no ramp.
        ramp_sequences: sequences that the ramp takes; 0: no ramp.
    """

    batch_sequences: int
    start_sequences: int = 0
    ramp_sequences: int = 0

    def __call__(self, position: int) -> int:
        """Return the size, in sequences, of the global batch that starts at `position`."""
        if not self.start_sequences or position >= self.ramp_sequences:
            return self.batch_sequences
        multiples = self.batch_sequences // self.start_sequences
        return self.start_sequences * (1 + (multiples - 1) * position // self.ramp_sequences)

    def steps(self, position: int, end_position: int) -> int:
        """Count the optimizer steps from `position` until `end_position` is reached or passed."""
        steps = 0
        while position < min(end_position, self.ramp_sequences):
            position += self(position)
            steps += 1
        return steps + max(0, -(-(end_position - position) // self.batch_sequences))
