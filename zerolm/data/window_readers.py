"""Reads the token ids of windows and packed rows from the shards of several sources.

Locates, prefetches and reads windows. Independent of the order of windows and of batches.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from zerolm.common.errors import ShardError
from zerolm.data.order import num_windows
from zerolm.data.packing import Packing
from zerolm.shards.reader import Source


class WindowReader:
    """Reads windows from several sources.

    Args:
        seq_len: number of targets in a window.

    Attributes:
        num_windows: number of windows in each source, (S,) int64.
        dtype: the smallest dtype that can store the ids of every source.
        eos_ids: EOS id of each source, (S,) int64.
    """

    def __init__(self, sources: Sequence[Source], seq_len: int):
        counts = [num_windows(source.num_tokens, seq_len) for source in sources]
        problems = [
            f"{source.directory}: {source.num_tokens} tokens are too few for one sequence: "
            f"--seq_len {seq_len} needs {seq_len + 1}. Add text, or lower --seq_len."
            for source, count in zip(sources, counts, strict=True)
            if count == 0
        ]
        if problems:
            raise ShardError(problems)
        self.seq_len = seq_len
        self.num_windows = np.array(counts, np.int64)
        self.dtype = np.result_type(*(source.dtype for source in sources))
        self.eos_ids = np.array([source.eos_id for source in sources], np.int64)
        self._smallest_vocabulary = min(source.vocab_size for source in sources)
        # The shards of all sources, concatenated so that one search finds any window's shard.
        lengths = [source.num_tokens for source in sources]
        self._source_starts = np.cumsum([0, *lengths[:-1]], dtype=np.int64)
        starts = zip(sources, self._source_starts, strict=True)
        self._shard_starts = np.concatenate(
            [source.starts[:-1] + start for source, start in starts]
        )
        self._sizes = np.concatenate([np.diff(source.starts) for source in sources])
        self.sources = list(sources)
        self.is_remote = any(source.is_remote for source in sources)
        self._reported: Counter[str] = Counter()
        num_shards = [len(source.starts) - 1 for source in sources]
        self._owners = np.repeat(np.arange(len(sources)), num_shards)  # source of each shard
        self._numbers = np.concatenate([np.arange(count) for count in num_shards])

    def locate(self, sources: np.ndarray, windows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the shard in which each window starts, and the offset in that shard.

        The arrays may have any shape; the results are int64.
        """
        assert ((windows >= 0) & (windows < self.num_windows[sources])).all(), "no such window"
        positions = windows * self.seq_len + self._source_starts[sources]
        shards = np.searchsorted(self._shard_starts, positions, side="right") - 1
        return shards, positions - self._shard_starts[shards]

    def traffic(self) -> Counter[str]:
        """Return counters of traffic with object stores and their caches since the last call."""
        if not self.is_remote:
            return self._reported
        counts: Counter[str] = Counter()
        for source in self.sources:
            if source.is_remote:
                counts += source.files.counts
        new, self._reported = counts - self._reported, counts
        return new

    def start_mirror(self) -> None:
        """Start to fetch all shards of sources that fit in their caches, in idle time."""
        for source in self.sources:
            if source.is_remote:
                source.files.start_mirror()

    def check_sizes(self) -> None:
        """Check the file sizes that were not checked at the start, in the background."""
        for source in self.sources:
            source.files.check_sizes()

    def _require_ids(self, shards: np.ndarray, starts: np.ndarray) -> None:
        """Check that the ids of windows within a shard are in their source's vocabulary."""
        for shard, start in zip(shards.tolist(), starts.tolist(), strict=True):
            files = self.sources[self._owners[shard]].files
            if not files.is_remote:
                files.require_ids(int(self._numbers[shard]), start, start + self.seq_len + 1)

    def prefetch(self, shards: np.ndarray, offsets: np.ndarray) -> list[Any]:
        """Start reading located windows.

        Returns:
            Objects that keep the blocks fetched from stores in memory as long as they exist.
        """
        wants = [source.files.wants_prefetch for source in self.sources]
        if not any(wants):
            return []
        ranges: dict[int, list[tuple[int, int, int]]] = {}
        all_shards, starts = shards.ravel(), offsets.ravel()
        stops, sizes = starts + self.seq_len + 1, self._sizes[all_shards]
        owners, numbers = self._owners[all_shards].tolist(), self._numbers[all_shards].tolist()
        ends = np.minimum(stops, sizes).tolist()
        for owner, number, start, end in zip(owners, numbers, starts.tolist(), ends, strict=True):
            if wants[owner]:
                ranges.setdefault(owner, []).append((number, start, end))
        for place in np.flatnonzero(stops > sizes).tolist():  # windows that span several shards
            source = self.sources[owners[place]]
            start = int(source.starts[numbers[place] + 1])
            if wants[owners[place]]:
                ranges[owners[place]] += source.ranges(start, start + int((stops - sizes)[place]))
        return [
            fetch
            for owner, source_ranges in ranges.items()
            for fetch in self.sources[owner].files.prefetch(source_ranges)
        ]

    def read(self, shards: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        """Read located windows and return their ids, (..., seq_len + 1) of `dtype`.

        Raises:
            ShardReadError: a block is damaged, or cannot be fetched from its store.
        """
        length = self.seq_len + 1
        tokens = np.empty((shards.size, length), self.dtype)
        all_shards, starts = shards.ravel(), offsets.ravel()
        is_inside = starts + length <= self._sizes[all_shards]
        ids = [source.files.ids for source in self.sources]
        for row, owner, number, start, inside in zip(
            tokens,
            self._owners[all_shards].tolist(),
            self._numbers[all_shards].tolist(),
            starts.tolist(),
            is_inside.tolist(),
            strict=True,
        ):
            if inside:
                row[:] = ids[owner](number, start, start + length, False)
            else:  # the window extends into the next shard
                source = self.sources[owner]
                source.read(int(source.starts[number]) + start, row)
        if tokens.size and tokens.max() >= self._smallest_vocabulary:
            self._require_ids(all_shards[is_inside], starts[is_inside])
        return tokens.reshape(*shards.shape, length)


class PackedReader:
    """Reads rows of packed documents from several sources; same interface as `WindowReader`.

    Packed sources are local, and all packing indices have the same `seq_len`.
    """

    is_remote = False

    def __init__(self, sources: Sequence[Source], packings: Sequence[Packing]):
        self.sources, self.packings = list(sources), list(packings)
        self.seq_len = packings[0].seq_len
        self.num_windows = np.array([packing.num_rows for packing in packings], np.int64)
        self.dtype = np.result_type(*(source.dtype for source in sources))
        self.eos_ids = np.array([source.eos_id for source in sources], np.int64)

    def locate(self, sources: np.ndarray, windows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the sources and rows unchanged, as arguments for `read`."""
        assert ((windows >= 0) & (windows < self.num_windows[sources])).all(), "no such row"
        return sources, windows

    def traffic(self) -> Counter[str]:
        """Return no counts, since packed sources are local."""
        return Counter()

    def start_mirror(self) -> None:
        """Do nothing, since packed sources are local."""

    def check_sizes(self) -> None:
        """Check the file sizes that were not checked at the start, in the background."""
        for source in self.sources:
            source.files.check_sizes()

    def prefetch(self, sources: np.ndarray, rows: np.ndarray) -> list[Any]:
        """Start reading rows, as `WindowReader.prefetch` does."""
        for number, row in zip(sources.ravel().tolist(), rows.ravel().tolist(), strict=True):
            if self.sources[number].files.wants_prefetch:
                for start, length in zip(*self.packings[number].pieces(row), strict=True):
                    source = self.sources[number]
                    source.files.prefetch(source.ranges(int(start), int(start + length)))
        return []

    def read(self, sources: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Read rows and return their ids, padded with EOS ids: (..., seq_len + 1) of `dtype`."""
        tokens = np.empty((rows.size, self.seq_len + 1), self.dtype)
        for out, number, row in zip(
            tokens, sources.ravel().tolist(), rows.ravel().tolist(), strict=True
        ):
            filled = 0
            starts, lengths = self.packings[number].pieces(row)
            for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
                self.sources[number].read(start, out[filled : filled + length])
                filled += length
            out[filled:] = self.eos_ids[number]
        return tokens.reshape(*rows.shape, self.seq_len + 1)
