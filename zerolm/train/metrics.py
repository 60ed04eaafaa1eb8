"""Metrics about a step and its data, with one function per group of metrics."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from zerolm.data import skips
from zerolm.features.feature import StepResult
from zerolm.model.loss import bits_per_byte
from zerolm.tracking.run_log import Row


def training_row(result: StepResult, source_names: Sequence[str]) -> Row:
    """Return a step's `train/` metrics, and the loss for each source in the step's batch."""
    row = {
        "train/loss": result.loss,
        "train/perplexity": math.exp(min(result.loss, 700.0)),
        "train/grad_norm": result.grad_norm,
        "train/learning_rate": result.learning_rate,
    }
    row |= result.penalties
    sums = result.by_source
    for name, loss, tokens in zip(source_names, sums["losses"], sums["tokens"], strict=True):
        if tokens:
            row[f"data/{name}/loss"] = loss / tokens
    texts = [*zip(sums.get("text_losses", ()), sums.get("text_bytes", ()), strict=True)]
    if any(num_bytes for _, num_bytes in texts):
        nats, num_bytes = (sum(each) for each in zip(*texts, strict=True))
        row["train/bits_per_byte"] = bits_per_byte(nats, num_bytes)
    for name, (nats, num_bytes) in zip(source_names, texts, strict=False):
        if num_bytes:
            row[f"data/{name}/bits_per_byte"] = bits_per_byte(nats, num_bytes)
    return row


def data_row(
    order: Any,
    source_names: Sequence[str],
    position: int,
    seq_len: int,
    skipped_windows: skips.SkippedRanges = (),
) -> Row:
    """Return, for each source, how many tokens and epochs the run has trained on.

    Args:
        position: number of sequences consumed so far.
        skipped_windows: ranges of sequences in the data order that rollbacks skip.
    """
    row: Row = {}
    if len(order.starts) > 1:
        row["data/stage"] = 1 + order.blend_of(last_sequence(position, skipped_windows))
    drawn = skips.source_counts(order, position, skipped_windows).tolist()
    for name, sequences, windows in zip(
        source_names, drawn, order.num_windows.tolist(), strict=True
    ):
        row[f"data/{name}/tokens"] = sequences * seq_len
        row[f"data/{name}/epochs"] = sequences / windows
    return row


def store_row(traffic: Counter[str]) -> Row:
    """Return metrics about reads from object stores and the cache; {} for local data.

    Args:
        traffic: counts from a `WindowStream`.
    """
    blocks = traffic["hits"] + traffic["fetched"]
    if not blocks:
        return {}
    return {
        "data/store_bytes": traffic["bytes"],
        "data/store_repeats": traffic["repeated"],
        "data/cache_hits": traffic["hits"] / blocks,
    }


def last_sequence(position: int, skipped_windows: skips.SkippedRanges) -> int:
    """Return the index in the data order of the last sequence consumed by a run at `position`."""
    return skips.sequence_range(0, position, skipped_windows)[1] - 1 if position else 0
