"""`Crashes`: how a run handles errors in evaluations. Also `evaluation_mode`.

An error in work done only on rank 0 is logged as an event, and training continues. An error in a
forward pass ends the run if other ranks may be in the same pass.

A forward pass that runs out of memory, or an evaluation that hangs, would fail again after each
restart, but an evaluation that was killed from outside would not. So before any rank computes, rank
0 records the evaluation in `evaluation_begun.json`, and removes the record when the evaluation
ends. A record left over from the previous launch means that the evaluation crashed. After two
crashes in evaluations at the same step, this step is no longer evaluated, because the supervisor
gives up after three crashes at a step. Must not depend on the evaluations themselves.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import torch

from zerolm.common.errors import RecordError, reason
from zerolm.common.files import write_json
from zerolm.common.records import Count, read_record
from zerolm.distributed.collectives import broadcast_object, print_safely
from zerolm.engine.protocol import Model
from zerolm.evaluate.runner import ForwardError
from zerolm.run_dir.files import RunFiles

MAX_CRASHES = 2  # at the same step


class Crashes:
    """Logs errors in evaluations, and records which evaluations crashed the run.

    Args:
        survives_forward_error: whether training may continue after an error in a forward pass.

    Attributes:
        disabled_steps: {step that is no longer evaluated: number of tokens trained by that step}.
    """

    def __init__(
        self,
        run_dir: Path,
        is_rank0: bool,
        survives_forward_error: bool,
        print_line: Callable[..., None],
    ):
        self._attempts, self._is_rank0 = EvaluationAttempts(run_dir), is_rank0
        self.survives_forward_error, self._print = survives_forward_error, print_line
        self.disabled_steps: dict[int, int] = {}

    def restore(self, log: Any) -> None:
        """Log whether the previous launch crashed in an evaluation. Every rank must call this."""
        if self._is_rank0:
            attempt = self._attempts.load()
            if attempt is not None:
                self._log_crash(attempt, log)
        self.disabled_steps = broadcast_object(self._attempts.disabled_steps())

    @contextmanager
    def recorded(self, what: str, progress: Any) -> Iterator[None]:
        """Record an attempt; an error that ends the run leaves the record for the next launch."""
        if self._is_rank0:
            self._attempts.start(progress.step, progress.tokens, what)
        yield
        if self._is_rank0:
            self._attempts.finish()

    @contextmanager
    def logged_errors(self, what: str, progress: Any, log: Any) -> Iterator[None]:
        """Log an error and continue; use this only if no other rank is waiting for this rank."""
        try:
            yield
        except Exception as error:
            in_forward_pass = isinstance(error, ForwardError)
            if in_forward_pass and not self.survives_forward_error:
                raise
            text = str(error) if in_forward_pass else f"{type(error).__name__}: {error}"
            self.log_failure(what, progress.step, log, text)

    def log_failure(self, what: str, step: int, log: Any, error: str) -> None:
        """Print an error and log it as an event."""
        error = reason(error)
        self._print(f"step={step} {what} FAILED, training continues: {error}")
        log.event("evaluation_failed", step, evaluation=what, error=error)

    def _log_crash(self, attempt: "Attempt", log: Any) -> None:
        step, what = attempt["step"], attempt["what"]
        if step in self._attempts.disabled_steps():
            reason = "the run crashed twice during evaluation of this step; skipping it"
            self.log_failure(what, step, log, reason)
            return
        reason = "the run crashed during this evaluation; retrying once"
        self._print(f"step={step} {what}: {reason}")
        log.event("evaluation_interrupted", step, evaluation=what)


@contextmanager
def evaluation_mode(engine: Model) -> Iterator[None]:
    """Put the engine into evaluation mode; on exit, restore its mode and the random generators."""
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    device = torch.cuda.get_rng_state(engine.device) if engine.device.type == "cuda" else None
    engine.eval()
    try:
        yield
    finally:
        engine.train()
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)
        if device is not None:
            torch.cuda.set_rng_state(device, engine.device)


class Attempt(TypedDict):
    """An evaluation that has started; `what` is its name."""

    step: Count
    tokens: Count
    what: str


class _Record(TypedDict):
    begun: Attempt | None
    failed: list[Attempt]


class EvaluationAttempts:
    """The record of a run's attempted evaluations. Used only on rank 0.

    Attributes:
        crashed: the attempts that ended in a crash.
    """

    def __init__(self, run_dir: Path):
        self.path = RunFiles(run_dir).evaluation_begun
        self.crashed: list[Attempt] = []

    def load(self) -> Attempt | None:
        """Read the record; return the attempt during which the previous launch crashed, if any.

        If the record cannot be read, earlier crashes are unknown and everything is evaluated.
        """
        try:
            record = read_record(self.path, _Record)
        except RecordError as error:
            print_safely(f"{error.problems[0]} Ignoring earlier crashes in evaluations.")
            record = None
        if record is None:
            return None
        self.crashed, attempt = record["failed"], record["begun"]
        if attempt is not None:
            self.crashed = [*self.crashed, attempt]
            self._write(None)
        return attempt

    def disabled_steps(self) -> dict[int, int]:
        """Return {step: number of tokens} for the steps that are no longer evaluated."""
        crashes = Counter(attempt["step"] for attempt in self.crashed)
        return {
            attempt["step"]: attempt["tokens"]
            for attempt in self.crashed
            if crashes[attempt["step"]] >= MAX_CRASHES
        }

    def start(self, step: int, tokens: int, what: str) -> None:
        """Record on disk that an evaluation is about to start."""
        self._write({"step": step, "tokens": tokens, "what": what})

    def finish(self) -> None:
        """Record that an evaluation ended, possibly with an error that does not end the run."""
        self._write(None)

    def _write(self, attempt: Attempt | None) -> None:
        # The record may be lost if the disk is full, but an evaluation must not end the run.
        with suppress(OSError):
            if attempt is None and not self.crashed:
                self.path.unlink(missing_ok=True)
            else:
                write_json(self.path, {"begun": attempt, "failed": self.crashed})
