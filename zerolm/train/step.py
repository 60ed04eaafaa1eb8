"""`Steps`: optimizer steps with the same gradient for any ZeRO stage, world size and micro-batch.

The loss for a micro-batch is the sum over its target tokens, divided by the number of targets in
the GLOBAL batch, and multiplied by the number by which DeepSpeed later divides gradients (the world
size, unless ranks share sequences). This yields the gradient of the mean loss per token, regardless
of how the batch is divided into micro-batches and ranks. DeepSpeed's own division by the
accumulation steps is disabled, and the accumulation boundary is set explicitly, so the batch size
may change during a run.
"""

import hashlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch.profiler import record_function

from zerolm.distributed import ulysses
from zerolm.distributed.collectives import sum_over_ranks
from zerolm.engine.protocol import Engine
from zerolm.engine.step_gate import StepGate
from zerolm.features.feature import Batch, Feature, Forward, Step, StepResult
from zerolm.model.loss import IGNORED, divided, sums_by_source, token_losses
from zerolm.optim.spikes import SpikeGuard
from zerolm.plan.plan import Plan
from zerolm.train.health import AUXILIARY, Health
from zerolm.watchdog.progress import record_progress

DISTORTIONS = {"nan": float("nan"), "x10": 10.0}  # {fault: factor that it multiplies the loss by}


@dataclass
class _Sums:
    """This rank's sums over its micro-batches in a global batch.

    Attributes:
        num_batches: number of micro-batches on this rank.
        tokens, targets: number of tokens and of targets in the global batch.
        by_source: losses and targets for each of S sources, of shape (2, S); if token bytes are
            known, also text losses and bytes, of shape (4, S).
        penalties: {metric: weighted loss}, with the same keys on every rank.
        micro_losses: mean loss of each micro-batch.
    """

    num_batches: int
    tokens: int
    targets: torch.Tensor | int
    by_source: torch.Tensor
    penalties: dict[str, torch.Tensor] = field(default_factory=dict)
    micro_losses: list[torch.Tensor] = field(default_factory=list)

    def add(self, name: str, penalty: torch.Tensor) -> None:
        zero = self.by_source.new_zeros(())
        self.penalties[name] = self.penalties.get(name, zero) + penalty


class Steps:
    """Takes a run's optimizer steps on one rank. Every rank makes the same calls.

    Args:
        features: features whose hooks are called, in the order documented in `Feature`.
        timing_forward: returns a context manager for each forward pass.
        token_bytes: number of text bytes for each token id, for `sums_by_source`; None if unknown.
    """

    def __init__(
        self,
        plan: Plan,
        engine: Engine,
        gate: StepGate,
        features: Sequence[Feature],
        health: Health,
        guard: SpikeGuard,
        timing_forward: Callable[[], AbstractContextManager[None]],
        token_bytes: torch.Tensor | None,
    ):
        self.plan, self.settings, self.layout = plan, plan.settings, plan.layout
        self.engine, self.gate, self.features = engine, gate, features
        self.health, self.guard, self.timing_forward = health, guard, timing_forward
        self.token_bytes = token_bytes
        self.contributes = plan.layout.contributes(engine.global_rank)
        # All 1, except for optimizers with several learning rates, such as Muon.
        peak = plan.learning_rate.peak if plan.learning_rate else 1.0
        self.rate_ratios = [group["lr"] / peak for group in engine.optimizer.param_groups]

    def take(self, step: Step) -> StepResult:
        """Accumulate the gradient of a global batch, and take the optimizer step.

        Raises:
            GaveUp: no fp16 loss scale yields finite gradients.
        """
        compute = partial(self.accumulate, step)
        for feature in reversed(self.features):  # the first feature is the outermost
            compute = partial(feature.passes, compute, step)
        result = compute()
        self.health.before_update()
        with ExitStack() as contexts:
            for feature in self.features:
                contexts.enter_context(feature.update(result))
            self.update(step, result)
        for feature in reversed(self.features):
            feature.after(step, result)
        return result

    # ---- A pass over the batch

    def accumulate(self, step: Step) -> StepResult:
        """Accumulate the gradient of the global batch without taking the optimizer step."""
        seed_step(self.settings.seed, step.position, self.engine.global_rank)
        batches = [
            ulysses.shard_batch(each, self.layout, self.engine.global_rank) for each in step.batches
        ]
        self.health.begin(step.number, len(batches))
        for feature in self.features:
            feature.begin(step)
        sums = self._begin(batches)
        for number, batch in enumerate(batches):
            record_progress("forward")
            self.engine.set_gradient_accumulation_boundary(number == len(batches) - 1)
            loss = self.forward(batch, sums, step.fault)
            record_progress("backward")
            with self.health.observe_backward(batch), record_function("backward"):
                self.engine.backward(loss, scale_wrt_gas=False)
        record_progress("reduce")
        return self.reduce(sums, step.flags)

    def _begin(self, batches: Sequence[Batch]) -> _Sums:
        rows = len(batches) * len(batches[0]["targets"]) * self.layout.replicas
        tokens = rows * self.settings.seq_len
        targets: torch.Tensor | int = tokens
        if self.settings.rows_differ:
            counted = torch.stack([(batch["targets"] != IGNORED).sum() for batch in batches]).sum()
            targets = sum_over_ranks(counted * self.contributes)
        shape = 2 if self.token_bytes is None else 4, len(self.plan.sources)
        by_source = torch.zeros(shape, dtype=torch.float64, device=self.engine.device)
        return _Sums(len(batches), tokens, targets, by_source)

    def forward(self, batch: Batch, sums: _Sums, fault: str | None) -> torch.Tensor:
        """Return the loss to minimize for a micro-batch, and add the losses to log to `sums`."""
        with self.timing_forward(), ExitStack() as contexts:
            for feature in self.features:
                contexts.enter_context(feature.forward(batch))
            contexts.enter_context(record_function("forward"))
            outputs: list[Any] = []
            losses_BT, auxiliary = token_losses(self.engine, batch, outputs.append)
            forward = Forward(batch, outputs.pop(), losses_BT, sums.tokens, sums.targets)
            penalties = {
                name: part
                for feature in self.features
                for name, part in feature.losses(forward).items()
            }
            del forward  # frees the logits
        if fault in DISTORTIONS:
            losses_BT = losses_BT * DISTORTIONS[fault]
        loss = losses_BT.sum() * divided(self.layout.gradient_divisor, sums.targets)
        sums.micro_losses.append(losses_BT.detach().mean())
        num_sources = len(self.plan.sources)
        sums.by_source += sums_by_source(losses_BT, batch, num_sources, self.token_bytes)
        if auxiliary is not None and AUXILIARY not in penalties:  # a mean over the micro-batch
            of_all = sums.num_batches * self.layout.replicas
            sums.add(AUXILIARY, auxiliary.detach().double() / of_all)
            loss = loss + auxiliary / sums.num_batches
        for name, part in penalties.items():
            sums.add(name, part.detach().double())
            loss = loss + part * self.layout.gradient_divisor
        if fault == "inf":
            loss = loss * torch.inf  # the gradient becomes infinite, but the logged loss is finite
        return loss

    def reduce(self, sums: _Sums, flags: Sequence[float]) -> StepResult:
        """Sum losses by source, weighted losses, flags and features' values over ranks.

        All of them are summed in a single reduction.
        """
        zero = sums.by_source.new_zeros(())
        of_features = [feature.sums(sums.micro_losses) for feature in self.features]
        parts = [
            sums.by_source.flatten() * self.contributes,
            torch.stack([zero, *sums.penalties.values()])[1:] * self.contributes,
            sums.by_source.new_zeros(len(flags)),
            *(zero[None][:0] if each is None else each for each in of_features),
        ]
        for number, flag in enumerate(flags):
            parts[2][number].fill_(flag)  # copying a tensor would wait for the device
        figures = iter(sum_over_ranks(torch.cat(parts)).tolist())
        by_source, penalties, flags_summed, *received = (
            [*islice(figures, len(part))] for part in parts
        )
        for feature, own in zip(self.features, received, strict=True):
            feature.summed(own)
        num_sources = len(self.plan.sources)
        losses, tokens, *text = (
            by_source[start : start + num_sources] for start in range(0, len(parts[0]), num_sources)
        )
        return StepResult(
            loss=sum(losses) / sum(tokens),
            source_losses=losses,
            source_tokens=tokens,
            text_losses=text[0] if text else [],
            text_bytes=text[1] if text else [],
            penalties=dict(zip(sums.penalties, penalties, strict=True)),
            flags=flags_summed,
            micro_losses=sums.micro_losses,
        )

    # ---- The update

    def update(self, step: Step, result: StepResult) -> None:
        """Take the optimizer step unless the spike guard refuses it, and complete the result."""
        engine, gate, guard = self.engine, self.gate, self.guard
        groups = engine.optimizer.param_groups
        scheduled = [group["lr"] for group in groups]
        if step.learning_rate is not None:
            for group, ratio in zip(groups, self.rate_ratios, strict=True):
                group["lr"] = step.learning_rate * guard.factor * ratio
            result.learning_rate = step.learning_rate * guard.factor
        else:
            if guard.factor != 1.0:
                for group, rate in zip(groups, scheduled, strict=True):
                    group["lr"] = rate * guard.factor
            result.learning_rate = groups[0]["lr"]
        refused = guard.check_loss(result.loss)
        record_progress("optimizer")
        with record_function("optimizer step"):
            gate.step(engine, refused, guard.check_grad_norm)
        result.applied = engine.was_step_applied()
        if not result.applied:  # DeepSpeed's scheduler, if any, has not advanced either
            for group, rate in zip(groups, scheduled, strict=True):
                group["lr"] = rate
        # The norm is None if DeepSpeed detected an overflow before computing it.
        result.grad_norm = float("inf") if gate.grad_norm is None else gate.grad_norm


def seed_step(seed: int, position: int, rank: int) -> None:
    """Seed dropout from the position in the data, so checkpoints need no RNG state."""
    digest = hashlib.sha256(f"{seed}/step/{position}/{rank}".encode()).digest()
    torch.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
