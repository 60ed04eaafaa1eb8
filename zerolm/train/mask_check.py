"""A test before the first step: do tokens of one document move the losses of another?

With --document_mask they must not. Whether they do is up to the model's class, the attention
kernel, transformers and torch together, and a kernel that takes no notice of the mask says nothing:
the loss even looks better. So it is tried out on the engine that will train, on every rank: rows of
two documents, once more with other tokens in the first, and the losses of the second compared.
"""

from typing import Any

import torch
from torch import distributed as dist

from zerolm.common.errors import ConfigError
from zerolm.distributed.collectives import gather_objects
from zerolm.model.architecture import ROUTED_EXPERT
from zerolm.model.loss import token_losses
from zerolm.plan.plan import Plan

# Of what the losses move by without a mask, what they may move by with it. Where documents are kept
# apart they do not move by a bit: a masked weight is 0, and the sums are of the same shape. One
# layer of 16 that takes no notice of the mask moves them by a quarter.
TOLERANCE = 1e-3
# In a mixture of experts other tokens change how many an expert is given, and so the order of sums.
# Chosen, not measured: float32 rounds by 1e-7, while 16-bit logits of about 1 are 2^-8 apart.
TOLERANCES_OF_EXPERTS = {"fp32": 1e-3, "bf16": 0.1, "fp16": 0.1}


def check(engine: Any, plan: Plan, device: Any) -> str:
    """Try the document mask out. Every rank must call, and the engine is in training mode after.

    Returns:
        What to say about it.

    Raises:
        ConfigError: on every rank: the documents are not kept apart on one of them.
    """
    kernel = getattr(engine, "module", engine).config._attn_implementation
    if plan.settings.seq_len < 2:
        return f"documents are kept apart by {kernel}: not tested, a row is one token"
    vocab_size = plan.model.config.get_text_config().vocab_size
    batch, changed = _rows(
        plan.settings.micro_batch_size, plan.settings.seq_len, vocab_size, device
    )
    engine.eval()
    moved = _everywhere(_moved(engine, batch, changed))
    keep = ("input_ids", "targets")
    bare, other = ({name: rows[name] for name in keep} for rows in (batch, changed))
    free = _everywhere(_moved(engine, bare, other))  # that they can move is what makes it a test
    engine.train()
    limit = _limit(engine, plan)
    problems = [
        f"--document_mask: with {kernel} the losses of a document move by {with_mask:.1e} when "
        f"another one in its row changes ({without:.1e} without a mask) on rank {rank}: the "
        f"documents are not kept apart. Use another --attn_implementation, or remove the flag."
        for rank, (with_mask, without) in enumerate(zip(moved, free, strict=True))
        if with_mask and not with_mask <= limit * without  # NaN too
    ]
    if problems:
        raise ConfigError(problems)
    if not all(free):
        return (
            f"documents are kept apart by {kernel}: not tested, the model as it was initialised "
            f"gives every token the same loss whatever stands before it"
        )
    much = max(moved)
    how = f"to {much:.1e} of {max(free):.1e} without a mask" if much else "in every bit"
    return f"documents are kept apart by {kernel}: {how}"


def _limit(engine: Any, plan: Plan) -> float:
    """Return the share of the unmasked movement that is rounding and not a leak."""
    names = (name for name, _ in getattr(engine, "module", engine).named_parameters())
    if any(ROUTED_EXPERT.search(name) for name in names):
        return TOLERANCES_OF_EXPERTS[plan.profile.compute_precision]
    return TOLERANCE


def _rows(
    count: int, seq_len: int, vocab_size: int, device: Any
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return rows of two documents of random tokens, and others that differ in the first."""
    generator = torch.Generator().manual_seed(0)
    shape, first = (count, seq_len), seq_len // 2
    ids = torch.randint(0, vocab_size, shape, generator=generator)
    shift = torch.randint(1, max(2, vocab_size), shape, generator=generator)
    others = torch.where(torch.arange(seq_len) < first, (ids + shift) % vocab_size, ids)
    place = torch.arange(seq_len)
    shared = {
        "targets": torch.randint(0, vocab_size, shape, generator=generator),
        "document_ids": (place >= first).long().expand(shape),
        "position_ids": torch.where(place < first, place, place - first).expand(shape),
    }
    shared = {name: value.contiguous().to(device) for name, value in shared.items()}
    one, two = ({"input_ids": each.to(device), **shared} for each in (ids, others))
    return one, two


def _moved(engine: Any, batch: dict[str, torch.Tensor], changed: dict[str, torch.Tensor]) -> float:
    """Return the root mean square of what the second documents' losses move by."""
    second = batch["input_ids"].shape[1] // 2
    with torch.no_grad():
        before = token_losses(engine, batch)[0][:, second:].double()
        after = token_losses(engine, changed)[0][:, second:].double()
    return float((after - before).pow(2).mean().sqrt())


def _everywhere(value: float) -> list[float]:
    return gather_objects(value) if dist.is_initialized() else [value]
