"""`EvaluationAttempts`: skips evaluation at a step where it has already crashed the run twice.

A forward pass that runs out of memory, or an evaluation that hangs, would fail again after each
restart, while one that was killed from outside would not. So before any rank computes, rank 0
records the evaluation in `evaluation_begun.json`, and removes the record when it ends. A launch
that finds a record knows that the previous one crashed. Two crashes at a step, in any of its
evaluations, disable the step, because the supervisor gives up after three crashes at the same step.
Must not depend on the evaluations themselves.
"""

import contextlib
from collections import Counter
from pathlib import Path
from typing import TypedDict

from zerolm.common.errors import RecordError
from zerolm.common.files import write_json
from zerolm.common.records import Count, read_record
from zerolm.distributed.collectives import print_safely
from zerolm.run_dir.files import RunFiles

MAX_CRASHES = 2  # at one step


class Attempt(TypedDict):
    """An evaluation that has started; `what` is its name."""

    step: Count
    tokens: Count
    what: str


class _Record(TypedDict):
    begun: Attempt | None
    failed: list[Attempt]


class EvaluationAttempts:
    """The record of a run's evaluation attempts. Used by rank 0 only.

    Attributes:
        crashed: attempts during which the run crashed.
    """

    def __init__(self, run_dir: Path):
        self.path = RunFiles(run_dir).evaluation_begun
        self.crashed: list[Attempt] = []

    def load(self) -> Attempt | None:
        """Read the record; return the attempt in which the previous launch crashed, if it did.

        Without a readable record, earlier crashes are unknown, and everything is evaluated.
        """
        try:
            record = read_record(self.path, _Record)
        except RecordError as error:
            print_safely(f"{error.problems[0]} Earlier crashes in evaluations are forgotten.")
            record = None
        if record is None:
            return None
        self.crashed, attempt = record["failed"], record["begun"]
        if attempt is not None:
            self.crashed = [*self.crashed, attempt]
            self._write(None)
        return attempt

    def disabled_steps(self) -> dict[int, int]:
        """Return {step: tokens} of the steps at which nothing is evaluated any more."""
        crashes = Counter(attempt["step"] for attempt in self.crashed)
        return {
            attempt["step"]: attempt["tokens"]
            for attempt in self.crashed
            if crashes[attempt["step"]] >= MAX_CRASHES
        }

    def start(self, step: int, tokens: int, what: str) -> None:
        """Record on disk that an evaluation starts."""
        self._write({"step": step, "tokens": tokens, "what": what})

    def finish(self) -> None:
        """Record that the evaluation has ended, with or without an error that the run survives."""
        self._write(None)

    def _write(self, attempt: Attempt | None) -> None:
        # A full disk may lose the record, but an evaluation must not end the run.
        with contextlib.suppress(OSError):
            if attempt is None and not self.crashed:
                self.path.unlink(missing_ok=True)
            else:
                write_json(self.path, {"begun": attempt, "failed": self.crashed})
