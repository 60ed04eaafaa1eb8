"""One optimizer step, with the same gradient at any ZeRO stage, world size and micro-batch size.

The loss of a micro-batch is the sum over its target tokens, divided by the number of targets in the
GLOBAL batch, and multiplied by what DeepSpeed later divides gradients by (the world size, unless
ranks share sequences). Gradients are then those of the mean loss per token, however the batch is
divided into micro-batches and ranks. DeepSpeed's own division by the accumulation steps is off, and
the accumulation boundary is set by hand, so that the batch size may change during a run.
"""

import hashlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from itertools import islice
from typing import Any

import torch
from torch.profiler import record_function

from zerolm.common.errors import GaveUp
from zerolm.distributed.collectives import sum_over_ranks
from zerolm.distributed.layout import Layout
from zerolm.engine.protocol import Engine
from zerolm.engine.step_gate import RefusalRule, StepGate
from zerolm.features.feature import Feature, Forward, StepResult
from zerolm.model.loss import IGNORED, divided, sums_by_source, token_losses
from zerolm.watchdog.progress import record_progress

Batch = dict[str, torch.Tensor]
AUXILIARY = "train/auxiliary_loss"  # of routers
DISTORTIONS = {"nan": float("nan"), "x10": 10.0}  # factor on a loss, by fault name


def seed_step(seed: int, position: int, rank: int) -> None:
    """Seed dropout from the position in the data, so that no RNG state has to be checkpointed."""
    digest = hashlib.sha256(f"{seed}/step/{position}/{rank}".encode()).digest()
    torch.manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def forward_backward(
    engine: Engine,
    batches: Sequence[Batch],
    num_sources: int,
    seq_len: int,
    layout: Layout,
    flags: Sequence[float],
    *,
    rows_differ: bool = False,
    fault: str | None = None,
    timing_forward: Callable[[], AbstractContextManager[None]] = nullcontext,
    observing_backward: Callable[[Batch], AbstractContextManager[Any]] = nullcontext,
    token_bytes: torch.Tensor | None = None,
    features: Sequence[Feature] = (),
) -> StepResult:
    """Accumulate the gradient of one global batch, without taking the step. All ranks call this.

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
        observing_backward: context manager for each backward pass, given its micro-batch.
        token_bytes: bytes of text of each token, for `sums_by_source`.
        features: their contexts enclose forward passes; their losses and figures are added.
    """
    device, contributes = engine.device, layout.contributes(engine.global_rank)
    rows = len(batches) * len(batches[0]["targets"]) * layout.replicas
    targets: torch.Tensor | int = rows * seq_len
    if rows_differ:
        counted = torch.stack([(batch["targets"] != IGNORED).sum() for batch in batches]).sum()
        targets = sum_over_ranks(counted * contributes)
    num_sums = 2 if token_bytes is None else 4
    by_source = torch.zeros(num_sums, num_sources, dtype=torch.float64, device=device)
    zero = torch.zeros((), dtype=torch.float64, device=device)
    penalties_summed: dict[str, torch.Tensor] = {}  # the same keys on every rank
    micro_losses: list[torch.Tensor] = []
    for number, batch in enumerate(batches):
        record_progress("forward")
        engine.set_gradient_accumulation_boundary(number == len(batches) - 1)
        with timing_forward(), ExitStack() as contexts:
            for feature in features:
                contexts.enter_context(feature.forward(batch))
            contexts.enter_context(record_function("forward"))
            outputs: list[Any] = []
            losses_BT, auxiliary = token_losses(engine, batch, outputs.append)
            forward = Forward(batch, outputs.pop(), losses_BT, rows * seq_len, targets)
            penalties = {
                name: part for feature in features for name, part in feature.losses(forward).items()
            }
            del forward  # frees the logits
        if fault in DISTORTIONS:
            losses_BT = losses_BT * DISTORTIONS[fault]
        loss = losses_BT.sum() * divided(layout.gradient_divisor, targets)
        micro_losses.append(losses_BT.detach().mean())
        by_source += sums_by_source(losses_BT, batch, num_sources, token_bytes)
        if auxiliary is not None and AUXILIARY not in penalties:  # of a micro-batch
            part = auxiliary.detach().double() / (len(batches) * layout.replicas)
            penalties_summed[AUXILIARY] = penalties_summed.get(AUXILIARY, zero) + part
            loss = loss + auxiliary / len(batches)
        for name, part in penalties.items():
            summed = penalties_summed.get(name, zero)
            penalties_summed[name] = summed + part.detach().double()
            loss = loss + part * layout.gradient_divisor
        if fault == "inf":
            loss = loss * torch.inf  # an infinite gradient; the logged loss stays finite
        record_progress("backward")
        with observing_backward(batch), record_function("backward"):
            engine.backward(loss, scale_wrt_gas=False)
    record_progress("reduce")
    # One reduction for all: sums by source, weighted losses, flags, and figures of features.
    of_features = [feature.sums(micro_losses) for feature in features]
    parts = [
        by_source.flatten() * contributes,
        torch.stack([zero, *penalties_summed.values()])[1:] * contributes,
        torch.zeros(len(flags), dtype=torch.float64, device=device),
        *(zero[None][:0] if each is None else each for each in of_features),
    ]
    for number, flag in enumerate(flags):
        parts[2][number].fill_(flag)  # a copy of a tensor would wait for the device
    figures = iter(sum_over_ranks(torch.cat(parts)).tolist())
    by_part = [[*islice(figures, len(part))] for part in parts]
    for feature, received in zip(features, by_part[3:], strict=True):
        feature.summed(received)
    losses, tokens, *text = (
        by_part[0][start : start + num_sources] for start in range(0, len(parts[0]), num_sources)
    )
    return StepResult(
        loss=sum(losses) / sum(tokens),
        source_losses=losses,
        source_tokens=tokens,
        text_losses=text[0] if text else [],
        text_bytes=text[1] if text else [],
        penalties=dict(zip(penalties_summed, by_part[1], strict=True)),
        flags=by_part[2],
        micro_losses=micro_losses,
    )


def learning_rate_ratios(engine: Engine, peak: float) -> list[float]:
    """Return each parameter group's learning rate divided by the run's. Call before the first step.

    The ratios are 1, except for optimizers with several rates, such as Muon's for matrices and for
    other parameters.

    Args:
        peak: the learning rate in the resolved ds config.
    """
    return [group["lr"] / peak for group in engine.optimizer.param_groups]


def apply_step(
    engine: Engine,
    gate: StepGate,
    result: StepResult,
    learning_rate: float | None,
    ratios: Sequence[float],
    *,
    factor: float = 1.0,
    refused: bool = False,
    should_refuse: RefusalRule,
) -> None:
    """Take the optimizer step and complete `result`. Every rank must call this.

    Args:
        learning_rate: the rate to set; None: the scheduler of the ds config has set it.
        ratios: result of `learning_rate_ratios`, one per parameter group.
        factor: factor on the learning rate, whether we or the scheduler set it.
        refused: do not take the step, only clear the gradients.
        should_refuse: given the gradient norm, returns whether to refuse the step.

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
            gate.step(engine, refused, should_refuse)
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
