"""When a run stops before its token budget is spent: on request, or because it gave up.

Every decision is made from figures that all ranks have summed, so all ranks make the same one in
the same step.
"""

import math
import signal
import time
from typing import Any

from zerolm.errors import GaveUp

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT)
# fp16 starts at a loss scale of 2^16 and halves it each time: 16 skips are its normal start.
MOST_SKIPPED_IN_A_ROW = 40


class StopRequest:
    """Remembers that this process was asked to save and stop.

    Args:
        stop_after: seconds from now after which the run asks itself to stop, or None.

    A second Ctrl-C ends the process at once; the checkpoints on disk stay whole.
    """

    def __init__(self, stop_after: float | None):
        self.reason: str | None = None
        self._deadline = None if stop_after is None else time.monotonic() + stop_after
        for number in STOP_SIGNALS:
            signal.signal(number, self._request)

    def _request(self, number: int, frame: Any) -> None:
        if number == signal.SIGINT and self.reason is not None:
            raise KeyboardInterrupt
        self.reason = signal.Signals(number).name

    def asked(self) -> bool:
        """Tell whether this rank was asked to stop; the ranks still have to agree."""
        late = self._deadline is not None and time.monotonic() >= self._deadline
        if self.reason is None and late:
            self.reason = "--stop_after"
        return self.reason is not None


def refuse_loss(loss: float, step: int, checkpoint: str | None) -> None:
    """Give up, before the optimizer is touched, on a loss that is not finite.

    Args:
        loss: the mean over all ranks.
        step: the step that is being taken.
        checkpoint: the last good checkpoint, to be named.

    Raises:
        GaveUp: the loss is NaN or infinite. The weights in memory are still good.
    """
    if not math.isfinite(loss):
        raise GaveUp(
            f"step {step}: train/loss is {loss}. The step was not taken. {_advice(checkpoint)}"
        )


def refuse_gradients(
    grad_norm: float, applied: bool, skipped_in_a_row: int, step: int, checkpoint: str | None
) -> None:
    """Give up when a step spoilt the weights, or when DeepSpeed skips one step after another.

    Raises:
        GaveUp: the gradient norm of a step that was taken is not finite, or too many were skipped.
    """
    if applied and not math.isfinite(grad_norm):
        raise GaveUp(f"step {step}: train/grad_norm is {grad_norm}. {_advice(checkpoint)}")
    if skipped_in_a_row >= MOST_SKIPPED_IN_A_ROW:
        raise GaveUp(
            f"step {step}: DeepSpeed has skipped {skipped_in_a_row} steps in a row, for gradients "
            f"that are not finite. {_advice(checkpoint)}"
        )


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
