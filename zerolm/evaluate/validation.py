"""Validation loss on all ranks, under every ZeRO stage; the same for every world size."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from zerolm.distributed.collectives import sum_over_ranks
from zerolm.model.compile import eager
from zerolm.model.loss import sums_by_source, token_losses


def validation_loss(
    engine: Any, batches: Iterable[dict[str, torch.Tensor]], source_names: Sequence[str]
) -> dict[str, float]:
    """Return the mean loss per validation token, in total and by source. Every rank must call.

    Args:
        engine: a DeepSpeed engine; left in training mode.
        batches: this rank's micro-batches on the engine's device. Every rank must have the same
            number of them, because ZeRO-3 gathers weights in each forward pass.
        source_names: names of the source numbers in `sources`.

    Returns:
        `eval/loss`, `eval/perplexity`, and `eval/<source>/loss` if there are several sources.
    """
    sums = torch.zeros(2, len(source_names), dtype=torch.float64, device=engine.device)
    engine.eval()
    with torch.no_grad(), eager():
        for batch in batches:
            losses_BT, _ = token_losses(engine, batch)
            sums += sums_by_source(losses_BT, batch, len(source_names))
    engine.train()
    losses, tokens = sum_over_ranks(sums).tolist()
    total = sum(losses) / sum(tokens)
    row = {"eval/loss": total, "eval/perplexity": perplexity(total)}
    if len(source_names) > 1:
        row |= {
            f"eval/{name}/loss": loss / count
            for name, loss, count in zip(source_names, losses, tokens, strict=True)
            if count
        }
    return row


def perplexity(loss: float) -> float:
    """Return exp(loss), or infinity if it overflows: a diverged run must not crash here."""
    return math.exp(loss) if loss < 700 else math.inf
