"""`Stepper`: optimizer steps with the same gradient for any ZeRO stage, world size and micro-batch.

`MicroBatches` computes the gradient; `Stepper.take` has the order of everything else.
"""

import hashlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial

import torch
from torch.profiler import record_function

from zerolm.distributed.named_sums import Figures, NamedSums
from zerolm.engine.protocol import Engine
from zerolm.engine.step_gate import StepGate
from zerolm.features.feature import Feature, StepInputs, StepResult
from zerolm.optim.spikes import SpikeGuard
from zerolm.plan.plan import Plan
from zerolm.train.micro_batches import MicroBatches
from zerolm.watchdog.progress import record_progress

SUMS_BY_SOURCE = ("losses", "tokens", "text_losses", "text_bytes")  # rows of `sums_by_source`


class Stepper:
    """Takes a run's optimizer steps on one rank. Every rank makes the same calls.

    Args:
        features: features whose hooks are called, in the order documented in `Feature`.
        timing_forward, token_bytes: see `MicroBatches`.
    """

    def __init__(
        self,
        plan: Plan,
        engine: Engine,
        gate: StepGate,
        features: Sequence[Feature],
        guard: SpikeGuard,
        timing_forward: Callable[[], AbstractContextManager[None]],
        token_bytes: torch.Tensor | None,
    ):
        self.plan, self.engine, self.gate = plan, engine, gate
        self.features, self.guard = features, guard
        self.micro_batches = partial(
            MicroBatches, plan, engine, features, timing_forward, token_bytes
        )
        self.sums = NamedSums(engine.device)
        self.contributes = plan.layout.counts_losses(engine.global_rank)
        # Each pipeline stage has penalties of its own.
        self.counts_penalties = plan.layout.axis("tensor", engine.global_rank).index == 0
        # All 1, except for optimizers with several learning rates, such as Muon.
        peak = plan.learning_rate.peak if plan.learning_rate else 1.0
        self.rate_ratios = [group["lr"] / peak for group in engine.optimizer.param_groups]

    def take(self, step: StepInputs) -> StepResult:
        """Accumulate the gradient of a global batch, and take the optimizer step.

        Raises:
            GaveUp: no fp16 loss scale yields finite gradients.
        """
        compute = partial(self.accumulate, step)
        for feature in reversed(self.features):  # the first feature is the outermost
            compute = partial(feature.passes, compute, step)
        result = compute()
        with ExitStack() as contexts:
            for feature in self.features:
                contexts.enter_context(feature.update(result))
            self.update(step, result)
        for feature in reversed(self.features):
            feature.after(step, result)
        return result

    def accumulate(self, step: StepInputs) -> StepResult:
        """Accumulate the gradient of the global batch without taking the optimizer step."""
        seed_step(self.plan.settings.seed, step.position, self.engine.global_rank)
        for feature in self.features:
            feature.begin(step)
        micro_batches = self.micro_batches(step)
        micro_batches.order()
        return self.reduce(micro_batches, step.flags)

    def reduce(self, micro_batches: MicroBatches, flags: Sequence[float]) -> StepResult:
        """Sum losses by source, weighted losses, flags and features' figures over ranks.

        All of them are summed in a single reduction.
        """
        record_progress("reduce")
        own = micro_batches.by_source * self.contributes
        own_flags = own.new_zeros(len(flags))
        for number, flag in enumerate(flags):
            own_flags[number].fill_(flag)  # copying a tensor would wait for the device
        penalties = micro_batches.penalties.items()
        of_features = [feature.sums(micro_batches.micro_losses) for feature in self.features]
        groups: dict[tuple[str, str], Figures] = {
            ("step", "sources"): dict(zip(SUMS_BY_SOURCE, own, strict=False)),
            ("step", "penalties"): {name: each * self.counts_penalties for name, each in penalties},
            ("step", "flags"): {"flags": own_flags},
        }
        for feature, of_feature in zip(self.features, of_features, strict=True):
            groups |= {(feature.name, group): each for group, each in of_feature.items()}
        found = self.sums.sum(groups)
        for feature, of_feature in zip(self.features, of_features, strict=True):
            feature.summed({group: found[feature.name, group] for group in of_feature})
        sources = found["step", "sources"]
        return StepResult(
            loss=sum(sources["losses"]) / sum(sources["tokens"]),
            by_source=sources,
            penalties=found["step", "penalties"],
            flags=found["step", "flags"]["flags"],
            micro_losses=micro_batches.micro_losses,
        )

    def update(self, step: StepInputs, result: StepResult) -> None:
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
