"""When a run saves: what is waited for, what is said of it, and how many failures are borne.

Between the loop of a run and the writer of its checkpoints, which is handed in. All ranks make the
same calls.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

from zerolm.checkpoint.directory import Progress
from zerolm.common.errors import CheckpointWriteError
from zerolm.common.run_files import checkpoint_name
from zerolm.config.resolved import Resolved
from zerolm.watchdog.progress import record_progress


class Saves:
    """The saves of a run.

    Args:
        writer: a `zerolm.checkpoint.writer.CheckpointWriter`.
        settings: resolved ones.
        stop: is told how long a save takes, to leave time for the last one.
        say: prints on rank 0.

    Attributes:
        newest: the newest checkpoint that is whole, as a path.
    """

    def __init__(self, writer: Any, settings: Resolved, stop: Any, say: Callable[..., None]):
        self._writer, self._settings, self._stop, self._say = writer, settings, stop, say
        self._failed = 0  # in a row
        self.newest: str | None = None

    @property
    def step(self) -> int | None:
        """The step of the checkpoint on its way, if there is one."""
        return self._writer.step

    def flags(self) -> tuple[float, ...]:
        """Return what this rank adds to the sums of the next step."""
        return self._writer.flags()

    def save(
        self, progress: Progress, log: Any, *, last: bool, facts: Callable[[], dict[str, Any]]
    ) -> None:
        """Copy the state, from which a checkpoint is written behind training.

        Every rank must call.

        Args:
            log: the run's `RunLog`, which is made durable first.
            last: the run ends after this one: wait for it.
            facts: makes the further entries of the manifest.

        Raises:
            CheckpointWriteError: on every rank: it, or the one before, has failed for good.
        """
        record_progress("checkpoint")
        began = time.perf_counter()
        if self._writer.busy:
            self._say(f"step={progress.step} waits for the checkpoint before")
            self.finish(log, last=False)
        waited = time.perf_counter() - began
        log.sync()
        best = log.best_steps("eval/loss", self._settings.checkpoint_keep_best)
        names = [checkpoint_name(step) for step in best]
        copied = self._writer.save(progress, best=names, **facts())
        if last or not self._settings.async_checkpoint:
            self.finish(log, last=last)
        row = {"checkpoint/stall_seconds": time.perf_counter() - began}
        row |= {"checkpoint/wait_seconds": waited, "checkpoint/copy_seconds": copied}
        log.metrics({"step": progress.step, "tokens": progress.tokens, **row})

    def advance(self, sums: Sequence[float], log: Any, *, last: bool) -> None:
        """Go on with the checkpoint on its way, after a step. Every rank must call.

        Args:
            sums: of all ranks' `flags`.

        Raises:
            CheckpointWriteError: see `save`.
        """
        self._note(self._writer.advance(sums), log, last)

    def finish(self, log: Any, *, last: bool) -> None:
        """Wait for the checkpoint on its way, if there is one. Every rank must call.

        Raises:
            CheckpointWriteError: see `save`.
        """
        record_progress("checkpoint")
        self._note(self._writer.finish(), log, last)

    def _note(self, outcome: Any, log: Any, last: bool) -> None:
        """Say what became of a checkpoint, and end the run if too many failed in a row."""
        if outcome is None:
            return
        step, name = outcome.progress.step, outcome.name
        if outcome.error is None:
            self._failed, self.newest = 0, str(self._writer.checkpoints / name)
            self._stop.saved(outcome.seconds)
            took = {"copy_seconds": outcome.copy_seconds, "seconds": outcome.seconds}
            log.event("checkpoint", step, checkpoint=name, **took)
            shown = " ".join(f"{key}={value:.2f}" for key, value in took.items())
            self._say(f"step={step} checkpoint={name} {shown}")
            return
        self._failed += 1
        log.event("checkpoint_failed", step, checkpoint=name, error=outcome.error)
        self._say(f"step={step} checkpoint={name} FAILED: {outcome.error}")
        if last or self._failed >= self._settings.checkpoint_failures:
            raise CheckpointWriteError(
                f"{self._writer.checkpoints}: {name} could not be written: {outcome.error}. The "
                f"last whole one is {self.newest}. Make room, and start the same command again."
            )
