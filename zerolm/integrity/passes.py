"""Records forward and backward passes over a batch, so they can be compared."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from zerolm.engine.gradients import gradients
from zerolm.engine.protocol import Engine
from zerolm.integrity.digests import digest

NOISE_SHARE = 1e-3  # share of the norm over all gradients


class Pass(NamedTuple):
    """The results of a pass on one rank, stored on the host.

    Attributes:
        losses: bits of this rank's micro-batch losses.
        chain: digests of the gradients of this rank's input embeddings, by micro-batch. These
            gradients depend on every activation and its gradient. The list is empty if embeddings
            are not trained.
        gradients: digests of this rank's part of the reduced gradient, by parameter.
        norms: 2-norms of this rank's part of the reduced gradient, by parameter.
    """

    losses: list[int]
    chain: list[int]
    gradients: list[int]
    norms: list[float]

    def own_work_differs(self, other: "Pass") -> bool:
        """Return whether this rank's losses or embedding gradients differ between the passes."""
        return (self.losses, self.chain) != (other.losses, other.chain)

    def same_bits(self, other: "Pass") -> bool:
        """Return whether both passes are bit-identical."""
        return not self.own_work_differs(other) and self.gradients == other.gradients

    def changed(self, other: "Pass", names: Sequence[str]) -> list[str]:
        """Return the names of the parameters whose gradients differ between the passes."""
        pairs = zip(names, self.gradients, other.gradients, strict=True)
        return [name for name, own, others in pairs if own != others]

    def distance(self, other: "Pass") -> float:
        """Return the largest relative difference between the passes' norms; infinite if one is not
        finite.

        A gradient whose norm is tiny compared with the norm over all gradients is rounding noise,
        as for key biases, which do not change softmax. In this case, the difference is relative to
        a share of the total norm.
        """
        largest, least = 0.0, NOISE_SHARE * max(math.hypot(*self.norms), math.hypot(*other.norms))
        for own, others in zip(self.norms, other.norms, strict=True):
            if own != others:
                change = abs(own - others) / max(abs(own), abs(others), least)
                largest = max(largest, change if change == change else float("inf"))
        return largest


class PassRecorder:
    """Records passes. Its hooks take microseconds per micro-batch.

    Args:
        engine: a DeepSpeed engine; a hook is added to its model permanently.
    """

    def __init__(self, engine: Engine):
        self._engine = engine
        self._chain: list[torch.Tensor] = []
        self._recording = False
        embeddings = engine.module.get_input_embeddings()
        embeddings.register_forward_hook(self._after_embeddings)

    def begin(self) -> None:
        """Start a pass."""
        self._chain, self._recording = [], True

    def _after_embeddings(self, module: Any, inputs: Any, output: torch.Tensor) -> None:
        if self._recording and torch.is_tensor(output) and output.requires_grad:
            output.register_hook(self._add)

    def _add(self, gradient: torch.Tensor) -> None:
        self._chain.append(digest(gradient))

    def end(self) -> None:
        """End the recording of a pass, so later forward passes are not recorded."""
        self._recording = False

    def norms(self) -> torch.Tensor:
        """Return the 2-norms of this rank's part of the gradient, as float32 of shape
        (parameters,).
        """
        slices = self._slices()
        if not slices:  # a rank may own only padding
            return torch.zeros(0, device=self._engine.device)
        return torch.stack(list(torch._foreach_norm(slices, 2, torch.float32)))

    def result(self, losses: Sequence[torch.Tensor]) -> Pass:
        """Return the completed pass; waits for the device.

        Args:
            losses: the loss of each micro-batch on this rank.
        """
        digests = [digest(each) for each in self._slices()]
        return Pass(
            [int(digest(loss[None])) for loss in losses],
            torch.stack(self._chain).tolist() if self._chain else [],
            torch.stack(digests).tolist() if digests else [],
            self.norms().tolist(),
        )

    def names(self) -> list[str]:
        """Return the names of the parameters whose gradients are at least partly on this rank."""
        return [name for name, _ in gradients(self._engine)]

    def _slices(self) -> list[torch.Tensor]:
        return [values for _, values in gradients(self._engine)]
