"""Windows of token ids become micro-batches. Knows nothing of the order that they come in.

A window is `seq_len` + 1 ids of one source: cut from all of its text, or the documents that a line
of its packing names, filled up with EOS ids. `zerolm.packing.num_rows` says how many there are, a
subclass of `WindowStream` which ones come when (zerolm/data.py has two).

Legend: C micro-batches, M rows of each, T tokens of a row (`seq_len`).
"""

import itertools
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from zerolm.faults import fault_point
from zerolm.loss import IGNORED
from zerolm.packing import open_packing
from zerolm.settings import BEST_FIT, CONCAT
from zerolm.shards import Source
from zerolm.window_readers import PackedReader, WindowReader

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
    traffic: Counter[str]  # with stores, since this process sent the ones before


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
        self.traffic: Counter[str] = Counter()  # with stores, of this process and its workers

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
        if get_worker_info() is None:
            located = _first_alone(located)
        for shards, offsets, sequence_ids, sources in self._ahead(located):
            tokens = self.reader.read(shards, offsets)
            yield Tokens(tokens, sequence_ids, sources, self.reader.traffic())

    def _ahead(self, located: Iterator["Located"]) -> Iterator["Located"]:
        """Yield the same, later: what is not in memory has been asked for long before."""
        reader = self.reader
        if self.reads_on:
            reader.mirror()
        waiting: deque[tuple[Located, list[Any]]] = deque()
        coming = 0
        # Disks answer at once: the first batch does not wait until more has been asked for.
        groups = AHEAD_GROUPS if reader.is_remote else 0
        for part in located:
            arrivals = reader.expect(part.shards, part.offsets)
            waiting.append((part, arrivals))
            coming += len(arrivals)
            while coming > AHEAD_REQUESTS or len(waiting) > groups:
                part, arrivals = waiting.popleft()
                coming -= len(arrivals)
                groups = min(groups + 1, AHEAD_GROUPS)
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
        for *read, traffic in reads:
            if traffic:
                self.traffic += traffic
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


def _first_alone(located: Iterator[Located]) -> Iterator[Located]:
    """Yield the same, the first micro-batch by itself: nothing waits for those that come after."""
    for part in itertools.islice(located, 1):
        yield Located(*(each[:1] for each in part))
        if len(part.shards) > 1:
            yield Located(*(each[1:] for each in part))
    yield from located


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
