"""What the learning rate and the batch size are, as pure functions of how far the run is.

Both count data, not optimizer steps: tokens for the learning rate, sequences for the batch. So they
do not change with the world size, the micro-batch or the accumulation, and a resume needs no state.
Knows nothing of torch.
"""

import math
from dataclasses import dataclass

SCHEDULES = ("cosine", "wsd", "linear", "constant")


@dataclass(frozen=True)
class LearningRate:
    """The learning rate of a step, from the number of tokens trained at the END of that step.

    Counting the step's own tokens means that warm-up does not waste its first step at zero, and
    that the last step of a run has the minimum, not one step short of it.

    Args:
        kind: after warm-up, `cosine` and `linear` fall to `minimum` at `total_tokens`; `wsd`
            (warm-up, stable, decay; arXiv 2404.06395) holds the peak and falls linearly over the
            last `decay_tokens`; `constant` holds the peak.
        peak, minimum: learning rates; `warmup_tokens`, `decay_tokens`, `total_tokens`: in tokens.
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
        if self.kind == "constant":
            return self.peak
        decay_start = self.warmup_tokens
        if self.kind == "wsd":
            decay_start = max(self.warmup_tokens, self.total_tokens - self.decay_tokens)
        if tokens <= decay_start:
            return self.peak
        done = min(1.0, (tokens - decay_start) / max(1, self.total_tokens - decay_start))
        remaining = 0.5 * (1.0 + math.cos(math.pi * done)) if self.kind == "cosine" else 1.0 - done
        return self.minimum + (self.peak - self.minimum) * remaining


@dataclass(frozen=True)
class BatchSchedule:
    """The global batch size, from the number of sequences already consumed.

    A ramp grows the batch from `start_sequences` to `batch_sequences` over the first
    `ramp_sequences` sequences, in equal steps, each size a multiple of `start_sequences`: whatever
    world size divides the first batch divides them all.

    Args:
        batch_sequences: sequences of a full global batch.
        start_sequences: sequences of the first batch; 0 for no ramp; divides `batch_sequences`.
        ramp_sequences: how many sequences the ramp takes; 0 for no ramp.
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
