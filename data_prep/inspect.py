"""Show a training window as text, with the documents that it is cut from.

Reads shards with zerolm's own reader and order, and so shows what training would see.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from zerolm.errors import ConfigError
from zerolm.order import Order, num_windows
from zerolm.shards import Source


class Part(NamedTuple):
    """The tokens of a window that belong to one document."""

    document: int  # number in the source, from 0
    start: int  # first token shown, counted inside the document
    stop: int
    length: int  # of the document, its EOS included
    token_ids: np.ndarray


def find_window(source: Source, sequence: int, seq_len: int, seed: int | None) -> tuple[int, int]:
    """Return (window, epoch) of a sequence.

    Without a seed `sequence` is the window itself; with one it is a sequence number of a run on
    this source alone, and zerolm.order says which window that is.

    Raises:
        ConfigError: a sequence that does not exist.
    """
    count = num_windows(source.num_tokens, seq_len)
    if count == 0:
        raise ConfigError(
            f"{source.directory}: {source.num_tokens} tokens are not one window of --seq_len "
            f"{seq_len}, which needs {seq_len + 1}. Choose a smaller --seq_len."
        )
    if seed is not None:
        place = Order([count], [1.0], seed)(np.array([sequence]))
        return int(place.window[0]), int(place.epoch[0])
    if sequence >= count:
        raise ConfigError(
            f"--sequence {sequence}: {source.directory} has {count:,} windows of --seq_len "
            f"{seq_len}, numbered from 0. Choose a smaller one, or give the --seed of a run."
        )
    return sequence, 0


def read_window(source: Source, window: int, seq_len: int) -> list[Part]:
    """Return the `seq_len` + 1 tokens of a window, document by document."""
    start = window * seq_len
    stop = start + seq_len + 1
    return [
        part
        for number in range(len(source.manifest["shards"]))
        for part in _parts_in_shard(source, number, start, stop)
    ]


def _parts_in_shard(source: Source, number: int, start: int, stop: int) -> Iterator[Part]:
    base = int(source.starts[number])
    start, stop = max(start - base, 0), min(stop, int(source.starts[number + 1])) - base
    if start >= stop:
        return
    before = sum(shard["num_documents"] for shard in source.manifest["shards"][:number])
    ends = source.document_ends(number).astype(np.int64)
    document = int(np.searchsorted(ends, start, side="right"))
    while start < stop:
        first = int(ends[document - 1]) if document else 0
        end = int(ends[document])
        upto = min(end, stop)
        yield Part(
            before + document,
            start - first,
            upto - first,
            end - first,
            source.shard(number)[start:upto],
        )
        start, document = upto, document + 1


def render(parts: Sequence[Part], decode: Callable[[Sequence[int]], str]) -> Iterator[str]:
    """Yield the lines that show a window."""
    for part in parts:
        whole = part.start == 0 and part.stop == part.length
        which = "whole" if whole else f"tokens {part.start:,} to {part.stop:,} of {part.length:,}"
        yield f"--- document {part.document} ({which}) ---"
        yield decode(part.token_ids.tolist())
