"""Tests before the first step that a document's losses do not depend on the rest of its row.

Whether they do depends on the combination of model class, attention kernel, and transformers and
torch versions. A kernel that ignores the mask raises no error and even appears to lower the loss.
So every rank tests the engine that will train: rows of two documents are evaluated twice, with
different tokens in the first document, and the losses of the second document must not change. Then
the second document is evaluated at the start of a row, with the model's own mask and positions, and
its losses must still be the same.
"""

from typing import Any

import torch
from torch import distributed as dist

from zerolm.common.errors import ConfigError
from zerolm.config.settings import Settings
from zerolm.distributed.collectives import gather_objects
from zerolm.engine.protocol import Model
from zerolm.model.architecture import ROUTED_EXPERT
from zerolm.model.compile import eager
from zerolm.model.forward import on_every_stage, token_losses

# Largest loss change allowed with the mask, as a fraction of the change without it. With a correct
# mask the losses are bit-identical, since masked attention weights are 0 and the shapes of the sums
# do not change. If one layer of 16 ignores the mask, the fraction is a quarter.
TOLERANCE = 1e-3
# In a mixture of experts, other tokens change the number of tokens per expert, and so the order of
# summation. These limits were not measured: the relative rounding error of float32 is about 1e-7,
# and adjacent bf16 values near 1 differ by 2^-8.
MOE_TOLERANCES = {"fp32": 1e-3, "bf16": 0.1, "fp16": 0.1}

# Largest allowed difference between a document's losses in a shared row and alone, as a fraction of
# the losses' standard deviation. Measured on a CPU with torch 2.13 (2026-11-22): 0 in rows of 32
# tokens for 84 of 86 families (not BLT and Doge), at most 1.5e-6 in fp32 and 0.016 in bf16 for a
# Llama in rows of 1,000 and 1,537 tokens, and 0.77 for RoBERTa with positions from 0.
ALONE_TOLERANCES = {"fp32": 1e-2, "bf16": 0.25, "fp16": 0.25}


def check(engine: Model, settings: Settings, precision: str, device: Any) -> str:
    """Test the document mask and return a line that describes the result.

    Every rank must call this.

    The engine is in training mode afterwards.

    Args:
        precision: the model's compute precision, a key of `ALONE_TOLERANCES`.

    Raises:
        ConfigError: on every rank, if the mask does not separate documents on at least one.
    """
    config = _model(engine).config
    kernel = config._attn_implementation
    if settings.seq_len < 2:
        return f"documents are kept apart by {kernel}: not tested, because a row is one token"
    vocab_size = config.get_text_config().vocab_size
    batch, changed = _rows(settings.micro_batch_size, settings.seq_len, vocab_size, device)
    engine.eval()
    masked = _gather(_loss_change(engine, batch, changed))
    keep = ("input_ids", "targets")
    plain, plain_changed = ({name: rows[name] for name in keep} for rows in (batch, changed))
    with eager():  # not worth compiling: training always uses the mask
        unmasked = _gather(_loss_change(engine, plain, plain_changed))  # 0: cannot be compared
        alone = _gather(_difference_alone(engine, batch))
    engine.train()
    limit, limit_alone = _limit(engine, precision), ALONE_TOLERANCES[precision]
    problems = [
        f"--document_mask: with {kernel} the losses of a document in a row differ from those of "
        f"the same document alone by {difference:.1e} of their standard deviation on rank {rank}: "
        "in a row, the model uses other positions or another mask. Use another "
        "--attn_implementation, or remove the flag."
        for rank, difference in enumerate(alone)
        if not difference <= limit_alone
    ]
    problems += [
        f"--document_mask: with {kernel} the losses of a document change by {with_mask:.1e} when "
        f"another document in its row changes ({without:.1e} without a mask) on rank {rank}: the "
        "documents are not kept apart. Use another --attn_implementation, or remove the flag."
        for rank, (with_mask, without) in enumerate(zip(masked, unmasked, strict=True))
        if with_mask and not with_mask <= limit * without  # also true for NaN
    ]
    if problems:
        raise ConfigError(problems)
    if not all(unmasked):
        return (
            f"documents are kept apart by {kernel}: not tested, because the loss of a token in the "
            "initialised model does not depend on the tokens before it"
        )
    if not any(masked):
        return f"documents are kept apart by {kernel}: losses are bit-identical"
    return (
        f"documents are kept apart by {kernel}: losses change by {max(masked):.1e} with the mask, "
        f"and by {max(unmasked):.1e} without it"
    )


def _model(engine: Model) -> Any:
    return getattr(engine, "module", engine)


def _limit(engine: Model, precision: str) -> float:
    """Return the largest fraction of the unmasked loss change that counts as rounding error."""
    names = (name for name, _ in _model(engine).named_parameters())
    if any(ROUTED_EXPERT.search(name) for name in names):
        return MOE_TOLERANCES[precision]
    return TOLERANCE


def _rows(
    count: int, seq_len: int, vocab_size: int, device: Any
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return two batches of two random documents per row that differ in the first documents."""
    generator = torch.Generator().manual_seed(0)
    shape, first = (count, seq_len), seq_len // 2
    ids = torch.randint(0, vocab_size, shape, generator=generator)
    shift = torch.randint(1, max(2, vocab_size), shape, generator=generator)
    others = torch.where(torch.arange(seq_len) < first, (ids + shift) % vocab_size, ids)
    positions = torch.arange(seq_len)
    starts = torch.tensor([[row * seq_len, row * seq_len + first] for row in range(count)])
    boundaries = torch.cat([starts.flatten(), torch.tensor([count * seq_len])])
    shared = {
        "targets": torch.randint(0, vocab_size, shape, generator=generator),
        "boundaries": boundaries.int(),
        "document_ids": (positions >= first).long().expand(shape),
        "position_ids": torch.where(positions < first, positions, positions - first).expand(shape),
    }
    shared = {name: value.contiguous().to(device) for name, value in shared.items()}
    batch, changed = ({"input_ids": each.to(device), **shared} for each in (ids, others))
    return batch, changed


def _loss_change(
    engine: Model, batch: dict[str, torch.Tensor], changed: dict[str, torch.Tensor]
) -> float:
    """Return the root mean square difference of the second documents' losses in two batches."""
    second = batch["input_ids"].shape[1] // 2
    with torch.no_grad():
        before = _losses(engine, batch)[:, second:].double()
        after = _losses(engine, changed)[:, second:].double()
    return float((after - before).pow(2).mean().sqrt())


def _difference_alone(engine: Model, batch: dict[str, torch.Tensor]) -> float:
    """Return how much the second documents' losses change if these documents begin the rows.

    The two documents of each row are swapped, and no document ids or positions are passed.

    Returns:
        The root mean square of the differences, as a fraction of the standard deviation of the
        losses.
    """
    second = batch["input_ids"].shape[1] // 2
    swapped = {name: batch[name].roll(-second, dims=1) for name in ("input_ids", "targets")}
    with torch.no_grad():
        in_row = _losses(engine, batch)[:, second:].double()
        alone = _losses(engine, swapped)[:, : in_row.shape[1]].double()
    return float((in_row - alone).pow(2).mean().sqrt() / alone.std().clamp(min=1e-6))


def _losses(engine: Model, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return on_every_stage(engine, token_losses(engine, batch)[0].contiguous())


def _gather(value: float) -> list[float]:
    return gather_objects(value) if dist.is_initialized() else [value]
