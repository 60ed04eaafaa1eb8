"""Validation loss on all ranks, under every ZeRO stage; the same for every world size."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from zerolm.distributed.collectives import sum_over_ranks
from zerolm.model.compile import eager
from zerolm.model.loss import bits_per_byte, sums_by_source, token_losses


def validation_loss(
    engine: Any,
    batches: Iterable[dict[str, torch.Tensor]],
    source_names: Sequence[str],
    token_bytes: torch.Tensor | None = None,
) -> dict[str, float]:
    """Return loss and bits per byte on validation data, in total and by source.

    Every rank must call.

    Args:
        engine: a DeepSpeed engine, or a model in a single process; in training mode afterwards.
        batches: this rank's micro-batches on the engine's device. Every rank must have the same
            number of them, because ZeRO-3 gathers weights in each forward pass.
        token_bytes: bytes of text in each token, for `sums_by_source`; None if not known.

    Returns:
        `eval/loss`, `eval/perplexity` and `eval/bits_per_byte`, and `eval/<source>/loss` and
        `eval/<source>/bits_per_byte` if there are several sources.
    """
    num_sums = 2 if token_bytes is None else 4
    sums = torch.zeros(num_sums, len(source_names), dtype=torch.float64, device=engine.device)
    engine.eval()
    with torch.no_grad(), eager():
        for batch in batches:
            losses_BT, _ = token_losses(engine, batch)
            sums += sums_by_source(losses_BT, batch, len(source_names), token_bytes)
    engine.train()
    if torch.distributed.is_initialized():
        sum_over_ranks(sums)
    row = _figures([sum(each) for each in sums.tolist()], "eval")
    row["eval/perplexity"] = perplexity(row["eval/loss"])
    if len(source_names) > 1:
        for name, of_source in zip(source_names, sums.T.tolist(), strict=True):
            row |= _figures(of_source, f"eval/{name}")
    return row


def _figures(sums: list[float], prefix: str) -> dict[str, float]:
    """Return the loss and the bits per byte of sums as in `sums_by_source`."""
    loss, num_tokens, *text = sums
    row = {f"{prefix}/loss": loss / num_tokens} if num_tokens else {}
    if text and text[1]:
        row[f"{prefix}/bits_per_byte"] = bits_per_byte(*text)
    return row


def perplexity(loss: float) -> float:
    """Return exp(loss), or infinity if it overflows: a diverged run must not crash here."""
    return math.exp(loss) if loss < 700 else math.inf
