"""Windows of token ids, read from the memory-mapped shards many at a time. Knows numpy, not torch.

A window is `seq_len` + 1 ids of one source; `zerolm.order.num_windows` says how many there are and
zerolm/order.py in which order training takes them.
"""

from collections.abc import Sequence

import numpy as np

from zerolm.errors import ShardError
from zerolm.order import num_windows
from zerolm.shards import Source


class WindowReader:
    """Reads windows of several sources.

    Args:
        sources: opened shard directories.
        seq_len: targets of a window.

    Attributes:
        num_windows: (S,) int64, of each source.
        dtype: the narrowest one that holds the ids of every source.
        eos_ids: (S,) int64.

    Raises:
        ShardError: a source too short for one window; every one is listed.
    """

    def __init__(self, sources: Sequence[Source], seq_len: int):
        counts = [num_windows(source.num_tokens, seq_len) for source in sources]
        problems = [
            f"{source.directory}: {source.num_tokens} tokens are too few for one sequence: "
            f"--seq_len {seq_len} takes {seq_len + 1}. Add text, or lower --seq_len."
            for source, count in zip(sources, counts, strict=True)
            if count == 0
        ]
        if problems:
            raise ShardError(problems)
        self.seq_len = seq_len
        self.num_windows = np.array(counts, np.int64)
        self.dtype = np.result_type(*(source.dtype for source in sources))
        self.eos_ids = np.array([source.eos_id for source in sources], np.int64)
        # The shards of all sources laid end to end, so that one search finds any window's shard.
        lengths = [source.num_tokens for source in sources]
        self._source_starts = np.cumsum([0, *lengths[:-1]], dtype=np.int64)
        starts = zip(sources, self._source_starts, strict=True)
        self._shard_starts = np.concatenate(
            [source.starts[:-1] + start for source, start in starts]
        )
        self._shards = [
            (source, number) for source in sources for number in range(len(source.starts) - 1)
        ]

    def locate(self, sources: np.ndarray, windows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the shard in which each window starts, and where in it. Any shape, int64."""
        assert ((windows >= 0) & (windows < self.num_windows[sources])).all(), "no such window"
        positions = windows * self.seq_len + self._source_starts[sources]
        shards = np.searchsorted(self._shard_starts, positions, side="right") - 1
        return shards, positions - self._shard_starts[shards]

    def read(self, shards: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        """Return the ids of located windows, (..., seq_len + 1) of `dtype`."""
        length = self.seq_len + 1
        tokens = np.empty((shards.size, length), self.dtype)
        for row, shard, offset in zip(
            tokens, shards.ravel().tolist(), offsets.ravel().tolist(), strict=True
        ):
            source, number = self._shards[shard]
            ids = source.shard(number)[offset : offset + length]
            if len(ids) == length:
                row[:] = ids
            else:  # it goes on in the next shard
                source.read(int(source.starts[number]) + offset, row)
        return tokens.reshape(*shards.shape, length)


def number_documents(last: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return each token's place in its document, and its document's number in the row.

    Args:
        last: (M, T) bool, true at the last token of each document.

    Returns:
        (M, T) int64, twice, both counted from 0.
    """
    begins = np.empty_like(last)
    begins[:, 0] = True
    begins[:, 1:] = last[:, :-1]
    starts = np.flatnonzero(begins)
    lengths = np.diff(starts, append=last.size)
    row_of_document = starts // last.shape[1]
    first_of_row = np.searchsorted(row_of_document, np.arange(len(last)))
    numbers = np.arange(len(starts)) - first_of_row[row_of_document]
    places = np.arange(last.size) - np.repeat(starts, lengths)
    return places.reshape(last.shape), np.repeat(numbers, lengths).reshape(last.shape)


def split_evenly(total: int, available: Sequence[int]) -> list[int]:
    """Split a number into parts as even as their caps allow; the largest caps have the rest."""
    parts = [0] * len(available)
    smallest_first = sorted(range(len(available)), key=lambda index: (available[index], -index))
    for done, index in enumerate(smallest_first):
        parts[index] = min(available[index], total // (len(available) - done))
        total -= parts[index]
    return parts
