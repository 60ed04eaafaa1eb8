"""`Crashes`: how a run handles an error in an evaluation; and `evaluation_mode`.

An error in work that rank 0 does alone is logged as an event, and training continues. An
error in a forward pass ends the run if other ranks may be inside it. `EvaluationAttempts` records
each evaluation before it starts: the next launch retries it once, and after a second crash skips
all evaluations of that step, on every rank.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from zerolm.common.errors import reason
from zerolm.distributed.collectives import broadcast_object
from zerolm.engine.protocol import Model
from zerolm.evaluate.attempts import Attempt, EvaluationAttempts
from zerolm.evaluate.runner import ForwardError


class Crashes:
    """Logs the errors of evaluations, and remembers which evaluation crashed the run.

    Args:
        survives_forward_error: whether training may continue after an error in a forward pass.

    Attributes:
        disabled_steps: {step at which nothing is evaluated any more: tokens of the run}.
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
        """Log the crash of the launch before, if there was one. Every rank must call this."""
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
        """Log an error and continue; only where no other rank waits for this one."""
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

    def _log_crash(self, attempt: Attempt, log: Any) -> None:
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
    """Put the engine into evaluation mode; restore its mode and the random generators after."""
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
