"""`MicroBatches`: the forward and backward passes of a step on one rank, and their sums.

The loss for a micro-batch is the sum over its target tokens, divided by the number of targets in
the GLOBAL batch, and multiplied by the number by which DeepSpeed later divides gradients (the world
size, unless ranks share sequences). This yields the gradient of the mean loss per token, regardless
of how the batch is divided into micro-batches and ranks. DeepSpeed's own division by the
accumulation steps is disabled, and the accumulation boundary is set explicitly, so the batch size
may change during a run.

A pipeline stage gets hidden states from the previous one, and their gradient goes back there. A
stage that is not the last minimizes the sum of its hidden states times the gradient that it gets
for them: the gradient of that is the loss's, and DeepSpeed's engine runs as for a whole model.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch.profiler import record_function

from zerolm.distributed import ulysses
from zerolm.distributed.collectives import sum_over_ranks
from zerolm.distributed.pipeline import one_forward_one_backward
from zerolm.engine import stages
from zerolm.engine.protocol import Engine
from zerolm.features.feature import Feature, Forward, StepInputs
from zerolm.model.forward import hidden_states, token_losses
from zerolm.model.loss import IGNORED, divided, sums_by_source
from zerolm.model.stages import stage_of
from zerolm.plan.plan import Plan
from zerolm.run_dir.metrics import AUXILIARY
from zerolm.watchdog.progress import record_progress

DISTORTIONS = {"nan": float("nan"), "x10": 10.0}  # {fault: factor that it multiplies the loss by}


def in_sequence(
    count: int, forward: Callable[[int], None], backward: Callable[[int], None]
) -> None:
    """Run each micro-batch forward and then backward, so activations of only one are stored."""
    for number in range(count):
        forward(number)
        backward(number)


class MicroBatches:
    """A pass over the micro-batches of a step: an order calls `forward` and `backward` of each.

    Args:
        features: features whose hooks are called.
        timing_forward: returns a context manager for each forward pass.
        token_bytes: number of text bytes for each token id, for `sums_by_source`; None if unknown.

    Attributes:
        targets: number of targets in the global batch.
        by_source: this rank's losses and targets for each of S sources, of shape (2, S); if token
            bytes are known, also text losses and bytes, of shape (4, S).
        penalties: {metric: this rank's weighted loss}, with the same keys on every rank.
        micro_losses: mean loss of each micro-batch; empty on stages without losses.
    """

    def __init__(
        self,
        plan: Plan,
        engine: Engine,
        features: Sequence[Feature],
        timing_forward: Callable[[], AbstractContextManager[None]],
        token_bytes: torch.Tensor | None,
        step: StepInputs,
    ):
        self.engine, self.layout, self.features = engine, plan.layout, features
        self.timing_forward, self.token_bytes = timing_forward, token_bytes
        self.tokens, self.fault = step.tokens, step.fault
        rank = engine.global_rank
        self.batches = [ulysses.shard_batch(each, plan.layout, rank) for each in step.batches]
        self.targets: torch.Tensor | int = step.tokens
        if plan.settings.rows_differ:
            counts = [(batch["targets"] != IGNORED).sum() for batch in self.batches]
            counted = torch.stack(counts).sum() * plan.layout.counts_losses(rank)
            self.targets = sum_over_ranks(counted)
        shape = 2 if token_bytes is None else 4, len(plan.sources)
        self.by_source = torch.zeros(shape, dtype=torch.float64, device=engine.device)
        self.penalties: dict[str, torch.Tensor] = {}
        self.micro_losses: list[torch.Tensor] = []
        self._minimized: dict[int, torch.Tensor] = {}  # until their backward passes
        self._stage = stage_of(engine.module)
        self._received: dict[int, torch.Tensor] = {}

    def order(self) -> None:
        """Run the passes over all micro-batches."""
        count = len(self.batches)
        if self._stage is None:
            in_sequence(count, self.forward, self.backward)
            return
        link = self._stage.link
        assert link is not None
        shape = self.batches[0]["input_ids"].shape
        one_forward_one_backward(link, shape, count, self.stage_forward, self.stage_backward)
        if self._sums_shared_gradient:
            stages.sum_shared(self.engine, self._stage.shared)

    @property
    def _sums_shared_gradient(self) -> bool:
        return self._stage is not None and self._stage.shared is not None

    def stage_forward(self, number: int, received: torch.Tensor | None) -> torch.Tensor | None:
        """Run a stage forward; return the hidden states to send, which the last stage has not."""
        assert self._stage is not None
        if received is not None:
            self._received[number] = received.requires_grad_()
        if self._stage.is_last:
            self.forward(number)
            return None
        record_progress("forward")
        batch = self.batches[number]
        with self.timing_forward(), ExitStack() as contexts:
            for feature in self.features:
                contexts.enter_context(feature.forward(batch))
            contexts.enter_context(record_function("forward"))
            sent = hidden_states(self.engine, batch, received)
        self._minimized[number] = sent
        return sent

    def stage_backward(self, number: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """Run a stage backward; return the gradient of what it received.

        Args:
            gradient: of what the stage sent.
        """
        if gradient is not None:
            self._minimized[number] = (self._minimized[number] * gradient).sum()
        self.backward(number)
        received = self._received.pop(number, None)
        return None if received is None else received.grad

    def forward(self, number: int) -> None:
        """Compute the loss to minimize for a micro-batch, and add the losses to log to the sums."""
        record_progress("forward")
        batch = self.batches[number]
        with self.timing_forward(), ExitStack() as contexts:
            for feature in self.features:
                contexts.enter_context(feature.forward(batch))
            contexts.enter_context(record_function("forward"))
            outputs: list[Any] = []
            losses_BT, auxiliary = token_losses(
                self.engine, batch, outputs.append, self._received.get(number)
            )
            forward = Forward(batch, outputs.pop(), losses_BT, self.tokens, self.targets)
            penalties = {
                name: part
                for feature in self.features
                for name, part in feature.losses(forward).items()
            }
            del forward  # frees the logits
        if self.fault in DISTORTIONS:
            losses_BT = losses_BT * DISTORTIONS[self.fault]
        loss = losses_BT.sum() * divided(self.layout.gradient_divisor, self.targets)
        self.micro_losses.append(losses_BT.detach().mean())
        num_sources = self.by_source.shape[1]
        self.by_source += sums_by_source(losses_BT, batch, num_sources, self.token_bytes)
        if auxiliary is not None and AUXILIARY not in penalties:  # a mean over the micro-batch
            count = len(self.batches)
            self._add(AUXILIARY, auxiliary.detach().double() / (count * self.layout.replicas))
            loss = loss + auxiliary / count
        for name, part in penalties.items():
            self._add(name, part.detach().double())
            loss = loss + part * self.layout.gradient_divisor
        if self.fault == "inf":
            loss = loss * torch.inf  # the gradient becomes infinite, but the logged loss is finite
        self._minimized[number] = loss

    def _add(self, name: str, penalty: torch.Tensor) -> None:
        zero = self.by_source.new_zeros(())
        self.penalties[name] = self.penalties.get(name, zero) + penalty

    def backward(self, number: int) -> None:
        """Accumulate the gradient of a micro-batch; the last one reduces it over ranks."""
        record_progress("backward")
        is_last = number == len(self.batches) - 1
        # The gradient of a shared matrix is summed over its stages before the reduction.
        reduces = is_last and not self._sums_shared_gradient
        self.engine.set_gradient_accumulation_boundary(reduces)
        with ExitStack() as contexts:
            for feature in self.features:
                contexts.enter_context(feature.backward(self.batches[number]))
            contexts.enter_context(record_function("backward"))
            self.engine.backward(self._minimized.pop(number), scale_wrt_gas=False)
