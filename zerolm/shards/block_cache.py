"""A bounded on-disk cache for the blocks of one source, shared by all processes on a node.

    blocks    slots of 64 KiB; the file's size limits the cache
    tags      two uint64 per slot: 1 + the number of the block in the slot, and a clock value that
              orders blocks by last use

Slots have no locks, and nothing needs to be repaired after a process is killed. Readers compare
each block with its checksum, so a slot that was overwritten during the read, or half written when
the machine crashed, is just a cache miss. If there is a slot for every block, the block number is
the slot number and nothing is ever evicted: the cache becomes a mirror. Otherwise a block can be
stored in any of the `WAYS` slots of its set, where it replaces the least recently used block.
"""

import contextlib
import errno
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from zerolm.common.files import make_private
from zerolm.common.locks import FileLock
from zerolm.shards.checksums import BLOCK_BYTES

WAYS = 16
TAG_BYTES = 16
IN_USE = "in-use"
_SPREAD = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: maps neighbouring blocks to different sets
_MASK = (1 << 64) - 1
_CACHE_NAME = re.compile(r"[0-9a-f]{16}-\d+(\.old-\d+)?")


class Cache(NamedTuple):
    """The location and size of one source's cache on this node.

    Attributes:
        num_slots: number of blocks that the cache can hold.
        siblings: directory names of all caches of the run, including this one.
    """

    directory: Path
    num_slots: int
    siblings: tuple[str, ...] = ()


# -------------------------------------------------------------------------------------------------
# Finding and locking caches


def lock_cache(cache: Cache) -> FileLock:
    """Create a cache's directory, and return a lock that marks it as in use until it is released.

    Caches of other runs in the same parent directory are removed, unless they are in use.

    Raises:
        OSError: the directory cannot be created or written.
    """
    lock = _shared_lock(cache.directory)
    for other in cache.directory.parent.iterdir():
        if other.name in cache.siblings or not _CACHE_NAME.fullmatch(other.name):
            continue
        with _unused(other) as is_unused, contextlib.suppress(OSError):
            if is_unused:
                # Renamed first, so a process that starts now creates its own cache instead of
                # finding a half-removed one.
                old = other.with_name(f"{other.name.partition('.')[0]}.old-{os.getpid()}")
                other.rename(old)
                shutil.rmtree(old, ignore_errors=True)
    return lock


def reclaimable_bytes(directory: Path, names: Sequence[str]) -> int:
    """Return the total size on disk of the caches in a directory that this run will reuse or
    remove.

    `names` are the names of the run's caches.
    """
    total = 0
    for cache in directory.iterdir() if directory.is_dir() else ():
        if not _CACHE_NAME.fullmatch(cache.name):
            continue
        reused = contextlib.nullcontext(True) if cache.name in names else _unused(cache, False)
        with reused as counts:
            for path in cache.iterdir() if counts else ():
                with contextlib.suppress(OSError):
                    total += path.stat().st_blocks * 512
    return total


def _shared_lock(directory: Path) -> FileLock:
    """Create a directory and return its lock, which other processes that use it can share."""
    while True:
        make_private(directory)
        with contextlib.suppress(FileNotFoundError):  # another run has just removed the directory
            return FileLock(directory / IN_USE, shared=True)


@contextlib.contextmanager
def _unused(directory: Path, create: bool = True) -> Iterator[bool]:
    """Yield whether a cache is unused; if so, no process can open it within the context."""
    try:
        lock = FileLock(directory / IN_USE, create=create)
    except OSError:  # in use, or removed
        yield False
        return
    with lock:
        yield lock.unsupported is None


# -------------------------------------------------------------------------------------------------
# The blocks of one cache


def num_slots_within(size_bytes: int, num_blocks: int) -> int:
    """Return the number of slots in a cache of this size, or 0 if the size is too small for one
    set.
    """
    if size_bytes >= num_blocks * BLOCK_BYTES:
        return num_blocks
    slots = size_bytes // (BLOCK_BYTES + TAG_BYTES)
    return slots // WAYS * WAYS


class BlockCache:
    """A cache opened by this process.

    Args:
        num_slots: a multiple of `WAYS`, or `num_blocks`.

    Attributes:
        is_mirror: whether the cache has a slot for every block.
        write_error: why nothing more is written to the cache, such as a full disk; None if blocks
            are still written.

    Raises:
        OSError: its files cannot be created.
    """

    def __init__(self, directory: Path, num_blocks: int, num_slots: int):
        assert num_slots == num_blocks or num_slots % WAYS == 0
        self.num_slots = num_slots
        self.is_mirror = num_slots >= num_blocks
        self.write_error: str | None = None
        make_private(directory)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._blocks = os.open(directory / "blocks", flags, 0o600)
        _set_size(self._blocks, num_slots * BLOCK_BYTES)
        self._tags: np.ndarray | None = None
        if not self.is_mirror and num_slots:
            tags = os.open(directory / "tags", flags, 0o600)
            with contextlib.closing(os.fdopen(tags)):
                # Allocated rather than sparse, because writing to a memory map on a full disk kills
                # the process.
                os.posix_fallocate(tags, 0, num_slots * TAG_BYTES)
            table = np.memmap(directory / "tags", "<u8", mode="r+").view(np.ndarray)
            self._tags = table.reshape(-1, WAYS, 2)

    def has(self, block: int) -> bool:
        """Return whether a block is probably cached, which is always assumed of a mirror."""
        return self.is_mirror or self._find_way(block) is not None

    def get(self, block: int, size: int, start: int = 0) -> bytes | None:
        """Return `size` unverified bytes of a block from offset `start`, or None if it is not
        cached.
        """
        slot = self._find_slot(block)
        if slot is None:
            return None
        with contextlib.suppress(OSError):
            return os.pread(self._blocks, size, slot * BLOCK_BYTES + start)
        return None

    def put(self, block: int, content: bytes) -> None:
        """Cache a block, replacing the least recently used block in its set. Never raises."""
        if self.write_error is not None or not self.num_slots:
            return
        tags = self._tags_of_set(block)
        way = 0
        if tags is not None:
            ways = np.flatnonzero(tags[:, 0] == block + 1)
            way = int(ways[0]) if ways.size else int(np.argmin(tags[:, 1]))
            tags[way, 0] = 0
        slot = block if tags is None else self._first_slot(block) + way
        try:
            written = os.pwrite(self._blocks, content, slot * BLOCK_BYTES)
        except OSError as error:
            self.write_error = os.strerror(error.errno or errno.EIO)
            return
        if written != len(content):  # a short write: the disk is full
            self.write_error = os.strerror(errno.ENOSPC)
            return
        if tags is not None:
            tags[way] = block + 1, self._next_clock(tags)

    def _find_slot(self, block: int) -> int | None:
        """Return the slot of a block and record that it was used; None if the block is not
        cached.
        """
        if self.is_mirror:
            return block
        way = self._find_way(block)
        if way is None:
            return None
        tags = self._tags_of_set(block)
        assert tags is not None
        tags[way, 1] = self._next_clock(tags)
        return self._first_slot(block) + way

    def _find_way(self, block: int) -> int | None:
        """Return the index of a block within its set; None if the block is not cached."""
        tags = self._tags_of_set(block)
        if tags is None:
            return None
        ways = np.flatnonzero(tags[:, 0] == block + 1)
        return int(ways[0]) if ways.size else None

    def _next_clock(self, tags: np.ndarray) -> int:
        """Return a clock value that is later than all clock values in a set."""
        return int(tags[:, 1].max()) + 1

    def _first_slot(self, block: int) -> int:
        """Return the index of the first slot in a block's set."""
        return ((block * _SPREAD & _MASK) >> 32) % (self.num_slots // WAYS) * WAYS

    def _tags_of_set(self, block: int) -> np.ndarray | None:
        """Return the (WAYS, 2) tags of the slots in a block's set; None for a mirror."""
        if self._tags is None or not self.num_slots:
            return None
        return self._tags[self._first_slot(block) // WAYS]


def _set_size(descriptor: int, size: int) -> None:
    """Set the size of a sparse file, which uses disk space only for blocks that have been
    written.
    """
    if os.fstat(descriptor).st_size != size:
        os.ftruncate(descriptor, size)
