"""One optimizer step: the same arithmetic on every ZeRO stage, world size and micro-batch.

The loss that goes backward is the sum over this micro-batch's tokens, times what DeepSpeed divides
gradients by (the world size, unless ranks share sequences), over the number of targets in the
GLOBAL batch. Gradients are then
those of the mean loss per token, however the batch was cut. DeepSpeed's own division by the
accumulation steps is off, and the boundary is set by hand, so that the batch size may change.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from zerolm.common.errors import GaveUp
from zerolm.distributed.collectives import sum_over_ranks
from zerolm.distributed.layout import Layout
from zerolm.model.loss import IGNORED, sums_by_source, token_losses
from zerolm.train.router_metrics import Routing
from zerolm.train.step_gate import Clip, Judge, StepGate
from zerolm.watchdog.progress import record_progress

Batch = dict[str, torch.Tensor]
DISTORTIONS = {"nan": float("nan"), "x10": 10.0}  # of a loss and its gradient, by faults


@dataclass
class StepResult:
    """What all ranks know of a step, summed over them.

    Attributes:
        loss: mean cross-entropy of each target token of the global batch.
        source_losses, source_tokens: (S,) sums of losses and counts of targets per source.
        auxiliary_loss: mean weighted router loss of a mixture of experts, else None.
        router: metrics of its routers, on a step in which they were measured.
        grad_norm: 2-norm of the gradient before clipping; infinite when it is not finite.
        clipped_to: 2-norm to which the gradient was clipped if it was larger; 0: it was not.
        learning_rate: of this step.
        applied: False when the optimizer step was refused, or skipped by DeepSpeed.
        flags: sums over the ranks of what each gave.
    """

    loss: float
    source_losses: list[float]
    source_tokens: list[float]
    auxiliary_loss: float | None = None
    router: dict[str, float] = field(default_factory=dict)
    grad_norm: float = 0.0
    clipped_to: float = 0.0
    learning_rate: float = 0.0
    applied: bool = True
    flags: list[float] = field(default_factory=list)


def seed_step(seed: int, position: int, rank: int) -> None:
    """Seed dropout and the like from where the run is: a resume then needs no generator's state."""
    digest = hashlib.sha256(f"{seed}/step/{position}/{rank}".encode()).digest()
    torch.manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def forward_backward(
    engine: Any,
    batches: Sequence[Batch],
    num_sources: int,
    seq_len: int,
    layout: Layout,
    flags: Sequence[float],
    fault: str | None = None,
    computing: Callable[[], AbstractContextManager[None]] = nullcontext,
    watching: Callable[[Batch], AbstractContextManager[Any]] = nullcontext,
    routing: Routing | None = None,
) -> StepResult:
    """Accumulate the gradient of one global batch, without taking the step. Every rank must call.

    Args:
        engine: the DeepSpeed engine.
        batches: this rank's micro-batches of the step on the engine's device, as many as others.
        num_sources: how many data sources there are.
        seq_len: tokens of a sequence.
        layout: which ranks share sequences.
        flags: figures of this rank of which all are to know the sums.
        fault: for tests: what `fault_point` handed back for this rank.
        computing: entered for each forward pass, which it may time.
        watching: entered for each backward pass, whose gradients it may look at.
        routing: is shown what the routers of a mixture of experts do.
    """
    device, counts = engine.device, layout.contributes(engine.global_rank)
    rows = len(batches) * len(batches[0]["targets"]) * layout.replicas
    if "document_ids" in batches[0]:  # rows differ in how many targets they have
        counted = sum((batch["targets"] != IGNORED).sum() for batch in batches)
        targets = int(sum_over_ranks(counted * counts))
    else:
        targets = rows * seq_len
    # Loss sums and target counts per source, the auxiliary loss, the flags: one reduction for all.
    sums = torch.zeros(2 * num_sources + 1 + len(flags), dtype=torch.float64, device=device)
    observe = routing.observe if routing is not None else None
    by_source = sums[: 2 * num_sources].view(2, num_sources)
    has_auxiliary = False
    for number, batch in enumerate(batches):
        record_progress("step")
        engine.set_gradient_accumulation_boundary(number == len(batches) - 1)
        with computing():
            losses_BT, auxiliary = token_losses(engine, batch, observe)
        if fault in DISTORTIONS:
            losses_BT = losses_BT * DISTORTIONS[fault]
        loss = losses_BT.sum() * (layout.gradient_divisor / targets)
        by_source += sums_by_source(losses_BT, batch, num_sources)
        if auxiliary is not None:
            has_auxiliary = True
            sums[2 * num_sources] += auxiliary.detach().double() / (len(batches) * layout.replicas)
            loss = loss + auxiliary / len(batches)
        if fault == "inf":
            loss = loss * torch.inf  # its gradient is infinite, the loss that is reported is not
        with watching(batch):
            engine.backward(loss, scale_wrt_gas=False)
    sums *= counts
    sums[2 * num_sources + 1 :] = torch.tensor(flags, dtype=torch.float64)
    own = len(sums)
    if routing is not None:
        sums = torch.cat([sums, routing.sums(device) * counts])
    figures = sum_over_ranks(sums).tolist()
    losses, counts = figures[:num_sources], figures[num_sources : 2 * num_sources]
    return StepResult(
        loss=sum(losses) / sum(counts),
        source_losses=losses,
        source_tokens=counts,
        auxiliary_loss=figures[2 * num_sources] if has_auxiliary else None,
        router=routing.row(figures[own:]) if routing is not None else {},
        flags=figures[2 * num_sources + 1 : own],
    )


def learning_rate_ratios(engine: Any, peak: float) -> list[float]:
    """Return each parameter group's learning rate in units of the run's, before any is changed.

    They are 1 but for optimizers with several rates, such as Muon's for matrices and for the rest.

    Args:
        peak: the learning rate that the ds config was resolved with.
    """
    return [group["lr"] / peak for group in engine.optimizer.param_groups]


def apply(
    engine: Any,
    gate: StepGate,
    result: StepResult,
    learning_rate: float | None,
    ratios: Sequence[float],
    *,
    factor: float = 1.0,
    refused: bool = False,
    judge: Judge,
    clip: Clip | None = None,
) -> None:
    """Take the optimizer step, and note how it went in `result`. Every rank must call.

    Args:
        learning_rate: of this step; None leaves it to the scheduler of the ds config.
        ratios: of the parameter groups, from `learning_rate_ratios`.
        factor: what either is multiplied by.
        refused: only clear the gradients: the weights and the optimizer's states stay as they are.
        judge: is given the gradient norm, and returns whether to refuse the step for it.
        clip: is given it too, and returns what to clip to; None: as the ds config says.

    Raises:
        GaveUp: fp16 found no loss scale at which the gradients are finite.
    """
    groups = engine.optimizer.param_groups
    scheduled = [group["lr"] for group in groups]
    if learning_rate is not None:
        for group, ratio in zip(groups, ratios, strict=True):
            group["lr"] = learning_rate * factor * ratio
    elif factor != 1.0:
        for group, rate in zip(groups, scheduled, strict=True):
            group["lr"] = rate * factor
    result.learning_rate = groups[0]["lr"] if learning_rate is None else learning_rate * factor
    try:
        gate.step(engine, refused, judge, clip)
    except Exception as error:
        if "loss scale already at minimum" in str(error):  # DeepSpeed raises a bare Exception
            raise GaveUp(f"fp16: {error}") from error
        raise
    result.applied = engine.was_step_applied()
    if not result.applied:  # then DeepSpeed's scheduler, if there is one, has not set it either
        for group, rate in zip(groups, scheduled, strict=True):
            group["lr"] = rate
    norm = gate.grad_norm if gate.refused else engine.get_global_grad_norm()
    result.clipped_to = gate.clipped_to
    # DeepSpeed's -1 is a NaN; without a norm it found an overflow before it came to one.
    result.grad_norm = float(norm) if norm is not None and norm >= 0 else float("inf")


def take(batches: Iterator[Batch], count: int) -> list[Batch]:
    """Return the next `count` micro-batches."""
    return [next(batches) for _ in range(count)]
