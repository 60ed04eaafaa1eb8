"""Windows of token ids become micro-batches. Knows nothing of the order that they come in.

A window is `seq_len` + 1 ids of one source: cut from all of its text, or the documents that a line
of its packing names, filled up with EOS ids. `zerolm.packing.num_rows` says how many there are, a
subclass of `WindowStream` which ones come when (zerolm/data.py has two).

Legend: C micro-batches, M rows of each, T tokens of a row (`seq_len`).
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from zerolm.errors import ShardError
from zerolm.faults import fault_point
from zerolm.loss import IGNORED
from zerolm.order import num_windows
from zerolm.packing import Packing, open_packing
from zerolm.settings import BEST_FIT, CONCAT
from zerolm.shards import Source

PLACED_SEQUENCES = 8192  # found at once, which takes the cost of one from 30 us to 0.2 us
# Asked for ahead of their use where shards are in a store: most requests are for one block, so
# that these are 32 MiB in memory. Not so many groups that cached ones are looked up for nothing.
AHEAD_REQUESTS, AHEAD_GROUPS = 512, 32
READ_BYTES = 1 << 18  # read at once in the training process: a few micro-batches, still in cache

Batch = dict[str, torch.Tensor]


class Rows(NamedTuple):
    """Where micro-batches lie, (C, M) int64 each."""

    sequence_ids: np.ndarray  # -1: fills up, has no loss
    sources: np.ndarray
    windows: np.ndarray


class Located(NamedTuple):
    """Where micro-batches that are read at once lie, (C, M) int64 each."""

    shards: np.ndarray
    offsets: np.ndarray
    sequence_ids: np.ndarray
    sources: np.ndarray


class Tokens(NamedTuple):
    """What micro-batches hold, as read from the shards and as sent by loader workers."""

    tokens: np.ndarray  # (C, M, T + 1), in the dtype of the shards
    sequence_ids: np.ndarray  # (C, M) int64
    sources: np.ndarray  # (C, M) int64


class WindowStream(IterableDataset):
    """What training and validation share: rows become batches. A subclass says which rows.

    Yields one micro-batch at a time, a dict of

        input_ids     (M, T) int64
        targets       (M, T) int64: the token after each input, -100 where there is no loss
        sources       (M,) int64: index of each row's source
        sequence_ids  (M,) int64
        position_ids  (M, T) int64, only with document_mask: restarts at 0 with each document
        document_ids  (M, T) int64, only with document_mask: numbers a row's documents from 0

    A document ends with the EOS id of its source. With document_mask, and in a packed row, that id
    has no target, since what follows is another document. So has what fills a packed row up, which
    is EOS ids, each a document of its own. The tensors are contiguous and share no memory.
    """

    reads_on = False  # until everything was read, and again: whole shards pay

    def __init__(
        self,
        sources: Sequence[Source],
        *,
        seq_len: int,
        micro_batch_size: int,
        rank: int,
        world_size: int,
        document_mask: bool,
        packing: str = CONCAT,
    ):
        assert seq_len > 0 and micro_batch_size > 0 and 0 <= rank < world_size
        self.packed = packing == BEST_FIT
        self.reader: WindowReader | PackedReader = (
            PackedReader(sources, [open_packing(source, seq_len) for source in sources])
            if self.packed
            else WindowReader(sources, seq_len)
        )
        self.micro_batch_size = micro_batch_size
        self.rank, self.world_size = rank, world_size
        self.document_mask = document_mask

    def starts(self) -> Iterator[int]:
        """Yield the first sequence number of each micro-batch of this rank."""
        raise NotImplementedError

    def place(self, sequence_ids: np.ndarray) -> Rows:
        """Find rows by their sequence numbers, (C, M) int64."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[Batch]:
        worker = get_worker_info()
        # In a plain DataLoader, whose workers are asked in turn for one micro-batch each.
        return self.batches(self.reads(1) if worker else self.reads(self.fitting(READ_BYTES)))

    def fitting(self, size_bytes: int) -> int:
        """Return how many micro-batches fit a size, at least one."""
        row_bytes = (self.reader.seq_len + 1) * self.reader.dtype.itemsize
        return max(1, size_bytes // (row_bytes * self.micro_batch_size))

    def reads(self, group: int) -> Iterator[Tokens]:
        """Yield the tokens of `group` micro-batches (C) at a time, of fewer at the end.

        Worker w of k yields groups w, w + k, w + 2k, ..., so that a loader that asks its workers
        in turn has all of them in order.
        """
        located = self._located(group)
        if isinstance(self.reader, WindowReader) and self.reader.is_remote:
            located = self._ahead(located, self.reader)
        for shards, offsets, sequence_ids, sources in located:
            yield Tokens(self.reader.read(shards, offsets), sequence_ids, sources)

    def _ahead(self, located: Iterator["Located"], reader: "WindowReader") -> Iterator["Located"]:
        """Yield the same, later: what is read from stores has been asked for long before."""
        if self.reads_on:
            reader.mirror()
        waiting: deque[tuple[Located, list[Any]]] = deque()
        coming = 0
        for part in located:
            arrivals = reader.expect(part.shards, part.offsets)
            waiting.append((part, arrivals))
            coming += len(arrivals)
            while coming > AHEAD_REQUESTS or len(waiting) > AHEAD_GROUPS:
                part, arrivals = waiting.popleft()
                coming -= len(arrivals)
                yield part
        while waiting:
            part, arrivals = waiting.popleft()  # held while the part is read
            yield part

    def _located(self, group: int) -> Iterator["Located"]:
        worker = get_worker_info()
        num_placed = group * max(1, PLACED_SEQUENCES // (group * self.micro_batch_size))
        starts: list[int] = []
        for number, start in enumerate(self.starts()):
            if worker and number // group % worker.num_workers != worker.id:
                continue
            starts.append(start)
            if len(starts) == num_placed:
                yield from self._locate(starts, group)
                starts = []
        if starts:
            yield from self._locate(starts, group)

    def _locate(self, starts: list[int], group: int) -> Iterator["Located"]:
        fault_point("loader.read", starts[0])
        rows = self.place(np.array(starts)[:, None] + np.arange(self.micro_batch_size))
        shards, offsets = self.reader.locate(rows.sources, rows.windows)
        for first in range(0, len(starts), group):
            part = slice(first, first + group)
            yield Located(shards[part], offsets[part], rows.sequence_ids[part], rows.sources[part])

    def batches(self, reads: Iterable[Tokens], pin_memory: bool = False) -> Iterator[Batch]:
        """Yield the batches of micro-batches that were read, here or by a worker."""
        for read in reads:
            for tokens, sequence_ids, sources in zip(*read, strict=True):
                yield self._batch(tokens, sequence_ids, sources, pin_memory)

    def _batch(
        self, tokens: np.ndarray, sequence_ids: np.ndarray, sources: np.ndarray, pin_memory: bool
    ) -> Batch:
        make = _pinned_copy if pin_memory else _copy
        batch = {
            "input_ids": make(tokens[:, :-1]),
            "targets": make(tokens[:, 1:]),
            "sources": make(sources),
            "sequence_ids": make(sequence_ids),
        }
        if self.document_mask or self.packed:
            last = tokens[:, :-1] == self.reader.eos_ids[sources][:, None]
            batch["targets"].numpy()[last] = IGNORED
        if self.document_mask:
            places, documents = number_documents(last)
            batch["position_ids"] = make(places)
            batch["document_ids"] = make(documents)
        if sequence_ids[-1] < 0:  # rows that fill up come last
            batch["targets"][batch["sequence_ids"] < 0] = IGNORED
        return batch


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
        self._sizes = np.concatenate([np.diff(source.starts) for source in sources]).tolist()
        self._shards = [
            (source, number) for source in sources for number in range(len(source.starts) - 1)
        ]

    def locate(self, sources: np.ndarray, windows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the shard in which each window starts, and where in it. Any shape, int64."""
        assert ((windows >= 0) & (windows < self.num_windows[sources])).all(), "no such window"
        positions = windows * self.seq_len + self._source_starts[sources]
        shards = np.searchsorted(self._shard_starts, positions, side="right") - 1
        return shards, positions - self._shard_starts[shards]

    @property
    def is_remote(self) -> bool:
        """Whether anything is read from a store."""
        return any(source.is_remote for source, _ in self._shards)

    def mirror(self) -> None:
        """Have whole shards fetched in idle times, of sources whose cache has room for all."""
        for source in {id(source): source for source, _ in self._shards}.values():
            if source.is_remote:
                source.files.mirror()

    def expect(self, shards: np.ndarray, offsets: np.ndarray) -> list[Any]:
        """Begin to fetch located windows from stores; what is returned keeps them in memory."""
        wanted: dict[int, tuple[Source, list[tuple[int, int, int]]]] = {}
        for shard, offset in zip(shards.ravel().tolist(), offsets.ravel().tolist(), strict=True):
            stop = offset + self.seq_len + 1
            while stop > 0:  # a window may go on in the next shards
                source, number = self._shards[shard]
                size = int(source.starts[number + 1] - source.starts[number])
                if source.is_remote:
                    ranges = wanted.setdefault(id(source), (source, []))[1]
                    ranges.append((number, offset, min(stop, size)))
                offset, stop, shard = 0, stop - size, shard + 1
        return [
            arrival for source, ranges in wanted.values() for arrival in source.files.expect(ranges)
        ]

    def read(self, shards: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        """Return the ids of located windows, (..., seq_len + 1) of `dtype`.

        Raises:
            ShardReadError: some are damaged, or a store does not give them.
        """
        length = self.seq_len + 1
        tokens = np.empty((shards.size, length), self.dtype)
        for row, shard, offset in zip(
            tokens, shards.ravel().tolist(), offsets.ravel().tolist(), strict=True
        ):
            source, number = self._shards[shard]
            if offset + length <= self._sizes[shard]:
                row[:] = source.files.ids(number, offset, offset + length)
            else:  # it goes on in the next shard
                source.read(int(source.starts[number]) + offset, row)
        return tokens.reshape(*shards.shape, length)


class PackedReader:
    """Reads rows of packed documents of several sources; the same face as `WindowReader`.

    Args:
        sources: opened shard directories.
        packings: the index of each, all of one `seq_len`.
    """

    def __init__(self, sources: Sequence[Source], packings: Sequence[Packing]):
        self.sources, self.packings = list(sources), list(packings)
        self.seq_len = packings[0].seq_len
        self.num_windows = np.array([packing.num_rows for packing in packings], np.int64)
        self.dtype = np.result_type(*(source.dtype for source in sources))
        self.eos_ids = np.array([source.eos_id for source in sources], np.int64)

    def locate(self, sources: np.ndarray, windows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return what `read` takes. Any shape, int64."""
        assert ((windows >= 0) & (windows < self.num_windows[sources])).all(), "no such row"
        return sources, windows

    def read(self, sources: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Return the ids of rows, (..., seq_len + 1) of `dtype`, filled up with EOS ids."""
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


def _copy(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.int64))


def _pinned_copy(values: np.ndarray) -> torch.Tensor:
    tensor = torch.empty(values.shape, dtype=torch.int64, pin_memory=True)
    tensor.numpy()[...] = values
    return tensor
