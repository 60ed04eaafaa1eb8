"""QK-clip: rescales the query and key weights of heads whose attention logits exceed a threshold.

Applied after each optimizer step (Kimi K2, arXiv 2507.20534, section 2.1). Each rank rescales its
own part of the float32 master weights after the optimizer's update and before DeepSpeed computes
the model's weights from them. So nothing is gathered or sent, a skipped step clips nothing, and
checkpoints and averages contain clipped weights. Must not depend on how logits are measured.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from zerolm.engine.parameters import full_shape
from zerolm.engine.states import CHUNK_VALUES, master_slice

QUERY_AND_KEY, QUERY_ONLY, UNCHANGED = 0.5, 1.0, 0.0  # exponents of a head's factor


@dataclass(frozen=True)
class HeadOutputs:
    """The outputs of a projection, which include queries or keys of heads.

    Attributes:
        parameter: name of the weight or bias.
        pieces: runs of consecutive outputs, as (head, exponent of the head's factor, number of
            outputs).
        outputs_last: whether the outputs are the weight's last dimension instead of its first.
    """

    parameter: str
    pieces: tuple[tuple[int, float, int], ...]
    outputs_last: bool = False

    def factors(self, of_heads: Sequence[float]) -> torch.Tensor:
        """Return the factor for each output, as float32 of shape (outputs,)."""
        factors = [of_heads[head] ** power for head, power, _ in self.pieces]
        counts = torch.tensor([count for *_, count in self.pieces])
        return torch.tensor(factors, dtype=torch.float64).float().repeat_interleave(counts)


class QkClip:
    """Rescales one rank's master weights. Every rank must make the same calls.

    A head's factor is min(1, threshold / S), where S is its largest logit in the global batch.

    Args:
        engine: a DeepSpeed engine of ZeRO stage 1, 2 or 3, with master weights in memory. A hook is
            added to its optimizer permanently.
        threshold: largest logit allowed; 0: no clipping.
        layers: projection outputs of each attention layer, which may be on another pipeline stage.
    """

    def __init__(self, engine: Any, threshold: float, layers: Sequence[Sequence[HeadOutputs]]):
        self._engine, self._threshold, self._layers = engine, threshold, layers
        self._parameters = dict(engine.module.named_parameters())
        self._factors: list[tuple[HeadOutputs, torch.Tensor]] = []  # for the current step
        optimizer = engine.optimizer
        # If states are partly offloaded, a second optimizer updates the parameters on the device.
        for inner in (optimizer.optimizer, getattr(optimizer, "backup_optimizer", None)):
            if layers and inner is not None:
                inner.register_step_post_hook(self._after_step)

    @contextmanager
    def clipping(self, logits: Sequence[Sequence[float]]) -> Iterator[None]:
        """Rescale the weights in an optimizer step taken inside this context.

        Args:
            logits: the largest logit of each head in each layer. NaN clips nothing.
        """
        for layer, of_heads in zip(self._layers, logits, strict=True):
            scales = [
                self._threshold / each if each > self._threshold else 1.0 for each in of_heads
            ]
            own = [outputs for outputs in layer if outputs.parameter in self._parameters]
            if min(scales) < 1.0:
                self._factors += [(outputs, outputs.factors(scales)) for outputs in own]
        try:
            yield
        finally:
            self._factors = []

    @torch.no_grad()
    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Rescale the weights that an optimizer has just updated, in one ZeRO group or in all."""
        changed = [id(flat) for group in optimizer.param_groups for flat in group["params"]]
        for outputs, factors in self._factors:
            own = master_slice(self._engine, self._parameters[outputs.parameter])
            if own is not None and id(own.flat) in changed:
                _scale(own.values, own.start, factors, self._width(outputs))

    def _width(self, outputs: HeadOutputs) -> int:
        """Return the number of consecutive weight values that share a factor; 0 if factors vary
        within each row.
        """
        shape = full_shape(self._parameters[outputs.parameter])
        return 0 if outputs.outputs_last else int(shape[1]) if len(shape) > 1 else 1


def _scale(values: torch.Tensor, start: int, factors: torch.Tensor, width: int) -> None:
    """Multiply a slice of a flattened weight in place by the factors of its outputs.

    Args:
        values: the slice, (N,), which begins at index `start` of the flattened weight.
        width: number of consecutive values that share a factor; 0 if consecutive values have
            consecutive factors.
    """
    factors = factors.to(values.device)
    for chunk in values.split(CHUNK_VALUES):
        index = torch.arange(start, start + len(chunk), device=values.device)
        chunk.mul_(factors[index // width if width else index % len(factors)])
        start += len(chunk)
