"""Records forward and backward passes over a batch, so they can be compared."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from zerolm.distributed.pipeline import Link, Moved
from zerolm.engine.gradients import gradients
from zerolm.engine.protocol import Engine
from zerolm.integrity.digests import digest

NOISE_SHARE = 1e-3  # share of the norm over all gradients


class Pass(NamedTuple):
    """The results of a pass on one rank, stored on the host.

    The first four are lists of digests by micro-batch, in the order in which a rank gets or
    computes them. A list is empty if a rank gets or computes no such values.

    Attributes:
        received: hidden states from the previous pipeline stage.
        results: bits of losses, or hidden states for the next pipeline stage.
        returned: gradients of these states.
        chain: gradients of the input embeddings, if they are trained, or of the received states.
            They depend on every activation and its gradient.
        gradients: digests of this rank's part of the reduced gradient, by parameter.
        norms: 2-norms of this rank's part of the reduced gradient, by parameter.
    """

    received: list[int]
    results: list[int]
    returned: list[int]
    chain: list[int]
    gradients: list[int]
    norms: list[float]

    def own_work_differs(self, other: "Pass") -> bool:
        """Return whether this rank computed different values from what it got alike."""
        for number in range(max(map(len, self[:4]))):
            for mine, others, is_own in zip(
                self[:4], other[:4], (False, True, False, True), strict=True
            ):
                if mine and mine[number] != others[number]:
                    if is_own:
                        return True
                    break
        return False

    def same_bits(self, other: "Pass") -> bool:
        """Return whether both passes are bit-identical."""
        return self[:5] == other[:5]

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
        link: of a pipeline stage; it is observed permanently.
    """

    def __init__(self, engine: Engine, link: Link | None = None):
        self._engine = engine
        self._digests: dict[str, list[torch.Tensor]] = {}
        self._recording = False
        if link is not None:
            link.observe = self._after_exchange
        embeddings = engine.module.get_input_embeddings()
        embeddings.register_forward_hook(self._after_embeddings)

    def begin(self) -> None:
        """Start a pass."""
        self._digests = {kind: [] for kind in Pass._fields[:4]}
        self._recording = True

    def _add(self, kind: str, values: torch.Tensor) -> None:
        if self._recording:
            self._digests[kind].append(digest(values))

    def _after_exchange(self, sent: Moved, arrived: Moved) -> None:
        messages = {
            "received": arrived.get("states"), "results": sent.get("states"),
            "returned": arrived.get("gradient"), "chain": sent.get("gradient"),
        }  # fmt: skip
        for kind, message in messages.items():
            if message is not None:
                self._add(kind, message.values)

    def _after_embeddings(self, module: Any, inputs: Any, output: torch.Tensor) -> None:
        if self._recording and torch.is_tensor(output) and output.requires_grad:
            output.register_hook(partial(self._add, "chain"))

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
            losses: the loss of each micro-batch on this rank, if it computes losses.
        """
        digests = {**self._digests, "gradients": [digest(each) for each in self._slices()]}
        digests["results"] = [*digests["results"], *(digest(loss[None]) for loss in losses)]
        found = {kind: torch.stack(each).tolist() if each else [] for kind, each in digests.items()}
        return Pass(**found, norms=self.norms().tolist())

    def names(self) -> list[str]:
        """Return the names of the parameters whose gradients are at least partly on this rank."""
        return [name for name, _ in gradients(self._engine)]

    def _slices(self) -> list[torch.Tensor]:
        return [values for _, values in gradients(self._engine)]
