"""Loads micro-batches for training and validation. Independent of the training loop.

`TokenStream` is one shard of the training data from a position on; `ValidationStream` is the fixed
set of validation windows. `make_loader` reads either of them, in this process or through loader
workers, and `prefetch_to_device` copies its batches to the device one micro-batch ahead.
"""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from zerolm.common import processes
from zerolm.common.errors import ShardReadError, ZerolmError
from zerolm.common.values import split_evenly
from zerolm.config.settings import CONCAT
from zerolm.data import skips
from zerolm.data.order import Blend, Order
from zerolm.data.skips import SkippedRanges
from zerolm.data.window_stream import READ_BYTES, Batch, Rows, Tokens, WindowStream
from zerolm.shards.reader import Source

MESSAGE_BYTES = 1 << 20  # per message from a worker; the fixed cost dominates smaller messages
PARENT_CHECK_SECONDS = 2.0


class TokenStream(WindowStream):
    """A shard of the training data: its share of an endless order, from one position to another.

    A position is the total number of sequences that all shards have yielded. The global batch that
    starts at position p consists of sequence numbers p to p + batch_schedule(p); micro-step a of
    shard s starts at p + (a * num_shards + s) * micro_batch_size. If ranges of the order are
    skipped, these numbers count the remaining sequences only.

    Args:
        seq_len: number of tokens in a row (T).
        batch_schedule: function from a position to the number of sequences in the global batch that
            starts there, a multiple of micro_batch_size * num_shards. Must be a pure function,
            since it is called ahead of time.
        micro_batch_size: number of rows in a micro-batch (M).
        position: start of the first global batch.
        end_position: no global batch starts at or after this position.
        document_mask, packing: see `WindowStream`.
        skipped_windows: ranges [start, end) of sequence numbers to skip, see `zerolm.data.skips`.
        blends, group: later blends and window grouping, see `zerolm.data.order.Order`.
    """

    reads_all_data = True

    def __init__(
        self,
        sources: Sequence[Source],
        weights: Sequence[float],
        *,
        seq_len: int,
        seed: int,
        batch_schedule: Callable[[int], int],
        micro_batch_size: int,
        shard: int,
        num_shards: int,
        position: int,
        end_position: int,
        document_mask: bool = False,
        packing: str = CONCAT,
        skipped_windows: SkippedRanges = (),
        blends: Sequence[Blend] = (),
        group: int = 1,
    ):
        super().__init__(
            sources,
            seq_len=seq_len,
            micro_batch_size=micro_batch_size,
            shard=shard,
            num_shards=num_shards,
            document_mask=document_mask,
            packing=packing,
        )
        sizes = self.reader.num_windows.tolist()
        self.order = Order(sizes, weights, seed, blends=blends, group=group)
        self.batch_schedule = batch_schedule
        self.position, self.end_position = position, end_position
        self.skipped_windows = skipped_windows

    def micro_batch_starts(self) -> Iterator[int]:
        step = self.micro_batch_size * self.num_shards
        position = self.position
        while position < self.end_position:
            size = self.batch_schedule(position)
            assert size > 0 and size % step == 0, f"global batch {size} is not a multiple of {step}"
            first = position + self.shard * self.micro_batch_size
            yield from range(first, first + size, step)
            position += size

    def find_rows(self, sequence_ids: np.ndarray) -> Rows:
        sequence_ids = skips.sequence_ids(sequence_ids, self.skipped_windows)
        placement = self.order(sequence_ids.ravel())
        shape = sequence_ids.shape
        return Rows(sequence_ids, placement.source.reshape(shape), placement.window.reshape(shape))


class ValidationStream(WindowStream):
    """The validation data: the first windows of each source, the same for any number of shards.

    Every shard yields the same number of micro-batches. The last micro-batches are padded with
    copies of the last row, with sequence id -1 and all targets -100.

    Args:
        num_sequences: total number of sequences, split over the sources as evenly as possible;
            fewer if there are not enough windows. Sequences are numbered from 0, source after
            source.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        *,
        seq_len: int,
        num_sequences: int,
        micro_batch_size: int,
        shard: int,
        num_shards: int,
        document_mask: bool = False,
        packing: str = CONCAT,
    ):
        super().__init__(
            sources,
            seq_len=seq_len,
            micro_batch_size=micro_batch_size,
            shard=shard,
            num_shards=num_shards,
            document_mask=document_mask,
            packing=packing,
        )
        assert num_sequences > 0
        used = split_evenly(num_sequences, self.reader.num_windows.tolist())
        self._ends = np.cumsum(used)
        self.num_sequences = int(self._ends[-1])

    def micro_batch_starts(self) -> Iterator[int]:
        step = self.micro_batch_size * self.num_shards
        for first in range(0, self.num_sequences, step):
            yield first + self.shard * self.micro_batch_size

    def find_rows(self, sequence_ids: np.ndarray) -> Rows:
        real = np.minimum(sequence_ids, self.num_sequences - 1)
        sources = np.searchsorted(self._ends, real, side="right")
        windows = real - np.concatenate([[0], self._ends])[sources]
        return Rows(np.where(sequence_ids == real, sequence_ids, -1), sources, windows)


class StreamLoader(DataLoader):
    """A DataLoader that yields the batches of a stream, and reads them in larger groups."""

    def __init__(self, stream: WindowStream, num_workers: int, pin_memory: bool):
        self.stream = stream
        # Batches are built directly in pinned memory; torch's pinning thread would make another
        # copy.
        self.pins_memory = pin_memory and torch.cuda.is_available()
        group = stream.num_micro_batches_within(MESSAGE_BYTES if num_workers else READ_BYTES)
        super().__init__(
            _Groups(stream, group),
            batch_size=None,
            collate_fn=_identity,
            num_workers=num_workers,
            worker_init_fn=_obey_parent_only,
        )

    def __iter__(self) -> Any:
        groups = _raise_errors(super().__iter__()) if self.num_workers else iter(self.dataset)
        return self.stream.batches(groups, self.pins_memory)


class _Groups(IterableDataset):
    """Yields groups of micro-batches as numpy arrays, which workers send through a pipe.

    Each tensor would use a file in shared memory, which is small in containers.
    """

    def __init__(self, stream: WindowStream, group: int):
        self.stream, self.group = stream, group

    def __iter__(self) -> Iterator[Any]:
        if get_worker_info() is None:
            yield from self.stream.read_groups(self.group)
            return
        try:
            yield from self.stream.read_groups(self.group)
        except (
            ZerolmError
        ) as error:  # sent as an object, since torch would turn it into a traceback string
            yield error


def make_loader(stream: WindowStream, num_workers: int, pin_memory: bool) -> StreamLoader:
    """Return a loader that yields the batches of a stream in order; `pin_memory` requires CUDA.

    Args:
        num_workers: number of worker processes, which hide the latency of a slow disk; 0 to read in
            this process, which is fastest for local files in the page cache.
    """
    return StreamLoader(stream, num_workers, pin_memory)


def require_complete_files(error: RuntimeError, sources: Sequence[Source]) -> None:
    """Raise a clear error if a worker was killed by SIGBUS because a mapped file became shorter.

    torch raises `error` at an arbitrary point in the main thread, and blames shared memory.

    Raises:
        ShardReadError: a worker was killed, and a source's file is shorter than expected.
    """
    if "DataLoader worker" not in str(error):
        return
    if problems := [line for source in sources for line in source.files.size_problems()]:
        raise ShardReadError(problems) from error


def prefetch_to_device(loader: Iterable[Batch], device: torch.device | str) -> Iterator[Batch]:
    """Yield a loader's batches, moved to a CPU or CUDA device.

    On CUDA, before a batch is yielded, the next one is read and its copy is started on a separate
    stream. The copy overlaps with computation if the loader's tensors are pinned. On a CPU, batches
    pass through unchanged.
    """
    device = torch.device(device)
    if device.type == "cpu":
        yield from loader
        return
    assert device.type == "cuda", f"cannot prefetch to {device}"
    copy_stream = torch.cuda.Stream(device)
    ahead: tuple[Batch, torch.cuda.Event] | None = None
    for batch in loader:
        with torch.cuda.stream(copy_stream):
            moved = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
            copied = copy_stream.record_event()
        if ahead is not None:
            yield _wait_for_copy(*ahead, device)
        ahead = moved, copied
    if ahead is not None:
        yield _wait_for_copy(*ahead, device)


def _wait_for_copy(batch: Batch, copied: torch.cuda.Event, device: torch.device) -> Batch:
    """Make the current stream wait for a batch's copy, and keep its memory for the stream."""
    current = torch.cuda.current_stream(device)
    current.wait_event(copied)
    for tensor in batch.values():
        tensor.record_stream(current)
    return batch


def _raise_errors(messages: Iterator[Any]) -> Iterator[Tokens]:
    """Yield the workers' messages, but raise those that are errors."""
    for message in messages:
        if isinstance(message, ZerolmError):
            raise message
        yield message


def _identity(message: Any) -> Any:
    return message


def _obey_parent_only(worker: int) -> None:
    """Make a loader worker ignore signals from other processes, and exit when its parent exits.

    Ctrl-C and schedulers signal every process, and DeepSpeed's launcher signals a rank's children
    first. The rank then saves and stops, which fails if its workers have already exited. So a
    worker must obey only SIGTERM from its parent, which multiprocessing uses to stop workers. If
    the parent is killed, a worker could block forever while sending a message; torch's own watchdog
    misses that case.
    """
    for number in processes.STOP_SIGNALS:
        if number != signal.SIGTERM:
            signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=_follow_parent, args=[os.getppid()], daemon=True).start()


def _follow_parent(parent: int) -> None:
    started_by = multiprocessing.parent_process()  # with a fork server, not the parent process
    assert started_by is not None, "only loader workers run this"
    # The second condition covers a parent that was killed before this worker's first check.
    while os.getppid() == parent and started_by.is_alive():
        received = signal.sigtimedwait({signal.SIGTERM}, PARENT_CHECK_SECONDS)
        if received is not None and received.si_pid in (parent, started_by.pid):
            break
    os._exit(0)
