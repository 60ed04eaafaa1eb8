"""One optimizer step, with the same gradient at any ZeRO stage, world size and micro-batch size.

The loss of a micro-batch is the sum over its target tokens, divided by the number of targets in the
GLOBAL batch, and multiplied by what DeepSpeed later divides gradients by (the world size, unless
ranks share sequences). Gradients are then those of the mean loss per token, however the batch is
divided into micro-batches and ranks. DeepSpeed's own division by the accumulation steps is off, and
the accumulation boundary is set by hand, so that the batch size may change during a run.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.profiler import record_function

from zerolm.common.errors import GaveUp
from zerolm.distributed.collectives import sum_over_ranks
from zerolm.distributed.layout import Layout
from zerolm.model.loss import IGNORED, squared_log_partitions, sums_by_source, token_losses
from zerolm.train.routing import Routing
from zerolm.train.step_gate import ClipRule, RefusalRule, StepGate
from zerolm.watchdog.progress import record_progress

Batch = dict[str, torch.Tensor]
AUXILIARY = "train/auxiliary_loss"  # of routers
PENALTIES = (AUXILIARY, "train/router_z_loss", "train/z_loss")
DISTORTIONS = {"nan": float("nan"), "x10": 10.0}  # factor on a loss, by fault name


@dataclass
class StepResult:
    """The result of a step, reduced over ranks: the same on all of them.

    Attributes:
        loss: mean cross-entropy per target token of the global batch.
        source_losses, source_tokens: (S,) sum of losses and number of targets per source.
        text_losses, text_bytes: (S,) sum of the losses of targets that stand for text, and bytes of
            that text; empty if the bytes of tokens are not known.
        penalties: weighted losses that are minimized with the loss, by metric: the router loss of
            a mixture of experts, and z-losses.
        router: router metrics, if they were measured in this step.
        attention_logits: of each layer, the largest of each head, if they were measured.
        grad_norm: 2-norm of the gradient before clipping; infinite if it is not finite.
        clipped_to: clipping norm of this step; 0 for no clipping.
        learning_rate: of this step.
        applied: False if the optimizer step was refused, or skipped by DeepSpeed.
        flags: sums over ranks of the flags that each passed in.
        watched: sums over ranks of what `watch` returned.
        micro_losses: of this rank only: the mean loss of each of its micro-batches.
    """

    loss: float
    source_losses: list[float]
    source_tokens: list[float]
    text_losses: list[float] = field(default_factory=list)
    text_bytes: list[float] = field(default_factory=list)
    penalties: dict[str, float] = field(default_factory=dict)
    router: dict[str, float] = field(default_factory=dict)
    attention_logits: list[list[float]] = field(default_factory=list)
    grad_norm: float = 0.0
    clipped_to: float = 0.0
    learning_rate: float = 0.0
    applied: bool = True
    flags: list[float] = field(default_factory=list)
    watched: list[float] = field(default_factory=list)
    micro_losses: list[torch.Tensor] = field(default_factory=list)


def seed_step(seed: int, position: int, rank: int) -> None:
    """Seed dropout from the position in the data, so that no RNG state has to be checkpointed."""
    digest = hashlib.sha256(f"{seed}/step/{position}/{rank}".encode()).digest()
    torch.manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def forward_backward(
    engine: Any,
    batches: Sequence[Batch],
    num_sources: int,
    seq_len: int,
    layout: Layout,
    flags: Sequence[float],
    *,
    rows_differ: bool = False,
    fault: str | None = None,
    timing_forward: Callable[[], AbstractContextManager[None]] = nullcontext,
    observing_forward: Callable[[Batch], AbstractContextManager[Any]] = nullcontext,
    observing_backward: Callable[[Batch], AbstractContextManager[Any]] = nullcontext,
    token_bytes: torch.Tensor | None = None,
    routing: Routing | None = None,
    z_loss: float = 0.0,
    watch: Callable[[Sequence[torch.Tensor]], torch.Tensor] | None = None,
) -> StepResult:
    """Accumulate the gradient of one global batch, without taking the step. Every rank must call.

    Args:
        engine: the DeepSpeed engine.
        batches: this rank's micro-batches of the step, on its device; as many as on other ranks.
        num_sources: number of data sources.
        seq_len: tokens per sequence.
        layout: which ranks share sequences.
        flags: numbers to sum over ranks along with the losses.
        rows_differ: whether sequences may differ in their number of targets.
        fault: injected fault for this rank, from `fault_point`; for tests.
        timing_forward: context manager for each forward pass.
        observing_forward, observing_backward: context managers for each forward and backward pass,
            given its micro-batch.
        token_bytes: bytes of text of each token, for `sums_by_source`.
        routing: observes the routers of the model.
        z_loss: weight of the mean squared log-partition of the output logits.
        watch: called after the last backward pass with `micro_losses`; returns figures to sum.
    """
    device, contributes = engine.device, layout.contributes(engine.global_rank)
    rows = len(batches) * len(batches[0]["targets"]) * layout.replicas
    targets: torch.Tensor | int = rows * seq_len
    if rows_differ:
        counted = torch.stack([(batch["targets"] != IGNORED).sum() for batch in batches]).sum()
        targets = sum_over_ranks(counted * contributes)
    # One reduction for all: sums by source, auxiliary and other losses, flags, router metrics.
    num_sums = 2 if token_bytes is None else 4
    auxiliary_at = num_sums * num_sources
    flags_at = auxiliary_at + len(PENALTIES)
    router_at = flags_at + len(flags)
    sums = torch.zeros(router_at, dtype=torch.float64, device=device)
    by_source = sums[:auxiliary_at].view(num_sums, num_sources)
    measured: set[str] = set()
    micro_losses: list[torch.Tensor] = []
    for number, batch in enumerate(batches):
        record_progress("forward")
        engine.set_gradient_accumulation_boundary(number == len(batches) - 1)
        with timing_forward(), observing_forward(batch), record_function("forward"):
            outputs: list[Any] = []
            losses_BT, auxiliary = token_losses(engine, batch, outputs.append)
            penalties = {}
            if routing is not None:
                routing.observe(outputs[0])
                penalties = routing.losses(rows * seq_len)
            if z_loss:
                squares_BT = squared_log_partitions(engine, outputs[0], batch, losses_BT)
                penalties["train/z_loss"] = squares_BT.sum() * _divided(z_loss, targets)
            outputs.clear()  # frees the logits
        if fault in DISTORTIONS:
            losses_BT = losses_BT * DISTORTIONS[fault]
        loss = losses_BT.sum() * _divided(layout.gradient_divisor, targets)
        micro_losses.append(losses_BT.detach().mean())
        by_source += sums_by_source(losses_BT, batch, num_sources, token_bytes)
        if auxiliary is not None and AUXILIARY not in penalties:  # of a micro-batch
            measured.add(AUXILIARY)
            sums[auxiliary_at] += auxiliary.detach().double() / (len(batches) * layout.replicas)
            loss = loss + auxiliary / len(batches)
        for name, part in penalties.items():
            measured.add(name)
            sums[auxiliary_at + PENALTIES.index(name)] += part.detach().double()
            loss = loss + part * layout.gradient_divisor
        if fault == "inf":
            loss = loss * torch.inf  # an infinite gradient; the logged loss stays finite
        record_progress("backward")
        with observing_backward(batch), record_function("backward"):
            engine.backward(loss, scale_wrt_gas=False)
    record_progress("reduce")
    sums *= contributes
    for number, flag in enumerate(flags):
        sums[flags_at + number].fill_(flag)  # a copy of a tensor would wait for the device
    if routing is not None:
        sums = torch.cat([sums, routing.sums(device) * contributes])
    watched_at = len(sums)
    if watch is not None:
        sums = torch.cat([sums, watch(micro_losses)])
    figures = sum_over_ranks(sums).tolist()
    losses, tokens, *text = (
        figures[start : start + num_sources] for start in range(0, auxiliary_at, num_sources)
    )
    penalty_sums = dict(zip(PENALTIES, figures[auxiliary_at:flags_at], strict=True))
    return StepResult(
        loss=sum(losses) / sum(tokens),
        source_losses=losses,
        source_tokens=tokens,
        text_losses=text[0] if text else [],
        text_bytes=text[1] if text else [],
        penalties={name: penalty_sums[name] for name in PENALTIES if name in measured},
        router=routing.row(figures[router_at:watched_at]) if routing is not None else {},
        flags=figures[flags_at:router_at],
        watched=figures[watched_at:],
        micro_losses=micro_losses,
    )


def _divided(factor: float, targets: torch.Tensor | int) -> torch.Tensor | float:
    """Return a factor on float32 losses. A tensor stays on its device, with the same rounding."""
    if isinstance(targets, int):
        return factor / targets
    return (factor / targets.double()).float()


def learning_rate_ratios(engine: Any, peak: float) -> list[float]:
    """Return each parameter group's learning rate divided by the run's. Call before the first step.

    The ratios are 1, except for optimizers with several rates, such as Muon's for matrices and for
    other parameters.

    Args:
        peak: the learning rate in the resolved ds config.
    """
    return [group["lr"] / peak for group in engine.optimizer.param_groups]


def apply_step(
    engine: Any,
    gate: StepGate,
    result: StepResult,
    learning_rate: float | None,
    ratios: Sequence[float],
    *,
    factor: float = 1.0,
    refused: bool = False,
    should_refuse: RefusalRule,
    clip_norm: ClipRule | None = None,
) -> None:
    """Take the optimizer step and complete `result`. Every rank must call.

    Args:
        learning_rate: of this step; None leaves it to the scheduler of the ds config.
        ratios: of the parameter groups, from `learning_rate_ratios`.
        factor: on the learning rate, whichever sets it.
        refused: do not take the step, only clear the gradients.
        should_refuse: given the gradient norm, returns whether to refuse the step.
        clip_norm: given the gradient norm, returns the norm to clip to; None: as in the ds config.

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
    record_progress("optimizer")
    try:
        with record_function("optimizer step"):
            gate.step(engine, refused, should_refuse, clip_norm)
    except Exception as error:
        if "loss scale already at minimum" in str(error):  # DeepSpeed raises a bare Exception
            raise GaveUp(f"fp16: {error}") from error
        raise
    result.applied = engine.was_step_applied()
    if not result.applied:  # DeepSpeed's scheduler, if there is one, has not advanced either
        for group, rate in zip(groups, scheduled, strict=True):
            group["lr"] = rate
    result.clipped_to = gate.clipped_to
    # None: DeepSpeed found an overflow before it computed the norm.
    result.grad_norm = float("inf") if gate.grad_norm is None else gate.grad_norm


def take_micro_batches(batches: Iterator[Batch], count: int) -> list[Batch]:
    """Return the next `count` micro-batches."""
    return [next(batches) for _ in range(count)]
