"""When a run stops before its token budget is spent: on request, or because it gave up.

Every decision is made from figures that all ranks have summed, so all ranks make the same one in
the same step.
"""

import math
import signal
import time
from typing import Any

from zerolm.errors import GaveUp
from zerolm.spike import History, Ladder, Policy

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT)


class StopRequest:
    """Remembers that this process was asked to save and stop.

    Args:
        stop_after: seconds from now after which the run asks itself to stop, or None.

    A second Ctrl-C ends the process at once; the checkpoints on disk stay whole.
    """

    def __init__(self, stop_after: float | None):
        self.reason: str | None = None
        self._deadline = None if stop_after is None else time.monotonic() + stop_after
        for number in STOP_SIGNALS:
            signal.signal(number, self._request)

    def _request(self, number: int, frame: Any) -> None:
        if number == signal.SIGINT and self.reason is not None:
            raise KeyboardInterrupt
        self.reason = signal.Signals(number).name

    def asked(self) -> bool:
        """Tell whether this rank was asked to stop; the ranks still have to agree."""
        late = self._deadline is not None and time.monotonic() >= self._deadline
        if self.reason is None and late:
            self.reason = "--stop_after"
        return self.reason is not None


def ladder(settings: Any, optimizer_type: str, precision: str) -> Ladder:
    """Return the ladder that the settings describe, without a history yet.

    Args:
        settings: resolved.
        optimizer_type: of the ds config.
        precision: of the weights: fp16 searches its loss scale by skipping steps.
    """
    policy = Policy(
        threshold=settings.spike_threshold,
        window=settings.spike_window,
        skip=settings.skip_spikes,
        cooldown_after=settings.cooldown_after,
        cooldown_factor=settings.cooldown_factor,
        cooldown_steps=settings.cooldown_steps,
        rollback_after=settings.rollback_after,
        max_skips=settings.max_skips,
        watch_norm=optimizer_type.lower() != "muon",
        overflows_are_normal=precision == "fp16",
    )
    return Ladder(policy, History())


def gave_up(step: int, why: str, checkpoint: str | None) -> GaveUp:
    """Return the error that ends a run.

    Args:
        why: the sentence that says what the budget was spent on.
        checkpoint: the last good checkpoint, to be named.
    """
    return GaveUp(f"step {step}: {why} {_advice(checkpoint)}")


def refuse_weights(norm: float | None, step: int, checkpoint: str | None) -> None:
    """Give up rather than save weights that are not finite: no checkpoint ever holds a NaN.

    Args:
        norm: 2-norm of the parameters; None where it is not known.

    Raises:
        GaveUp: the 2-norm of the parameters is not finite.
    """
    if norm is not None and not math.isfinite(norm):
        raise GaveUp(f"step {step}: the norm of the weights is {norm}. {_advice(checkpoint)}")


def _advice(checkpoint: str | None) -> str:
    where = f"The last good checkpoint is {checkpoint}" if checkpoint else "There is no checkpoint"
    return f"{where}. A lower --learning_rate or more --warmup_tokens usually helps."
