"""Validation loss on all ranks, under every ZeRO stage; the same for every world size."""

import math
from collections.abc import Iterable, Sequence

import torch

from zerolm.distributed.collectives import sum_over_ranks
from zerolm.engine.protocol import Model
from zerolm.model.compile import eager
from zerolm.model.loss import bits_per_byte, sums_by_source, token_losses

# Where a quarter of the window starts, as a share of the positions at which it can.
QUARTERS = {"first": 0.0, "middle": 0.5, "last": 1.0}


def validation_loss(
    engine: Model,
    batches: Iterable[dict[str, torch.Tensor]],
    source_names: Sequence[str],
    token_bytes: torch.Tensor | None = None,
    *,
    by_position: bool = False,
) -> dict[str, float]:
    """Return loss and bits per byte on validation data, in total and by source.

    Every rank must call this.

    Args:
        engine: a DeepSpeed engine, or a model in a single process; in training mode afterwards.
        batches: this rank's micro-batches on the engine's device. Every rank must have the same
            number of them, because ZeRO-3 gathers weights in each forward pass.
        token_bytes: bytes of text in each token, for `sums_by_source`; None if not known.
        by_position: also return the losses of three quarters of the window.

    Returns:
        `eval/loss`, `eval/perplexity` and `eval/bits_per_byte`, and `eval/<source>/loss` and
        `eval/<source>/bits_per_byte` if there are several sources. By position, also
        `eval/loss_at_first_quarter` and so on.
    """
    num_sums = 2 if token_bytes is None else 4
    sums = torch.zeros(num_sums, len(source_names), dtype=torch.float64, device=engine.device)
    parts = QUARTERS if by_position else ()
    of_parts = torch.zeros(
        len(parts), 2, len(source_names), dtype=torch.float64, device=engine.device
    )
    engine.eval()
    with torch.no_grad(), eager():
        for batch in batches:
            losses_BT, _ = token_losses(engine, batch)
            sums += sums_by_source(losses_BT, batch, len(source_names), token_bytes)
            for number, part in enumerate(parts):
                of_parts[number] += _sums_of_quarter(part, losses_BT, batch, len(source_names))
    engine.train()
    if torch.distributed.is_initialized():
        sum_over_ranks(sums)
        if parts:
            sum_over_ranks(of_parts)
    row = _figures([sum(each) for each in sums.tolist()], "eval")
    row["eval/perplexity"] = perplexity(row["eval/loss"])
    if len(source_names) > 1:
        for name, of_source in zip(source_names, sums.T.tolist(), strict=True):
            row |= _figures(of_source, f"eval/{name}")
    for part, of_part in zip(parts, of_parts, strict=True):
        suffix = f"_at_{part}_quarter"
        row |= _figures([sum(each) for each in of_part.tolist()], "eval", suffix)
        if len(source_names) > 1:
            for name, of_source in zip(source_names, of_part.T.tolist(), strict=True):
                row |= _figures(of_source, f"eval/{name}", suffix)
    return row


def _sums_of_quarter(
    part: str, losses_BT: torch.Tensor, batch: dict[str, torch.Tensor], num_sources: int
) -> torch.Tensor:
    """Return `sums_by_source` of a quarter of the window's positions."""
    length = losses_BT.shape[1]
    size = length // 4
    start = int(QUARTERS[part] * (length - size))
    columns = slice(start, start + size)
    of_part = {"sources": batch["sources"], "targets": batch["targets"][:, columns]}
    return sums_by_source(losses_BT[:, columns], of_part, num_sources)


def _figures(sums: list[float], prefix: str, suffix: str = "") -> dict[str, float]:
    """Return the loss and the bits per byte of sums as in `sums_by_source`."""
    loss, num_tokens, *text = sums
    row = {f"{prefix}/loss{suffix}": loss / num_tokens} if num_tokens else {}
    if text and text[1]:
        row[f"{prefix}/bits_per_byte"] = bits_per_byte(*text)
    return row


def perplexity(loss: float) -> float:
    """Return exp(loss), or infinity if it overflows: a diverged run must not crash here."""
    return math.exp(loss) if loss < 700 else math.inf
