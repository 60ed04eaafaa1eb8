"""Tests, before the first step, that a document has the same losses in a shared row as alone.

That depends on the combination of model class, attention kernel, transformers and torch. A kernel
that ignores the mask raises no error, and the loss even looks better. So every rank tests the
engine that will train: rows of two documents run twice, with different tokens in the first
document, and the losses of the second document must not change. Then the second document runs at
the start of a row, with the model's own mask and positions: its losses must be the same again.
"""

from typing import Any

import torch
from torch import distributed as dist

from zerolm.common.errors import ConfigError
from zerolm.config.resolved import Resolved
from zerolm.distributed.collectives import gather_objects
from zerolm.engine.protocol import Model
from zerolm.model.architecture import ROUTED_EXPERT
from zerolm.model.compile import eager
from zerolm.model.loss import token_losses

# Largest loss change allowed with the mask, as a fraction of the change without it. With a correct
# mask the losses are bit-identical, since a masked weight is 0 and sums keep their shape. If one
# layer of 16 ignores the mask, the fraction is a quarter.
TOLERANCE = 1e-3
# In a mixture of experts, different tokens change an expert's token count, and so the order of
# sums. Chosen, not measured: float32 rounds by 1e-7; 16-bit logits of about 1 are 2^-8 apart.
MOE_TOLERANCES = {"fp32": 1e-3, "bf16": 0.1, "fp16": 0.1}

# Largest difference allowed between the losses of a document in a shared row and alone, as a
# fraction of their standard deviation. Measured on a CPU with torch 2.13 (2026-11-22): 0 in rows of
# 32 tokens for 84 of 86 families (not BLT and Doge), at most 1.5e-6 in fp32 and 0.016 in bf16 for a
# Llama in rows of 1,000 and 1,537 tokens, and 0.77 for RoBERTa with positions from 0.
ALONE_TOLERANCES = {"fp32": 1e-2, "bf16": 0.25, "fp16": 0.25}


def check(engine: Model, settings: Resolved, precision: str, device: Any) -> str:
    """Test the document mask; return a line that describes the result. Every rank must call this.

    The engine is in training mode afterwards.

    Args:
        precision: the model's compute precision, a key of `ALONE_TOLERANCES`.

    Raises:
        ConfigError: on every rank: on at least one, the mask does not separate documents.
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
    with eager():  # compiling is not worth it: training always uses the mask
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
    """Return the largest fraction of the unmasked change that counts as rounding."""
    names = (name for name, _ in _model(engine).named_parameters())
    if any(ROUTED_EXPERT.search(name) for name in names):
        return MOE_TOLERANCES[precision]
    return TOLERANCE


def _rows(
    count: int, seq_len: int, vocab_size: int, device: Any
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return rows of two random documents, and the same rows with another first document."""
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
    """Return the root mean square of the change in the second documents' losses."""
    second = batch["input_ids"].shape[1] // 2
    with torch.no_grad():
        before = token_losses(engine, batch)[0][:, second:].double()
        after = token_losses(engine, changed)[0][:, second:].double()
    return float((after - before).pow(2).mean().sqrt())


def _difference_alone(engine: Model, batch: dict[str, torch.Tensor]) -> float:
    """Return the difference of the second documents' losses from those at the start of a row.

    At the start of a row, they precede the first documents and have no document ids or positions.

    Returns:
        The root mean square, as a fraction of the standard deviation of the losses.
    """
    second = batch["input_ids"].shape[1] // 2
    swapped = {name: batch[name].roll(-second, dims=1) for name in ("input_ids", "targets")}
    with torch.no_grad():
        in_row = token_losses(engine, batch)[0][:, second:].double()
        alone = token_losses(engine, swapped)[0][:, : in_row.shape[1]].double()
    return float((in_row - alone).pow(2).mean().sqrt() / alone.std().clamp(min=1e-6))


def _gather(value: float) -> list[float]:
    return gather_objects(value) if dist.is_initialized() else [value]
