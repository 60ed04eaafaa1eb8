"""When a run leaves its course: on request, to go back before a spike, or because it gives up.

Every decision is made from figures that all ranks have summed, so all ranks make the same one in
the same step.
"""

import math
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from zerolm.checkpoint import rollback
from zerolm.checkpoint.directory import Progress
from zerolm.common.errors import GaveUp
from zerolm.config.resolved import Resolved
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

SAVE_MARGIN = 1.5  # the last checkpoint may take this many times the longest one so far
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT)


class StopRequest:
    """Remembers that this process was asked to save and stop.

    Args:
        stop_after: seconds from now by which the run is to have saved and ended, or None: it asks
            itself to stop one step and one save before, as far as it knows how long they take.

    A second Ctrl-C ends the process at once; the checkpoints on disk stay whole.
    """

    def __init__(self, stop_after: float | None):
        self.reason: str | None = None
        self._deadline = None if stop_after is None else time.monotonic() + stop_after
        self._asked_at: float | None = None
        self._save_seconds = 0.0
        for number in STOP_SIGNALS:
            signal.signal(number, self._request)

    def _request(self, number: int, frame: Any) -> None:
        if number == signal.SIGINT and self.reason is not None:
            os._exit(128 + number)  # an exception would wait for collectives, threads, trackers
        self.reason = signal.Signals(number).name

    def asked(self) -> bool:
        """Tell whether this rank was asked to stop; the ranks still have to agree."""
        now = time.monotonic()
        step_seconds = now - (self._asked_at or now)
        self._asked_at = now
        left = math.inf if self._deadline is None else self._deadline - now
        late = left <= step_seconds + SAVE_MARGIN * self._save_seconds
        if self.reason is None and late:
            self.reason = "--stop_after"
        return self.reason is not None

    def saved(self, seconds: float) -> None:
        """Remember how long a checkpoint took, to have that much time for the last one."""
        self._save_seconds = max(self._save_seconds, seconds)


def ladder(settings: Resolved, profile: Profile) -> SpikeGuard:
    """Return the ladder that the settings describe, without a history yet.

    Args:
        profile: decides whether the norm is the gradient's, and fp16 searches its loss scale by
            skipping steps.
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


def what_was_seen(
    ladder: SpikeGuard, progress: Progress, result: Any, sequences: int
) -> dict[str, Any]:
    """Return what an event says of a step that was an anomaly, or was not taken.

    Args:
        progress: after the step.
        result: its `StepResult`.
        sequences: of its batch.
    """
    start, end = progress.position - sequences, progress.position
    return {
        "sequences": sequence_range(start, end, progress.skipped_windows),
        "loss": str(result.loss),
        "grad_norm": str(result.grad_norm),
        "reason": ladder.reason or "fp16: the gradients overflowed at this loss scale",
    }


def roll_back_or_give_up(
    ladder: SpikeGuard,
    rung: str,
    progress: Progress,
    settings: Resolved,
    run_dir: Path,
    batch_schedule: Callable[[int], int],
    rank: int,
) -> rollback.Entry | None:
    """Return the rollback to carry out, or None where there is nothing to go back to yet.

    Every rank must call; only the first one looks at the disk.

    Args:
        rung: that the last step led to.
        progress: after that step.

    Raises:
        GaveUp: the budget is spent.
    """
    spike = [*ladder.recent(progress.step), progress.step][0]
    why = f"{ladder.reason or f'{MAX_CONSECUTIVE_OVERFLOWS} overflows of fp16 in a row'}."
    entry = good = None
    if rank == 0:
        found = rollback.target(run_dir, spike, 0) or rollback.target(run_dir, progress.step + 1, 0)
        good = found and str(found.directory)
        margin = settings.rollback_margin
        entry = rollback.plan(run_dir, progress, batch_schedule, spike, margin, why)
    entry, good = broadcast_object((entry, good))
    if rung == ROLL_BACK and progress.rollbacks >= settings.max_rollbacks:
        why += f" --max_rollbacks {settings.max_rollbacks} are spent."
    elif rung == ROLL_BACK and entry is not None:
        return entry
    elif rung == ROLL_BACK:
        if not ladder.weights_lost and not ladder.skips_exhausted(progress.step):
            return None  # the step was refused; the next one may be better
        why += " No checkpoint is from before the spike."
    elif ladder.reason:
        why += f" --max_skips {settings.max_skips} in {SKIP_WINDOW_STEPS} steps are spent."
    raise GaveUp(f"step {progress.step}: {why} {_advice(good)}")


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
