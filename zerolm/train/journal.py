"""What is said and kept of a run: its log with its trackers, and what stands on the console.

run.py tells it what has happened. Every rank has one; only the first one's writes and speaks.
"""

from collections.abc import Callable, Sequence
from typing import Any

from zerolm.checkpoint.directory import Progress
from zerolm.checkpoint.load import DamagedCheckpoint
from zerolm.checkpoint.rollback import Entry
from zerolm.data import mixture
from zerolm.model import compile
from zerolm.optim.spikes import SpikeGuard
from zerolm.plan.plan import Plan
from zerolm.tracking import run_log
from zerolm.tracking.console import Console
from zerolm.tracking.tracker_processes import Trackers
from zerolm.train import stability, throughput


class Journal:
    """The journal of a run on one rank. All ranks make the same calls.

    Args:
        rank: of this process, of `world_size`.
        device: of this rank.
        say: prints on rank 0.

    Attributes:
        log: from the step on at which the run last began or went on.
        watch: times the steps between two reports.
    """

    log: run_log.RunLog

    def __init__(
        self, plan: Plan, rank: int, world_size: int, device: Any, say: Callable[..., None]
    ):
        self.plan, self.rank, self.world_size = plan, rank, world_size
        self.settings = plan.settings
        self.device, self.say = device, say
        self.peak_flops, source = throughput.device_peak_flops(device, plan.matmul_precision)
        say(f"peak: {self.peak_flops:.3g} FLOP/s a device ({source})")
        self.watch = throughput.Stopwatch(device)
        self.console = Console(rank == 0)
        self.changed = plan.changed
        self.trackers: Trackers | None = None  # of the log, until the next one has them
        self.said: str | None = None  # of graphs that were broken

    def open(self, step: int) -> None:
        """Open the log of the steps behind `step`; the lines of later ones are dropped."""
        self.log = run_log.RunLog(self.plan.run_dir, step, writes=self.rank == 0)

    def begin(
        self,
        step: int,
        checkpoint: str | None,
        damage: Sequence[DamagedCheckpoint],
        resumes: bool,
        resharded: Sequence[str],
    ) -> None:
        """Write down that the run begins or goes on; start the trackers and the bar.

        Args:
            checkpoint: the newest one.
            damage: checkpoints that were set aside.
            resharded: what of the checkpoint was cut anew.
        """
        for damaged in damage:
            aside = str(damaged.set_aside)
            self.log.event("damaged", step, checkpoint=aside, problems=damaged.problems)
        self.log.event(
            "resume" if resumes else "start",
            step,
            checkpoint=checkpoint,
            world_size=self.world_size,
            zero_stage=self.plan.profile.zero_stage,
            resharded=resharded,
        )
        if self.changed:
            self.log.event("changed", step, changes=self.changed)
            self.changed = {}  # a rollback begins again, with nothing changed since
        self.log.track(self.settings, before=self.trackers)
        self.trackers = self.log.trackers
        self.console.start(step, self.plan.total_steps)

    def stage(self, step: int, stage: int) -> None:
        """Write down that the mixture's next stage has begun with this step."""
        stages = self.plan.mixture.stages
        shares = mixture.stage_shares(stages[stage], self.plan.source_names)
        self.log.event("stage", step, stage=stage + 1, shares=shares)
        self.say(f"step={step} stage={stage + 1} of {len(stages)}: {shares}")

    def anomaly(self, ladder: SpikeGuard, progress: Progress, result: Any, sequences: int) -> None:
        """Write down a step that was an anomaly, or was not taken, and the data that it saw.

        Args:
            progress: after the step.
            result: its `StepResult`.
            sequences: of its batch.
        """
        saw = stability.what_was_seen(ladder, progress, result, sequences)
        if ladder.reason:
            self.log.event("spike", progress.step, **saw)
            self.say(f"step={progress.step} spike: {ladder.reason}")
        if not result.applied:
            self.log.event("step_skipped", progress.step, **saw)

    def cooldown(self, step: int, reason: str | None) -> None:
        """Write down that the learning rate is lower for a while."""
        settings = self.settings
        what = {"factor": settings.cooldown_factor, "steps": settings.cooldown_steps}
        self.log.event("cooldown", step, reason=reason, **what)
        self.say(f"step={step} cooldown: {what}")

    def rollback(self, step: int, entry: Entry) -> None:
        """Write down that the run goes back, and close the log, which another one goes on with."""
        self.log.event("rollback", step, **entry)
        self.say(
            f"step={entry['from_step']} rollback: to {entry['checkpoint']}, sequences "
            f"{entry['skipped_window']} are left out: {entry['reason']}"
        )
        self.log.close("rollback")

    def report(self, progress: Progress, row: run_log.Row) -> None:
        """Write the metrics of the interval to the log, the trackers and the console.

        Args:
            row: what the run knows of it; how fast it was is added here.
        """
        plan = self.plan
        row |= {
            **throughput.slowest_rank(self.watch.own_seconds(), self.device),
            **self.watch.report(self.world_size, plan.flops_per_token, self.peak_flops),
            **throughput.memory(self.device),
            "health/skipped_steps": progress.skipped_steps,
            "health/spikes": progress.spikes,
            "health/rollbacks": progress.rollbacks,
        }
        self.log.metrics(row)
        sequences_left = -(-(self.settings.total_tokens - progress.tokens) // self.settings.seq_len)
        steps_left = plan.batch_schedule.steps(
            progress.position, progress.position + sequences_left
        )
        seconds_left = steps_left * row["throughput/step_seconds"]
        if not self.console.figures(row, progress.step + steps_left, seconds_left):
            self.say(run_log.console_line(row, progress.step + steps_left, seconds_left))
        if self.settings.compile and (broken := compile.breaks()) not in (None, self.said):
            self.said = broken
            self.say(broken)

    def close(self, how: str) -> None:
        """Close console and log; the trackers are told how the run ends."""
        self.console.close()
        self.log.close(how)
