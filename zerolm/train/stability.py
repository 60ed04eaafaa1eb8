"""When a run stops or rolls back: `StopRequest`, and the actions of the spike guard.

All ranks decide alike in the same step: decisions use figures that were reduced over ranks.
"""

import math
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from zerolm.checkpoint import rollback
from zerolm.checkpoint.directory import Checkpoint
from zerolm.checkpoint.manifest import Progress
from zerolm.common import processes
from zerolm.common.errors import GaveUp
from zerolm.config.resolved import Resolved
from zerolm.config.run_records import Rollback
from zerolm.data.skips import sequence_range
from zerolm.distributed.collectives import broadcast_object
from zerolm.ds_config.profile import Profile
from zerolm.optim.spikes import (
    MAX_CONSECUTIVE_OVERFLOWS,
    ROLL_BACK,
    SKIP_WINDOW_STEPS,
    History,
    Policy,
    SpikeGuard,
)

SAVE_MARGIN = 1.5  # factor on the longest save so far, to estimate the last one


class StopRequest:
    """A request to save and stop: a signal, or the deadline of --stop_after.

    A second Ctrl-C ends the process at once; checkpoints on disk stay complete.

    Args:
        stop_after: seconds from now by which the run must have saved and ended; None: no deadline.
            The request is made early enough for one more step and one more save, going by the
            durations seen so far.
    """

    def __init__(self, stop_after: float | None):
        self.reason: str | None = None
        self._deadline = None if stop_after is None else time.monotonic() + stop_after
        self._polled_at: float | None = None
        self._save_seconds = 0.0
        for number in processes.stop_signals():
            signal.signal(number, self._request)

    def _request(self, number: int, frame: Any) -> None:
        if number == signal.SIGINT and self.reason is not None:
            os._exit(128 + number)  # an exception would wait for collectives and threads
        self.reason = self.reason or signal.Signals(number).name  # a launcher sends others after it

    def poll(self) -> bool:
        """Return whether this rank is to stop; the ranks must still agree. Call once per step."""
        now = time.monotonic()
        step_seconds = now - (self._polled_at or now)
        self._polled_at = now
        left = math.inf if self._deadline is None else self._deadline - now
        late = left <= step_seconds + SAVE_MARGIN * self._save_seconds
        if self.reason is None and late:
            self.reason = "--stop_after"
        return self.reason is not None

    def record_save(self, seconds: float) -> None:
        """Record the duration of a save, to reserve as much time for the last one."""
        self._save_seconds = max(self._save_seconds, seconds)


def spike_guard(settings: Resolved, profile: Profile) -> SpikeGuard:
    """Return the spike guard that the settings describe, with an empty history.

    Args:
        profile: decides whether the norm is the gradient's (not with Muon), and whether skipped
            steps are normal (fp16).
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
    """Return the fields of the event of a step that was an anomaly, or was not applied.

    Args:
        progress: after the step.
        result: `StepResult` of the step.
        num_sequences: size of its batch.
    """
    start, end = progress.position - num_sequences, progress.position
    return {
        "sequences": sequence_range(start, end, progress.skipped_windows),
        "loss": str(result.loss),
        "grad_norm": str(result.grad_norm),
        "reason": guard.reason or "fp16: the gradients overflowed at this loss scale",
    }


def plan_rollback(
    guard: SpikeGuard,
    response: str,
    progress: Progress,
    settings: Resolved,
    run_dir: Path,
    batch_schedule: Callable[[int], int],
    rank: int,
    position_of: Callable[[Checkpoint], int],
) -> Rollback | None:
    """Return the rollback to carry out; None if there is no checkpoint to roll back to yet.

    Every rank must call; only rank 0 reads the disk.

    Args:
        response: of the guard to the last step: roll back or give up.
        progress: after that step.
        batch_schedule: position -> number of sequences of the batch that starts there.
        position_of: the position from which the run continues after loading a checkpoint.

    Raises:
        GaveUp: on every rank: the guard gives up, `max_rollbacks` is reached, or no checkpoint is
            from before the spike and no more steps may be refused.
    """
    first_anomaly = [*guard.recent(progress.step), progress.step][0]
    why = f"{guard.reason or f'{MAX_CONSECUTIVE_OVERFLOWS} consecutive fp16 overflows'}."
    entry = last_good = None
    if rank == 0:
        before_spike = rollback.target(run_dir, first_anomaly, 0)
        found = before_spike or rollback.target(run_dir, progress.step + 1, 0)
        last_good = found and str(found.directory)
        entry = rollback.plan(
            run_dir, progress, batch_schedule, first_anomaly, settings.rollback_margin, why,
            position_of,
        )  # fmt: skip
    entry, last_good = broadcast_object((entry, last_good))
    if response == ROLL_BACK and progress.rollbacks >= settings.max_rollbacks:
        why += f" The limit --max_rollbacks {settings.max_rollbacks} is reached."
    elif response == ROLL_BACK and entry is not None:
        return entry
    elif response == ROLL_BACK:
        if not guard.weights_lost and not guard.skips_exhausted(progress.step):
            return None  # the step was refused, the weights are intact
        why += " No checkpoint is from before the spike."
    elif guard.reason:
        limit = f"--max_skips {settings.max_skips} in {SKIP_WINDOW_STEPS} steps"
        why += f" The limit {limit} is reached."
    raise GaveUp(f"step {progress.step}: {why} {_advice(last_good)}")


def require_finite_weights(norm: float | None, step: int, checkpoint: str | None) -> None:
    """Check the weights before they are saved, so that no checkpoint ever holds a NaN.

    Args:
        norm: 2-norm of the parameters, the same on every rank; None if it is not known.
        checkpoint: the newest complete one, for the message.

    Raises:
        GaveUp: the norm is not finite.
    """
    if norm is not None and not math.isfinite(norm):
        raise GaveUp(f"step {step}: the norm of the weights is {norm}. {_advice(checkpoint)}")


def _advice(checkpoint: str | None) -> str:
    where = f"The last good checkpoint is {checkpoint}" if checkpoint else "There is no checkpoint"
    return f"{where}. A lower --learning_rate or more --warmup_tokens usually helps."
