"""Needles: a random key and value in validation text, whose value must be found by its key.

An item is a window of validation text with a key and, after it, its value, at some depth, and the
key once more at the end: the value is scored as its continuation. Both are random token ids of the
text, so only the context can predict the value. Works on ids; must not depend on a tokenizer.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from zerolm.data.loader import ValidationStream
from zerolm.evaluate.likelihood import Ranks, Row, log_likelihoods
from zerolm.shards.reader import Source

DEPTHS = (10, 50, 90)  # of the text before the key, in percent
NUM_IDS = 4  # of a key, and of a value


def rows(windows: Iterable[Sequence[int]], excluded: Iterable[int]) -> list[Row]:
    """Return the items of some windows: one for each depth, with the same key and value.

    Args:
        windows: token ids.
        excluded: ids that are in no key or value.
    """
    texts = [list(window) for window in windows]
    candidates = np.setdiff1d(np.concatenate(texts), list(excluded))
    items = []
    for number, text in enumerate(texts):
        key, value = np.random.default_rng(number).choice(candidates, (2, NUM_IDS)).tolist()
        room = len(text) - 4 * NUM_IDS
        for depth in DEPTHS:
            at = room * depth // 100
            ids = [*text[:at], *key, *value, *text[at:room], *key, *value]
            items.append(Row(ids, NUM_IDS))
    return items


def figures(
    model: Any,
    sources: Sequence[Source],
    *,
    num_items: int,
    seq_len: int,
    packing: str,
    device: Any,
    batch_tokens: int,
    ranks: Ranks,
    tick: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """Return accuracy and loss of the values, in total and by depth. Every rank must call this.

    Args:
        model: a causal LM or a DeepSpeed engine around one, in evaluation mode.
        sources: validation sources, whose first windows are used.
        num_items: windows, each of them at every depth; fewer if there are not as many.
    """
    stream = ValidationStream(
        sources,
        seq_len=seq_len,
        num_sequences=num_items,
        micro_batch_size=1,
        rank=0,
        world_size=1,
        packing=packing,
    )
    items = rows(
        (batch["input_ids"][0].tolist() for batch in stream), {source.eos_id for source in sources}
    )
    likelihoods, found = log_likelihoods(
        model,
        items,
        device=device,
        batch_tokens=batch_tokens,
        max_length=seq_len,
        ranks=ranks,
        tick=tick,
    )
    losses = (-likelihoods / NUM_IDS).reshape(-1, len(DEPTHS))
    hits = found.double().reshape(-1, len(DEPTHS))
    row = {"eval/needle/acc": float(hits.mean()), "eval/needle/loss": float(losses.mean())}
    for depth, hit, loss in zip(
        DEPTHS, hits.mean(0).tolist(), losses.mean(0).tolist(), strict=True
    ):
        row |= {f"eval/needle/acc_at_{depth}": hit, f"eval/needle/loss_at_{depth}": loss}
    return row
