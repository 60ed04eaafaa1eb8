"""Decide whether to restart a failed run, after what pause, or to stop with a diagnosis."""

import contextlib
import random
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from launch.supervise.outcome import Outcome
from zerolm.checkpoint import memory
from zerolm.checkpoint.directory import published_checkpoints
from zerolm.common.errors import EXIT_REFUSED
from zerolm.run_dir.files import RunFiles, checkpoint_step


@dataclass(frozen=True)
class Policy:
    """How the supervisor responds to failures.

    Attributes:
        max_restarts: maximum number of consecutive restarts without a newer checkpoint or in-memory
            copy.
        same_step_limit: maximum number of failures in the same step, failures before the run's
            first step, or refusals because of changed values.
        backoff, max_backoff: initial and maximum pause in seconds; the pause doubles with each
            restart without progress.
        deadline: seconds after its start at which the supervisor requests the run to stop.
        min_hosts: minimum number of hosts to start on; None means the number that the command
            requests.
        leave_out_slow_hosts: if there are spares, start without hosts that the run reported as
            slow.
        host_check: shell command that fails on unusable hosts; None means `default_check`.
        host_check_timeout: time limit in seconds for each of the check's two attempts.
        requeue: requeue the Slurm job if the run stopped before it was done.
    """

    max_restarts: int = 20
    same_step_limit: int = 3
    backoff: float = 5.0
    max_backoff: float = 300.0
    deadline: float | None = None
    min_hosts: int | None = None
    leave_out_slow_hosts: bool = False
    host_check: str | None = None
    host_check_timeout: float = 60.0
    requeue: bool = False


class Restarts:
    """The failures of a run so far, and the number of restarts since the run last saved."""

    def __init__(self, policy: Policy, run_dir: Path):
        self.policy, self.run_dir = policy, run_dir
        self.count = 0
        self.has_trained = False  # a launch by this supervisor has begun a step
        self.progressed = False  # whether the run saved between the last two failures
        self._failures: Counter[int | None] = Counter()  # {step: number of failures}
        self._refusals = 0  # number of consecutive refusals because of changed values
        self._pauses = 0
        self._newest = -1
        self._saved_at_failure = self._saved()

    def add_failure(self, outcome: Outcome) -> str | None:
        """Count a failure; return a diagnosis if a restart would not help, else None."""
        saved = self._saved()
        self.progressed = saved > self._saved_at_failure
        if self.progressed:
            self._saved_at_failure, self.count, self._pauses = saved, 0, 0
            self._failures.clear()
        self._failures[outcome.step] += 1
        # If a start fails after earlier ones succeeded, a file server or host may be temporarily
        # unavailable.
        self.has_trained = self.has_trained or outcome.step is not None
        repeats = outcome.step is not None or not self.has_trained
        self._refusals = self._refusals + 1 if outcome.values_changed else 0
        if self._refusals >= self.policy.same_step_limit:
            return (
                f"stopping: refused {self._refusals} times because values differ from those the "
                f"run began with; {self.shown_checkpoint()}. Correct the values named above, and "
                f"start it again."
            )
        if repeats and self._failures[outcome.step] >= self.policy.same_step_limit:
            return self._diagnosis(outcome)
        if self.count >= self.policy.max_restarts:
            fix = "Save more often (--checkpoint_interval), or fix the cause of the failures."
            if outcome.exit_code == EXIT_REFUSED:
                fix = "The last one was refused: correct the problems above, and start it again."
            return f"stopping: {self.count} restarts without a newer checkpoint. {fix}"
        return None

    def pause_seconds(self) -> float:
        """Return the pause before the next restart.

        The pause is 0 after progress; otherwise it doubles each time, with 25% jitter.
        """
        if self.progressed:
            return 0.0
        seconds = self.policy.backoff * 2.0 ** min(self._pauses, 30)
        self._pauses += 1
        return min(seconds, self.policy.max_backoff) * random.uniform(0.75, 1.25)

    def shown_checkpoint(self) -> str:
        """Return a clause that names the step of the newest checkpoint."""
        step = self._newest_checkpoint()
        return f"the newest checkpoint is from step {step}" if step else "there is no checkpoint"

    def _saved(self) -> int:
        """Return the step of the newest checkpoint or copy in host memory, 0 if there is none."""
        copied = 0
        with contextlib.suppress(OSError):
            copied = memory.newest_step(self.run_dir)
        return max(self._newest_checkpoint(), copied)

    def _newest_checkpoint(self) -> int:
        """Return the step of the newest published checkpoint, 0 if there is none."""
        with contextlib.suppress(OSError):  # the file system may be temporarily unavailable
            published = published_checkpoints(RunFiles(self.run_dir).checkpoints)
            self._newest = checkpoint_step(published[-1].name) if published else 0
        return max(self._newest, 0)

    def _diagnosis(self, outcome: Outcome) -> str:
        failures = self._failures[outcome.step]
        lines = [f"stopping: the run has failed {failures} times {outcome.place}."]
        lines += outcome.reasons
        if outcome.sequences is not None:
            first, number = outcome.sequences
            lines.append(f"sequences of that step: {first} to {first + number - 1}")
        lines += [f"output: {line[:300]}" for line in outcome.error_lines]
        lines.append(self.shown_checkpoint())
        lines.append(
            "try: read the stacks and the lines above; run the command without the supervisor; "
            "inspect the sequences of the step; if memory ran out, use fewer ranks or a smaller "
            "--micro_batch_size"
        )
        return "\n    ".join(lines)
