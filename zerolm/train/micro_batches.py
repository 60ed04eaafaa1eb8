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

Each stage adds its own routers' part of the router losses. The model's own router loss of a
micro-batch multiplies sums over the routers of all stages: the numbers of tokens for each expert
are summed from stage to stage in the forward pass, and the totals return in the backward pass.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch.profiler import record_function

from zerolm.distributed import ulysses
from zerolm.distributed.collectives import sum_over_ranks
from zerolm.distributed.pipeline import Message, one_forward_one_backward
from zerolm.engine import stages
from zerolm.engine.protocol import Engine
from zerolm.features.feature import Feature, Forward, StepInputs
from zerolm.model.architecture import experts_per_token, router_loss_coefficient
from zerolm.model.forward import hidden_states, token_losses
from zerolm.model.loss import (
    IGNORED,
    divided,
    pooled_balance_loss,
    pooled_choices,
    sums_by_source,
)
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
        penalties: {metric: this rank's weighted loss}, with the same keys on every rank of a stage.
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
        self._own_penalties: dict[int, torch.Tensor] = {}  # of a stage without losses
        # With the model's own router loss in stages: sums of this stage's and of all routers.
        self._probabilities: dict[int, torch.Tensor] = {}
        self._counts: dict[int, torch.Tensor] = {}

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

    def stage_forward(self, number: int, received: Message | None) -> Message | None:
        """Run a stage forward; return the hidden states to send, which the last stage has not."""
        assert self._stage is not None
        if received is not None:
            self._received[number] = received.values.requires_grad_()
            if received.counts is not None:
                self._counts[number] = received.counts
        if self._stage.is_last:
            self.forward(number)
            return None
        record_progress("forward")
        batch = self.batches[number]
        with self.timing_forward(), ExitStack() as contexts:
            for feature in self.features:
                contexts.enter_context(feature.forward(batch))
            contexts.enter_context(record_function("forward"))
            outputs: list[Any] = []
            sent = hidden_states(self.engine, batch, self._received.get(number), outputs.append)
            penalties: dict[str, torch.Tensor] = {}
            for feature in self.features:
                penalties |= feature.block_losses(outputs[0], self.tokens)
            if AUXILIARY not in penalties:
                self._pool(number, outputs.pop())
        self._minimized[number] = sent
        self._own_penalties[number] = self._with_penalties(sent.new_zeros(()).float(), penalties)
        return Message(sent, self._counts.pop(number, None))

    def stage_backward(self, number: int, gradient: Message | None) -> Message | None:
        """Run a stage backward; return the gradient of what it received.

        Args:
            gradient: of what the stage sent.
        """
        counts = self._counts.pop(number, None)
        if gradient is not None:
            counts = gradient.counts
            loss = (self._minimized[number] * gradient.values).sum()
            loss = loss + self._own_penalties.pop(number)
            self._minimized[number] = loss + self._pooled_loss(number, counts)
        self.backward(number)
        received = self._received.pop(number, None)
        if received is None:
            return None
        assert received.grad is not None
        return Message(received.grad, counts)

    def _pool(self, number: int, outputs: Any) -> None:
        """Add this stage's routers to the sums of a micro-batch for the model's router loss."""
        config = self.engine.module.config
        logits = getattr(outputs, "router_logits", None)
        if logits and router_loss_coefficient(config):
            top_k = experts_per_token(config) or 1
            counts, self._probabilities[number] = pooled_choices(logits, top_k)
            before = self._counts.get(number)
            self._counts[number] = counts if before is None else counts + before

    def _pooled_loss(self, number: int, counts: torch.Tensor | None) -> torch.Tensor | float:
        """Return the part of this stage's routers in the model's router loss of a micro-batch.

        Args:
            counts: sums over the routers of all stages.
        """
        if (probabilities := self._probabilities.pop(number, None)) is None:
            return 0.0
        assert counts is not None
        loss = pooled_balance_loss(probabilities, counts)
        return self._micro_mean(loss * (router_loss_coefficient(self.engine.module.config) or 0.0))

    def _micro_mean(self, auxiliary: torch.Tensor) -> torch.Tensor:
        """Return what to minimize for a router loss that is a mean over its micro-batch."""
        count = len(self.batches)
        self._add(AUXILIARY, auxiliary.detach().double() / (count * self.layout.replicas))
        return auxiliary / count

    def _with_penalties(
        self, loss: torch.Tensor, penalties: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        """Add a micro-batch's penalties to what to minimize for it, and to the sums to log."""
        for name, part in penalties.items():
            self._add(name, part.detach().double())
            loss = loss + part * self.layout.gradient_divisor
        return loss

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
            forward = Forward(batch, outputs.pop(), losses_BT, self.targets)
            penalties: dict[str, torch.Tensor] = {}
            for feature in self.features:
                penalties |= feature.block_losses(forward.outputs, self.tokens)
                penalties |= feature.losses(forward)
            if self._stage is not None and AUXILIARY not in penalties:
                self._pool(number, forward.outputs)
            del forward  # frees the logits
        if self.fault in DISTORTIONS:
            losses_BT = losses_BT * DISTORTIONS[self.fault]
        loss = losses_BT.sum() * divided(self.layout.gradient_divisor, self.targets)
        self.micro_losses.append(losses_BT.detach().mean())
        num_sources = self.by_source.shape[1]
        self.by_source += sums_by_source(losses_BT, batch, num_sources, self.token_bytes)
        if auxiliary is not None and AUXILIARY not in penalties:
            loss = loss + self._micro_mean(auxiliary)
        if self._stage is not None:
            loss = loss + self._pooled_loss(number, self._counts.get(number))
        loss = self._with_penalties(loss, penalties)
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
