"""Stop requests, a run's spike guard, and a check for finite weights before each save."""

import math
import os
import signal
import time
from typing import Any

from zerolm.checkpoint.manifest import Progress
from zerolm.common import processes
from zerolm.common.errors import GaveUp
from zerolm.config.settings import Settings
from zerolm.data.skips import sequence_range
from zerolm.ds_config.profile import Profile
from zerolm.optim.spikes import History, Policy, SpikeGuard

SAVE_MARGIN = 1.5  # time reserved for the final save, relative to the longest save so far


class StopRequest:
    """A request to save and stop, made by a signal or by the deadline from --stop_after.

    A second Ctrl-C ends the process immediately; checkpoints on disk remain complete.

    Args:
        stop_after: seconds from now by which the run must have saved and ended; None means no
            deadline. The request is made early enough for one more step and one more save, based on
            the durations so far.
    """

    def __init__(self, stop_after: float | None):
        self.reason: str | None = None
        self.received: str | None = None  # by `receive`
        self._deadline = None if stop_after is None else time.monotonic() + stop_after
        self._polled_at: float | None = None
        self._save_seconds = 0.0
        # Python calls a handler only between two bytecodes; a collective may last for hours.
        self._signals, written = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(written, warn_on_full_buffer=False)
        for number in processes.stop_signals():
            signal.signal(number, self._request)

    def receive(self) -> None:
        """Set `received` to the first signal, even if its handler has not been called yet.

        Called by another thread.
        """
        try:
            numbers = os.read(self._signals, 64)
        except BlockingIOError:
            return
        for number in numbers:
            if number in processes.stop_signals():
                self.received = self.received or signal.Signals(number).name

    def _request(self, number: int, frame: Any) -> None:
        if number == signal.SIGINT and self.reason is not None:
            os._exit(128 + number)  # with an exception, exit would wait for collectives and threads
        self.reason = self.reason or signal.Signals(number).name  # launchers send more than one

    def poll(self) -> bool:
        """Return whether this rank received a stop request, on which all ranks must still agree.

        Call this once per step.
        """
        now = time.monotonic()
        step_seconds = now - (self._polled_at or now)
        self._polled_at = now
        left = math.inf if self._deadline is None else self._deadline - now
        late = left <= step_seconds + SAVE_MARGIN * self._save_seconds
        if self.reason is None and late:
            self.reason = "--stop_after"
        return self.reason is not None

    def record_save(self, seconds: float) -> None:
        """Record the duration of a save, to reserve enough time for the final save."""
        self._save_seconds = max(self._save_seconds, seconds)


def spike_guard(settings: Settings, profile: Profile) -> SpikeGuard:
    """Return a spike guard with the given settings and an empty history.

    Args:
        profile: with Muon, the gradient norm is not watched; with fp16, overflows are normal.
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
        watch_norm=not profile.uses_muon,
        overflows_are_normal=profile.precision == "fp16",
    )
    return SpikeGuard(policy, History())


def anomaly_fields(
    guard: SpikeGuard, progress: Progress, result: Any, num_sequences: int
) -> dict[str, Any]:
    """Return the event fields for a step that was an anomaly or was not applied.

    Args:
        progress: progress after the step.
        result: the step's `StepResult`.
        num_sequences: number of sequences in the step's batch.
    """
    start, end = progress.position - num_sequences, progress.position
    return {
        "sequences": sequence_range(start, end, progress.skipped_windows),
        "loss": str(result.loss),
        "grad_norm": str(result.grad_norm),
        "reason": guard.reason or "fp16: the gradients overflowed at this loss scale",
    }


def require_finite_weights(norm: float | None, step: int, checkpoint: str | None) -> None:
    """Check that the weights are finite before they are saved, so no checkpoint contains a NaN.

    Args:
        norm: 2-norm of the parameters, identical on all ranks; None if unknown.
        checkpoint: path of the newest complete checkpoint, for the message.

    Raises:
        GaveUp: the norm is not finite.
    """
    if norm is not None and not math.isfinite(norm):
        raise GaveUp(f"step {step}: the norm of the weights is {norm}. {advice(checkpoint)}")


def advice(checkpoint: str | None) -> str:
    """Return advice for a user whose run has given up, including the last good checkpoint."""
    where = f"The last good checkpoint is {checkpoint}" if checkpoint else "There is no checkpoint"
    return f"{where}. A lower --learning_rate or more --warmup_tokens usually helps."
