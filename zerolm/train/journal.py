"""`Journal`: logs a run's metrics and events to files, trackers and the console.

Connects `Run`, which reports what happened, to the `RunLog` and its trackers.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from zerolm.checkpoint.load import DamagedCheckpoint
from zerolm.checkpoint.manifest import Progress
from zerolm.common import processes
from zerolm.data import mixture
from zerolm.distributed.slow_hosts import SlowHosts
from zerolm.features.feature import StepResult
from zerolm.model import compile
from zerolm.optim.spikes import COOL_DOWN, SpikeGuard
from zerolm.plan import duration
from zerolm.plan.peak_flops import device_peak_flops
from zerolm.plan.plan import Plan
from zerolm.run_dir.events import shown_slow_host
from zerolm.run_dir.files import RunFiles
from zerolm.run_dir.records import Rollback
from zerolm.tracking import console_log, run_log
from zerolm.tracking.console import Console
from zerolm.tracking.tracker_processes import Trackers
from zerolm.train import stability, throughput
from zerolm.watchdog import startup


class Journal:
    """Logs a run. Every rank makes the same calls, but only rank 0 writes and prints.

    Attributes:
        log: the `RunLog`, replaced after each start and rollback.
        stopwatch: measures the time of the steps between two reports.
    """

    log: run_log.RunLog

    def __init__(
        self,
        plan: Plan,
        rank: int,
        world_size: int,
        device: Any,
        print_rank0: Callable[..., None],
    ):
        self.plan, self.rank, self.world_size = plan, rank, world_size
        self.settings = plan.settings
        self.device, self.print_rank0 = device, print_rank0
        self.peak_flops, source = device_peak_flops(device, plan.matmul_precision)
        self._told_of_mfu = False
        print_rank0(f"peak: {self.peak_flops:.3g} FLOP/s per device ({source})")
        expected, notices = duration.expected(plan, self.peak_flops)
        print_rank0("\n".join([f"duration: {expected}", *(f"note: {one}" for one in notices)]))
        self.stopwatch = throughput.Stopwatch(device)
        self.power = throughput.PowerMeter(device)
        self.slow_hosts = SlowHosts()
        self.console = Console(rank == 0)
        self.changed = plan.changed
        self.trackers: Trackers | None = None  # passed to the next log
        self.first_step: int | None = None  # the first step after this start; set once logged
        self.failed = startup.interruption(plan.run_dir) if rank == 0 else None
        self.last_row_at = _modified_at(RunFiles(plan.run_dir).metrics)
        self.printed_breaks: str | None = None  # the last notice about torch.compile graph breaks

    def open(self, step: int) -> None:
        """Open the log at a step, and remove lines from later steps."""
        self.log = run_log.RunLog(self.plan.run_dir, step, writes=self.rank == 0)

    def log_start(
        self,
        step: int,
        checkpoint: str | None,
        damage: Sequence[DamagedCheckpoint],
        resharded: Sequence[str],
    ) -> None:
        """Log that the run starts or resumes; start the trackers and the progress bar.

        Args:
            checkpoint: path of the loaded checkpoint; None at the start of a new run.
            damage: the damaged checkpoints that were set aside.
            resharded: the parts of the checkpoint that were resharded.
        """
        for damaged in damage:
            aside = str(damaged.set_aside)
            self.log.event("damaged", step, checkpoint=aside, problems=damaged.problems)
        source = self.plan.initial
        self.log.event(
            "resume" if checkpoint else "start",
            step,
            checkpoint=checkpoint,
            world_size=self.world_size,
            zero_stage=self.plan.ds.zero_stage,
            resharded=resharded,
            **({"init_from": source.source} if source and not checkpoint else {}),
        )
        if self.log.lacks_rows is not None:
            self.log.event("rows_lost", step, problem=self.log.lacks_rows)
            self.print_rank0(f"note: {self.log.lacks_rows}; the run itself is complete")
        if self.changed:
            self.log.event("changed", step, changes=self.changed)
            self.changed = {}  # log changes only once, since this is called again after a rollback
        self.log.track(self.settings, before=self.trackers)
        self.trackers = self.log.trackers
        self.console.start(step, self.plan.total_steps)

    def log_startup(self, step: int, runner: processes.Process | None) -> None:
        """After a step, log how long this start took and, when complete, the recovery.

        The start is logged after the first step. A recovery from a failure is logged once the run
        has reached the step of the failure again. Both events list the duration of each part.

        Args:
            runner: the `deepspeed` process that began this start, if any.
        """
        if self.rank:
            return
        if self.first_step is None:
            self.first_step = step
            startup.mark("first step")
            parts, lost = startup.parts(runner), {}
            if self.last_row_at is not None:  # the wall clock may have been set back
                lost = {"lost_seconds": round(max(0.0, time.time() - self.last_row_at), 2)}
            total = round(sum(parts.values()), 2)
            self.log.event("startup", step, seconds=total, parts=parts, **lost)
        if self.failed is not None and step >= self.failed.step:
            seconds, parts = startup.recovery(self.failed, runner)
            repeated = max(0, self.failed.step - self.first_step)
            self.log.event("recovered", step, seconds=seconds, parts=parts, repeated_steps=repeated)
            self.failed = None

    def log_blend(self, step: int, blend: int) -> None:
        """Log that the run has reached a new data blend at this step.

        Args:
            blend: index of the blend, from 0.
        """
        blends = self.plan.mixture.blends
        shares = mixture.blend_shares(blends[blend], self.plan.source_names)
        self.log.event("stage", step, stage=blend + 1, shares=shares)
        self.print_rank0(f"step={step} stage={blend + 1} of {len(blends)}: {shares}")

    def log_anomaly(
        self,
        guard: SpikeGuard,
        progress: Progress,
        result: StepResult,
        num_sequences: int,
        response: str | None,
    ) -> None:
        """Log a step that was an anomaly or was not applied, with the sequences in its batch.

        Args:
            progress: progress after the step.
            num_sequences: number of sequences in the step's batch.
            response: the guard's response to the step; a cooldown is logged as well.
        """
        fields = stability.anomaly_fields(guard, progress, result, num_sequences)
        if guard.reason:
            self.log.event("spike", progress.step, **fields)
            self.print_rank0(f"step={progress.step} spike: {guard.reason}")
        if not result.applied:
            self.log.event("step_skipped", progress.step, **fields)
        if response == COOL_DOWN:
            factor, steps = self.settings.cooldown_factor, self.settings.cooldown_steps
            self.log.event(
                "cooldown", progress.step, reason=guard.reason, factor=factor, steps=steps
            )
            self.print_rank0(
                f"step={progress.step} cooldown: learning rate x {factor:g} for {steps} steps"
            )

    def log_rollback(self, step: int, entry: Rollback) -> None:
        """Log a rollback, and close the log; `open` opens the next log."""
        shown = {key: value for key, value in entry.items() if key != "order"}
        self.log.event("rollback", step, **shown)
        self.print_rank0(
            f"step={entry['from_step']} rollback: to {entry['checkpoint']}, skipping "
            f"sequences {entry['skipped_window']}: {entry['reason']}"
        )
        self.log.close("rollback")

    def report(self, progress: Progress, row: run_log.Row) -> None:
        """Log the metrics since the last report to metrics.jsonl, the trackers and the console.

        Args:
            row: the run's metrics; throughput, memory and anomaly metrics are added to it.
        """
        plan = self.plan
        row |= {
            **self.slow_hosts.row(self.stopwatch.own_seconds(), self.device),
            **self.stopwatch.report(self.world_size, plan.flops_per_token, self.peak_flops),
            **throughput.memory(self.device),
            **self.power.row(),
            "health/skipped_steps": progress.skipped_steps,
            "health/spikes": progress.spikes,
            "health/rollbacks": progress.rollbacks,
        }
        if "throughput/mfu" not in row and not self._told_of_mfu:
            self.print_rank0(
                f"no MFU: it would exceed 1 at a peak of {self.peak_flops:.3g} FLOP/s per device"
            )
            self._told_of_mfu = True
        self.log.metrics(row)
        for event in self.slow_hosts.events(time.monotonic()):
            self.log.event("slow_host", progress.step, **event)
            self.print_rank0(f"step={progress.step} {shown_slow_host(event)}")
        sequences_left = -(-(self.settings.total_tokens - progress.tokens) // self.settings.seq_len)
        steps_left = plan.batch_schedule.steps(
            progress.position, progress.position + sequences_left
        )
        seconds_left = steps_left * row["throughput/step_seconds"]
        line = run_log.console_line(row, progress.step + steps_left, seconds_left)
        if self.console.figures(row, progress.step + steps_left, seconds_left):
            console_log.write(line)
        else:
            self.print_rank0(line)
        if self.settings.compile:
            notice = compile.graph_break_notice()
            if notice is not None and notice != self.printed_breaks:
                self.printed_breaks = notice
                self.print_rank0(notice)

    def close(self, how: str) -> None:
        """Close the console and the log.

        Args:
            how: how the run ended, which the log passes to the trackers.
        """
        self.console.close()
        self.log.close(how)


def _modified_at(path: Path) -> float | None:
    """Return a file's modification time in seconds since the epoch; None if it is unreadable."""
    try:
        return path.stat().st_mtime
    except OSError:
        return None
