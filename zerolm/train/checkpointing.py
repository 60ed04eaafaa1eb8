"""`Checkpointing`: saves a run's checkpoints, logs the outcomes, and limits failures.

Connects the training loop to the `CheckpointWriter`. Every rank makes the same calls.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

from zerolm.checkpoint import probe
from zerolm.checkpoint.manifest import Progress
from zerolm.checkpoint.memory import MemoryCopies
from zerolm.checkpoint.rotation import Retention
from zerolm.checkpoint.save_job import Outcome
from zerolm.checkpoint.writer import CheckpointWriter
from zerolm.common.errors import CheckpointWriteError
from zerolm.ds_config import topology
from zerolm.ds_files.pieces import SHARDS
from zerolm.engine.protocol import Engine
from zerolm.plan.plan import Plan
from zerolm.preflight import run_record
from zerolm.run_dir.files import checkpoint_name
from zerolm.train.stability import StopRequest
from zerolm.watchdog.progress import record_progress

FIRST_PAUSE = 1 / 64  # pause before the first retry of a failed save, as a share of the interval


class Checkpointing:
    """Saves a run's checkpoints, and ends the run after too many consecutive failed saves.

    A failed save is retried after a pause that doubles with each failure. Once the pause reaches
    the checkpoint interval, only regular saves are attempted. Only failed regular saves count
    toward the limit.

    Args:
        probe_batches: returns the micro-batches of the fixed probe batch.
        stop: the `StopRequest` to report the duration of each save to.

    Attributes:
        newest: path of the newest complete checkpoint.
        record: contents of run.json, set when the run starts.
    """

    record: dict[str, Any]

    def __init__(
        self,
        plan: Plan,
        engine: Engine,
        probe_batches: Callable[[], Any],
        stop: StopRequest,
        print_rank0: Callable[..., None],
    ):
        self._plan, self._settings, self._stop = plan, plan.settings, stop
        self._engine, self._probe_batches, self._print_rank0 = engine, probe_batches, print_rank0
        settings = plan.settings
        retention = Retention(
            settings.checkpoint_keep, settings.checkpoint_keep_tokens, settings.checkpoint_keep_best
        )
        self._writer = CheckpointWriter(
            engine, plan.run_dir, retention, read_back=settings.checkpoint_read_back
        )
        self._consecutive_failures = 0
        self._retry_step: int | None = None
        self._pause = 0  # number of steps until the next attempt
        self._logged_problems: set[str] = set()
        self.newest: str | None = None

    @property
    def step(self) -> int | None:
        """Step of the checkpoint that is being written, or None."""
        return self._writer.step

    def retries(self, step: int) -> bool:
        """Return whether a failed save should be retried after this step."""
        return self._retry_step is not None and step >= self._retry_step

    def flags(self) -> tuple[float, ...]:
        """Return this rank's status flags, to be summed over ranks in the next step."""
        return self._writer.flags()

    def save(
        self,
        progress: Progress,
        log: Any,
        *,
        last: bool,
    ) -> None:
        """Copy the state to host memory, and write a checkpoint from the copy in the background.

        Every rank must call this.

        Args:
            log: the run's `RunLog`, which is synced to disk first.
            last: whether the run ends after this checkpoint; if so, wait until it is written.

        Raises:
            CheckpointWriteError: on every rank, if this checkpoint or the previous one failed, and
                it is the last one or too many saves have failed.
        """
        record_progress("checkpoint")
        self._retry_step = None
        start = time.perf_counter()
        if self._writer.copying_to_memory:
            self.finish(log, last=False)
        elif self._writer.busy:
            self._print_rank0(f"step={progress.step} waiting for the previous checkpoint")
            self.finish(log, last=False)
        waited = time.perf_counter() - start
        log.sync()
        ranked = log.ranked_steps("eval/loss") if self._settings.checkpoint_keep_best else []
        names = [checkpoint_name(step) for step in ranked]
        measured = probe.measure(self._engine, self._probe_batches(), self._plan)
        copied = self._writer.save(progress, ranked=names, **self._facts(), probe=measured)
        if last or not self._settings.async_checkpoint:
            self.finish(log, last=last)
        row = {"checkpoint/stall_seconds": time.perf_counter() - start}
        row |= {"checkpoint/wait_seconds": waited, "checkpoint/copy_seconds": copied}
        log.metrics({"step": progress.step, "tokens": progress.tokens, **row})

    def _facts(self) -> dict[str, Any]:
        """Return the manifest entries that describe the run."""
        plan = self._plan
        return {
            "optimizer": topology.optimizer_kind(plan.ds),
            "data_fingerprint": plan.data_fingerprint,
            "precision": plan.ds.precision,
            "cut": topology.sharding(plan.ds, plan.layout),
            **({SHARDS: plan.layout.shards} if plan.layout.copies > 1 else {}),
            "order": run_record.data_order(plan),
            "versions": self.record["versions"],
            "model_config": self.record["model_config"],
        }

    def copy_to_memory(self, progress: Progress, log: Any, copies: MemoryCopies) -> None:
        """Copy the state to host memory; do nothing while a checkpoint is being written.

        Every rank must call this.
        """
        if self._writer.busy:
            return
        record_progress("checkpoint")
        facts = {**self._facts(), "plan": self._plan.fingerprint()}
        seconds = self._writer.copy_to_memory(progress, copies, **facts)
        if not self._settings.async_checkpoint:
            self.finish(log, last=False)
        row = {"step": progress.step, "tokens": progress.tokens}
        log.metrics({**row, "checkpoint/memory_seconds": seconds})

    def advance(self, sums: Sequence[float], log: Any, *, last: bool) -> None:
        """Advance the write in progress, if any, after a step. Every rank must call this.

        Args:
            sums: the ranks' `flags`, summed over ranks.

        Raises:
            CheckpointWriteError: see `save`.
        """
        self._log_outcome(self._writer.advance(sums), log, last)

    def finish(self, log: Any, *, last: bool) -> None:
        """Wait for the write in progress, if any. Every rank must call this.

        Raises:
            CheckpointWriteError: see `save`.
        """
        record_progress("checkpoint")
        self._log_outcome(self._writer.finish(), log, last)

    def _log_outcome(self, outcome: Outcome | None, log: Any, last: bool) -> None:
        """Log the outcome of a save; raise an error after too many consecutive failures."""
        if outcome is None:
            return
        if outcome.in_memory:
            self._log_copy(outcome, log)
            return
        step, name = outcome.progress.step, outcome.name
        for problem in outcome.problems:
            if problem not in self._logged_problems:
                self._logged_problems.add(problem)
                log.event("checkpoint_problem", step, problem=problem)
                self._print_rank0(f"step={step} note: {problem}")
        if outcome.error is None:
            self._consecutive_failures, self.newest = 0, str(self._writer.checkpoints / name)
            self._pause, self._retry_step = 0, None
            self._stop.record_save(outcome.seconds)
            times = {"copy_seconds": outcome.copy_seconds, "seconds": outcome.seconds}
            log.event("checkpoint", step, checkpoint=name, **times)
            shown = " ".join(f"{key}={value:.2f}" for key, value in times.items())
            self._print_rank0(f"step={step} checkpoint={name} {shown}")
            return
        again = self._next_try(step)
        log.event("checkpoint_failed", step, checkpoint=name, error=outcome.error, next_try=again)
        self._print_rank0(
            f"step={step} checkpoint={name} FAILED: {outcome.error}; next try at step {again}"
        )
        if last or self._consecutive_failures >= self._settings.checkpoint_failures:
            raise CheckpointWriteError(
                f"{self._writer.checkpoints}: {name} could not be written: {outcome.error}. The "
                f"newest complete checkpoint is {self.newest or 'none'}. Free disk space, and run "
                f"the same command again."
            )

    def _next_try(self, step: int) -> int:
        """Count a failed save at `step`, and return the step of the next attempt."""
        interval = self._settings.checkpoint_interval
        regular = step // interval * interval + interval
        self._consecutive_failures += step % interval == 0
        self._pause = 2 * self._pause or max(1, round(interval * FIRST_PAUSE))
        self._retry_step = step + self._pause if self._pause < interval else None
        return min(self._retry_step or regular, regular)

    def _log_copy(self, outcome: Outcome, log: Any) -> None:
        """Log an in-memory copy if it failed; the previous copy, if any, remains valid."""
        if outcome.error is not None and outcome.error not in self._logged_problems:
            self._logged_problems.add(outcome.error)
            step = outcome.progress.step
            log.event("memory_copy_failed", step, error=outcome.error)
            self._print_rank0(f"step={step} note: no copy in memory: {outcome.error}")
