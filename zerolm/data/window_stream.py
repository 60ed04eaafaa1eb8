"""Turns windows of token ids into micro-batches, reading ahead. Independent of their order.

A window is `seq_len` + 1 ids of one source: a slice of its concatenated documents or, with packing,
the documents of one row, padded with EOS ids. Subclasses of `WindowStream` choose the windows and
their order: `TokenStream` for training, `ValidationStream` for validation.

Legend: C micro-batches, M rows per micro-batch, T tokens per row (`seq_len`).
"""

import itertools
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from zerolm.common.faults import fault_point
from zerolm.config.settings import BEST_FIT, CONCAT
from zerolm.data.packing import open_packing
from zerolm.data.window_readers import PackedReader, WindowReader
from zerolm.model.loss import IGNORED
from zerolm.shards.reader import Source

# Number of rows located by one call to the order; this lowers the cost per row from 30 us to 0.2
# us.
PLACED_SEQUENCES = 8192
# Read-ahead for shards in a store. Most requests are for a single block, so 512 of them take 32 MiB
# of memory. The number of groups is also limited, since cached groups need no requests but take
# time to look up.
AHEAD_REQUESTS, AHEAD_GROUPS = 512, 32
LOCAL_AHEAD_GROUPS = (
    4  # of about 50 windows each: enough to fill the disk's queue, but few to discard at the end
)
READ_BYTES = 1 << 18  # read at a time in the training process; fits in the CPU cache

Batch = dict[str, torch.Tensor]


class Rows(NamedTuple):
    """The sequence id, source and window of each row in micro-batches; (C, M) int64 each."""

    sequence_ids: np.ndarray  # -1: padding, without loss
    sources: np.ndarray
    windows: np.ndarray


class Located(NamedTuple):
    """Shard locations of the rows in micro-batches that are read together; (C, M) int64 each."""

    shards: np.ndarray
    offsets: np.ndarray
    sequence_ids: np.ndarray
    sources: np.ndarray


class Tokens(NamedTuple):
    """The tokens of micro-batches, as read from the shards and sent by loader workers."""

    tokens: np.ndarray  # (C, M, T + 1), in the dtype of the shards
    sequence_ids: np.ndarray  # (C, M) int64
    sources: np.ndarray  # (C, M) int64
    traffic: Counter[str]  # traffic with stores since this process's last message


class WindowStream(IterableDataset):
    """Base class of training and validation data: rows become batches.

    Yields one micro-batch at a time, a dict of

        input_ids     (M, T) int64
        targets       (M, T) int64: the token after each input, -100 where there is no loss
        sources       (M,) int64: index of each row's source
        sequence_ids  (M,) int64
        position_ids  (M, T) int64, only with document_mask: restarts at 0 with each document
        document_ids  (M, T) int64, only with document_mask: numbers a row's documents from 0
        boundaries    (D + 1,) int32, only with document_mask: where each of the D documents starts
                      in the concatenated rows, and the number of tokens

    A document ends with its source's EOS id. With document_mask, and in packed rows, that id has no
    target, because another document follows. The padding of a packed row has no targets either: it
    consists of EOS ids, each of which is a separate document. The tensors are contiguous and share
    no memory.
    """

    reads_all_data = False  # whether all shards are eventually read, so mirrors are worthwhile

    def __init__(
        self,
        sources: Sequence[Source],
        *,
        seq_len: int,
        micro_batch_size: int,
        shard: int,
        num_shards: int,
        document_mask: bool,
        packing: str = CONCAT,
    ):
        assert 0 <= shard < num_shards
        self.packed = packing == BEST_FIT
        self.reader: WindowReader | PackedReader = (
            PackedReader(sources, [open_packing(source, seq_len) for source in sources])
            if self.packed
            else WindowReader(sources, seq_len)
        )
        self.micro_batch_size = micro_batch_size
        self.shard, self.num_shards = shard, num_shards
        self.document_mask = document_mask
        self.traffic: Counter[str] = Counter()  # of this process and its workers with stores

    def micro_batch_starts(self) -> Iterator[int]:
        """Yield the first sequence number of each of this shard's micro-batches."""
        raise NotImplementedError

    def find_rows(self, sequence_ids: np.ndarray) -> Rows:
        """Return the rows at the given sequence numbers, (C, M) int64."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[Batch]:
        worker = get_worker_info()
        # A plain DataLoader requests one micro-batch from each worker in turn.
        group = 1 if worker else self.num_micro_batches_within(READ_BYTES)
        return self.batches(self.read_groups(group))

    def num_micro_batches_within(self, size_bytes: int) -> int:
        """Return how many micro-batches fit in a number of bytes, at least one."""
        row_bytes = (self.reader.seq_len + 1) * self.reader.dtype.itemsize
        return max(1, size_bytes // (row_bytes * self.micro_batch_size))

    def read_groups(self, group: int) -> Iterator[Tokens]:
        """Yield the tokens of `group` micro-batches at a time (C); the last group may be smaller.

        Worker w of k yields groups w, w + k, w + 2k, ..., so a loader that reads from its workers
        in turn gets all groups in order.
        """
        located = self._locate_groups(group)
        if get_worker_info() is None:
            located = _split_first(located)
        for shards, offsets, sequence_ids, sources in self._prefetched(located):
            tokens = self.reader.read(shards, offsets)
            yield Tokens(tokens, sequence_ids, sources, self.reader.traffic())

    def _prefetched(self, located: Iterator[Located]) -> Iterator[Located]:
        """Yield the given groups, and start to prefetch groups ahead of time."""
        reader = self.reader
        if self.reads_all_data:
            reader.start_mirror()
            worker = get_worker_info()
            # In one process for each rank that reads this shard: with tensor parallelism, several.
            if self.shard == 0 and (worker is None or worker.id == 0):
                reader.check_sizes()
        waiting: deque[tuple[Located, list[Any]]] = deque()
        num_requests = 0
        # Local disks respond at once, so the first batch does not have to wait for further
        # requests.
        most = AHEAD_GROUPS if reader.is_remote else LOCAL_AHEAD_GROUPS
        groups = AHEAD_GROUPS if reader.is_remote else 0
        for part in located:
            fetches = reader.prefetch(part.shards, part.offsets)
            waiting.append((part, fetches))
            num_requests += len(fetches)
            while num_requests > AHEAD_REQUESTS or len(waiting) > groups:
                part, fetches = waiting.popleft()
                num_requests -= len(fetches)
                groups = min(groups + 1, most)
                yield part
        while waiting:
            part, fetches = waiting.popleft()  # `fetches` keeps the blocks while `part` is read
            yield part

    def _locate_groups(self, group: int) -> Iterator[Located]:
        worker = get_worker_info()
        num_placed = group * max(1, PLACED_SEQUENCES // (group * self.micro_batch_size))
        starts: list[int] = []
        for number, start in enumerate(self.micro_batch_starts()):
            if worker and number // group % worker.num_workers != worker.id:
                continue
            starts.append(start)
            if len(starts) == num_placed:
                yield from self._locate(starts, group)
                starts = []
        if starts:
            yield from self._locate(starts, group)

    def _locate(self, starts: list[int], group: int) -> Iterator[Located]:
        fault_point("loader.read", starts[0])
        rows = self.find_rows(np.array(starts)[:, None] + np.arange(self.micro_batch_size))
        shards, offsets = self.reader.locate(rows.sources, rows.windows)
        for first in range(0, len(starts), group):
            part = slice(first, first + group)
            yield Located(shards[part], offsets[part], rows.sequence_ids[part], rows.sources[part])

    def batches(self, groups: Iterable[Tokens], pin_memory: bool = False) -> Iterator[Batch]:
        """Yield the batches from groups that were read in this process or a worker."""
        for *group, traffic in groups:
            if traffic:
                self.traffic += traffic
            for tokens, sequence_ids, sources in zip(*group, strict=True):
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
            is_last = tokens[:, :-1] == self.reader.eos_ids[sources][:, None]
            batch["targets"].numpy()[is_last] = IGNORED
        if self.document_mask:
            positions, documents, boundaries = number_documents(is_last)
            batch["position_ids"] = make(positions)
            batch["document_ids"] = make(documents)
            batch["boundaries"] = make(boundaries, torch.int32)
        if sequence_ids[-1] < 0:  # padding rows are last
            batch["targets"][batch["sequence_ids"] < 0] = IGNORED
        return batch


def _split_first(located: Iterator[Located]) -> Iterator[Located]:
    """Yield the given groups, but split off the first micro-batch, so it is ready sooner."""
    for part in itertools.islice(located, 1):
        yield Located(*(each[:1] for each in part))
        if len(part.shards) > 1:
            yield Located(*(each[1:] for each in part))
    yield from located


def number_documents(is_last: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Compute the positions, document numbers and document boundaries in rows of tokens.

    Args:
        is_last: whether a token is the last one of its document, (M, T) bool.

    Returns:
        Each token's position in its document, and its document's number in the row, both counted
        from 0, (M, T) int64; and the boundaries: where documents start in the concatenated rows,
        and the total number of tokens, (D + 1,) int64.
    """
    is_first = np.empty_like(is_last)
    is_first[:, 0] = True
    is_first[:, 1:] = is_last[:, :-1]
    starts = np.flatnonzero(is_first)
    lengths = np.diff(starts, append=is_last.size)
    row_of_document = starts // is_last.shape[1]
    first_of_row = np.searchsorted(row_of_document, np.arange(len(is_last)))
    numbers = np.arange(len(starts)) - first_of_row[row_of_document]
    positions = (np.arange(is_last.size) - np.repeat(starts, lengths)).reshape(is_last.shape)
    documents = np.repeat(numbers, lengths).reshape(is_last.shape)
    return positions, documents, np.append(starts, is_last.size)


def _copy(values: np.ndarray, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.int64)).to(dtype)


def _pinned_copy(values: np.ndarray, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    tensor = torch.empty(values.shape, dtype=dtype, pin_memory=True)
    tensor.numpy()[...] = values
    return tensor
