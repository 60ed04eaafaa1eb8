"""Micro-batches of token ids in the order that zerolm/order.py gives. Knows nothing of training.

`TokenStream` is the training data of one rank from some position on, `ValidationStream` the fixed
windows that validation loss is measured on; `make_loader` reads either, in this process or through
loader workers, and `prefetch_to_device` copies what it yields one micro-batch ahead.
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

from zerolm import skipped
from zerolm.errors import ZerolmError
from zerolm.order import Order, Stage
from zerolm.settings import CONCAT
from zerolm.shards import Source
from zerolm.shares import split_evenly
from zerolm.skipped import Windows
from zerolm.windows import READ_BYTES, Batch, Rows, Tokens, WindowStream

MESSAGE_BYTES = 1 << 20  # sent at once by a worker: a message costs more than what is in it
PARENT_CHECK_SECONDS = 2.0


class TokenStream(WindowStream):
    """The training data of one rank: the part of an endless order between two positions.

    A position is the number of sequences that all ranks together have consumed. The global batch
    that starts at position p covers sequence numbers p to p + batch_schedule(p); micro-step a of
    rank r holds p + (a * world_size + r) * micro_batch_size and the ones after it. Where windows of
    the order are skipped, these are positions in what is left of it.

    Args:
        sources: opened shard directories.
        weights: share of the sequences of each source, in any unit.
        seq_len: tokens of a row (T).
        seed: of the order.
        batch_schedule: position -> sequences of the global batch that starts there, a multiple of
            micro_batch_size * world_size. A pure function; called ahead of time.
        micro_batch_size: rows of a batch (M).
        position: where to start: at the start of a global batch.
        end_position: no global batch starts there or later.
        document_mask, packing: see `WindowStream`.
        skipped_windows: sequence numbers [start, end) that are left out, see `zerolm.skipped`.
        stages: other weights from later sequence numbers on, see `zerolm.order.Order`.

    Raises:
        ShardError: a source too short for one sequence; every one is listed.
        ConfigError: a weight, see `zerolm.order.Order`.
    """

    reads_on = True

    def __init__(
        self,
        sources: Sequence[Source],
        weights: Sequence[float],
        *,
        seq_len: int,
        seed: int,
        batch_schedule: Callable[[int], int],
        micro_batch_size: int,
        rank: int,
        world_size: int,
        position: int,
        end_position: int,
        document_mask: bool = False,
        packing: str = CONCAT,
        skipped_windows: Windows = (),
        stages: Sequence[Stage] = (),
    ):
        super().__init__(
            sources,
            seq_len=seq_len,
            micro_batch_size=micro_batch_size,
            rank=rank,
            world_size=world_size,
            document_mask=document_mask,
            packing=packing,
        )
        self.order = Order(self.reader.num_windows.tolist(), weights, seed, stages=stages)
        self.batch_schedule = batch_schedule
        self.position, self.end_position = position, end_position
        self.skipped_windows = skipped_windows

    def starts(self) -> Iterator[int]:
        step = self.micro_batch_size * self.world_size
        position = self.position
        while position < self.end_position:
            size = self.batch_schedule(position)
            assert size > 0 and size % step == 0, f"global batch {size} is no multiple of {step}"
            first = position + self.rank * self.micro_batch_size
            yield from range(first, first + size, step)
            position += size

    def place(self, sequence_ids: np.ndarray) -> Rows:
        sequence_ids = skipped.sequence_ids(sequence_ids, self.skipped_windows)
        placement = self.order(sequence_ids.ravel())
        shape = sequence_ids.shape
        return Rows(sequence_ids, placement.source.reshape(shape), placement.window.reshape(shape))


class ValidationStream(WindowStream):
    """The first windows of each source, the same ones on any number of ranks.

    Args:
        num_sequences: how many in total, split over the sources as evenly as their windows allow;
            fewer if there are no more. They are numbered from 0, source after source.

    Every rank yields the same number of micro-batches. Rows that are missing at the end are copies
    of the last one whose targets are all -100 and whose sequence id is -1.

    Raises:
        ShardError: a source too short for one sequence; every one is listed.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        *,
        seq_len: int,
        num_sequences: int,
        micro_batch_size: int,
        rank: int,
        world_size: int,
        document_mask: bool = False,
        packing: str = CONCAT,
    ):
        super().__init__(
            sources,
            seq_len=seq_len,
            micro_batch_size=micro_batch_size,
            rank=rank,
            world_size=world_size,
            document_mask=document_mask,
            packing=packing,
        )
        assert num_sequences > 0
        used = split_evenly(num_sequences, self.reader.num_windows.tolist())
        self._ends = np.cumsum(used)
        self.num_sequences = int(self._ends[-1])

    def starts(self) -> Iterator[int]:
        step = self.micro_batch_size * self.world_size
        for first in range(0, self.num_sequences, step):
            yield first + self.rank * self.micro_batch_size

    def place(self, sequence_ids: np.ndarray) -> Rows:
        real = np.minimum(sequence_ids, self.num_sequences - 1)
        sources = np.searchsorted(self._ends, real, side="right")
        windows = real - np.concatenate([[0], self._ends])[sources]
        return Rows(np.where(sequence_ids == real, sequence_ids, -1), sources, windows)


class StreamLoader(DataLoader):
    """A DataLoader that yields what its stream yields, whatever travels from its workers."""

    def __init__(self, stream: WindowStream, num_workers: int, pin_memory: bool):
        self.stream = stream
        # Not torch's pinning thread: it would copy once more what is copied here anyway.
        self.pins_memory = pin_memory and torch.cuda.is_available()
        super().__init__(
            _Reads(stream, stream.fitting(MESSAGE_BYTES if num_workers else READ_BYTES)),
            batch_size=None,
            collate_fn=_unchanged,
            num_workers=num_workers,
            worker_init_fn=_obey_parent_only,
        )

    def __iter__(self) -> Any:
        reads = _raised(super().__iter__()) if self.num_workers else iter(self.dataset)
        return self.stream.batches(reads, self.pins_memory)


class _Reads(IterableDataset):
    """What a worker sends: numpy arrays, which go through a pipe. Tensors would go through shared
    memory, at a file each, and containers have little of it."""

    def __init__(self, stream: WindowStream, group: int):
        self.stream, self.group = stream, group

    def __iter__(self) -> Iterator[Any]:
        if get_worker_info() is None:
            yield from self.stream.reads(self.group)
            return
        try:
            yield from self.stream.reads(self.group)
        except ZerolmError as error:  # sent as it is: torch would make a traceback of its message
            yield error


def make_loader(stream: WindowStream, num_workers: int, pin_memory: bool) -> StreamLoader:
    """Make a loader that yields what the stream yields, in the same order.

    Args:
        num_workers: 0 reads in this process: fastest for local files, which the system caches.
            Workers hide the waiting for a slow disk.
        pin_memory: yield pinned tensors, if there is CUDA.
    """
    return StreamLoader(stream, num_workers, pin_memory)


def prefetch_to_device(loader: Iterable[Batch], device: torch.device | str) -> Iterator[Batch]:
    """Yield a loader's batches on a device, CPU or CUDA.

    On CUDA the next batch is read, and its copy begun on a stream of its own, before a batch is
    handed out; the copy overlaps with computing if the loader's tensors are pinned. On CPU batches
    pass through.
    """
    device = torch.device(device)
    if device.type == "cpu":
        yield from loader
        return
    assert device.type == "cuda", f"cannot prefetch to {device}"
    copying = torch.cuda.Stream(device)
    ahead: tuple[Batch, torch.cuda.Event] | None = None
    for batch in loader:
        with torch.cuda.stream(copying):
            moved = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
            copied = copying.record_event()
        if ahead is not None:
            yield _usable(*ahead, device)
        ahead = moved, copied
    if ahead is not None:
        yield _usable(*ahead, device)


def _usable(batch: Batch, copied: torch.cuda.Event, device: torch.device) -> Batch:
    """Have the current stream wait for a batch's copy, and the allocator for the batch's use."""
    current = torch.cuda.current_stream(device)
    current.wait_event(copied)
    for tensor in batch.values():
        tensor.record_stream(current)
    return batch


def _raised(messages: Iterator[Any]) -> Iterator[Tokens]:
    """Raise here what was raised in a worker."""
    for message in messages:
        if isinstance(message, ZerolmError):
            raise message
        yield message


def _unchanged(message: Any) -> Any:
    return message


def _obey_parent_only(worker: int) -> None:
    """Make a loader worker deaf to signals from elsewhere, and end it when its parent is gone.

    Ctrl-C and schedulers signal every process, and DeepSpeed's launcher signals a rank's children
    first. The rank then saves and stops; that fails if its workers are gone. Only a SIGTERM from
    the parent, which is how multiprocessing ends a worker, counts. If the parent is killed, a
    worker would wait for ever to send it what it has read: torch's own watchdog does not see that.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=_follow_parent, args=[os.getppid()], daemon=True).start()


def _follow_parent(parent: int) -> None:
    started_by = multiprocessing.parent_process()  # not the parent where a fork server is
    assert started_by is not None, "only loader workers run this"
    # The second condition is for one that was killed before this worker first looked at its parent.
    while os.getppid() == parent and started_by.is_alive():
        received = signal.sigtimedwait({signal.SIGTERM}, PARENT_CHECK_SECONDS)
        if received is not None and received.si_pid in (parent, started_by.pid):
            break
    os._exit(0)
