"""Blocks of one source of token shards, kept on a local disk within a bound, by many processes.

    blocks    slots of 64 KiB; its size is the bound
    tags      (slot) (tag, clock) of two uint64: whose block lies there, and when it was last used

No lock, and nothing to repair after a kill: whoever takes a block out of the cache compares it with
its sum, so that a slot that another process overwrites meanwhile, or that was half written when the
machine went down, is no more than a miss. Where there is a slot for every block, the block's number
is its slot and nothing is ever thrown out: the cache becomes a mirror. Else a block has the choice
of `WAYS` slots, and takes the one that was not used for longest.
"""

import contextlib
import errno
import fcntl
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from zerolm.block_sums import BLOCK_BYTES
from zerolm.own_directory import make_own

WAYS = 16
TAG_BYTES = 16
IN_USE = "in-use"
_SPREAD = 0x9E3779B97F4A7C15  # of the golden ratio: neighbours go to different sets
_MASK = (1 << 64) - 1
_OURS = re.compile(r"[0-9a-f]{16}-\d+(\.old-\d+)?")


class Cache(NamedTuple):
    """Where the blocks of one source are kept on this node."""

    directory: Path
    num_slots: int
    siblings: tuple[str, ...] = ()  # names of the directories of all sources of the run


def claim(cache: Cache) -> Any:
    """Make a source's directory and mark it as used by this process, until what is returned closes.

    Removes what is there of other runs, unless it is in use.

    Raises:
        OSError: the directory cannot be made or written.
    """
    mark = _marked(cache.directory)
    for other in cache.directory.parent.iterdir():
        if other.name in cache.siblings or not _OURS.fullmatch(other.name):
            continue
        with _left(other, "ab") as is_left, contextlib.suppress(OSError):
            if is_left:
                # Out of the way first: who comes meanwhile makes its own, and finds nothing half.
                old = other.with_name(f"{other.name.partition('.')[0]}.old-{os.getpid()}")
                other.rename(old)
                shutil.rmtree(old, ignore_errors=True)
    return mark


def held_bytes(directory: Path, names: Sequence[str]) -> int:
    """Return the bytes on disk of the caches that are used again or will be removed.

    Args:
        directory: of all caches.
        names: of the directories of all sources of the run.
    """
    total = 0
    for cache in directory.iterdir() if directory.is_dir() else ():
        if not _OURS.fullmatch(cache.name):
            continue
        with contextlib.nullcontext(True) if cache.name in names else _left(cache, "r+b") as counts:
            for path in cache.iterdir() if counts else ():
                with contextlib.suppress(OSError):
                    total += path.stat().st_blocks * 512
    return total


def _marked(directory: Path) -> Any:
    """Return the open mark of a directory, locked with others that use it."""
    while True:
        make_own(directory)
        try:
            mark = open(directory / IN_USE, "ab")
        except FileNotFoundError:  # removed by another run since it was made
            continue
        _flock(mark, fcntl.LOCK_SH)
        if _is_there(mark, directory / IN_USE):
            return mark
        mark.close()  # of a directory that was removed while this process waited


@contextlib.contextmanager
def _left(directory: Path, mode: str) -> Iterator[bool]:
    """Tell whether no process uses a cache, and keep them all from it meanwhile."""
    try:
        mark = open(directory / IN_USE, mode)
    except OSError:
        yield False
        return
    with mark:
        try:
            fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
            left = _is_there(mark, directory / IN_USE)
        except OSError:  # in use, or a file system without locks
            left = False
        yield left


def _is_there(file: Any, path: Path) -> bool:
    """Tell whether an open file is still the one of that name."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _flock(file: Any, how: int) -> None:
    with contextlib.suppress(OSError):  # a file system without locks
        fcntl.flock(file, how)


def slots_within(size_bytes: int, num_blocks: int) -> int:
    """Return how many slots a cache of this size has, none if it is too small for one set."""
    if size_bytes >= num_blocks * BLOCK_BYTES:
        return num_blocks
    slots = size_bytes // (BLOCK_BYTES + TAG_BYTES)
    return slots // WAYS * WAYS


class BlockCache:
    """A directory with blocks, opened by this process.

    Args:
        directory: created if absent.
        num_blocks: of the source.
        num_slots: of the cache, a multiple of `WAYS` unless there is one for each block.

    Attributes:
        full: why nothing more can be kept, when the disk is full or broken.

    Raises:
        OSError: its files cannot be made.
    """

    def __init__(self, directory: Path, num_blocks: int, num_slots: int):
        assert num_slots == num_blocks or num_slots % WAYS == 0
        self.num_blocks, self.num_slots = num_blocks, num_slots
        self.is_mirror = num_slots >= num_blocks
        self.full: str | None = None
        make_own(directory)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._blocks = os.open(directory / "blocks", flags, 0o600)
        _grow(self._blocks, num_slots * BLOCK_BYTES)
        self._tags: np.ndarray | None = None
        if not self.is_mirror and num_slots:
            tags = os.open(directory / "tags", flags, 0o600)
            with contextlib.closing(os.fdopen(tags)):
                # Not a hole: what is written through a map has nobody to say that the disk is full.
                os.posix_fallocate(tags, 0, num_slots * TAG_BYTES)
            table = np.memmap(directory / "tags", "<u8", mode="r+").view(np.ndarray)
            self._tags = table.reshape(-1, WAYS, 2)

    def has(self, block: int) -> bool:
        """Tell whether a block seems to be there; a mirror cannot tell without reading it."""
        return self.is_mirror or self._way(block) is not None

    def get(self, block: int, size: int, start: int = 0) -> bytes | None:
        """Return `size` bytes of a block from `start` on, unchecked; None if it is not there."""
        slot = self._slot(block)
        if slot is None:
            return None
        with contextlib.suppress(OSError):
            return os.pread(self._blocks, size, slot * BLOCK_BYTES + start)
        return None

    def put(self, block: int, content: bytes) -> None:
        """Keep a block, in place of the one that was not used for longest. Never fails."""
        if self.full is not None or not self.num_slots:
            return
        tags = self._set(block)
        way = 0
        if tags is not None:
            found = np.flatnonzero(tags[:, 0] == block + 1)
            way = int(found[0]) if found.size else int(tags[:, 1].argmin())
            tags[way, 0] = 0
        slot = block if tags is None else self._first_slot(block) + way
        try:
            written = os.pwrite(self._blocks, content, slot * BLOCK_BYTES)
        except OSError as error:
            self.full = os.strerror(error.errno or errno.EIO)
            return
        if written != len(content):  # what a disk says first when it fills; the rest is a hole
            self.full = os.strerror(errno.ENOSPC)
            return
        if tags is not None:
            tags[way] = block + 1, self._now(tags)

    def _slot(self, block: int) -> int | None:
        if self.is_mirror:
            return block
        way = self._way(block)
        if way is None:
            return None
        tags = self._set(block)
        assert tags is not None
        tags[way, 1] = self._now(tags)
        return self._first_slot(block) + way

    def _way(self, block: int) -> int | None:
        tags = self._set(block)
        if tags is None:
            return None
        found = np.flatnonzero(tags[:, 0] == block + 1)
        return int(found[0]) if found.size else None

    def _now(self, tags: np.ndarray) -> int:
        """Return a time that only has to be later than the others' in the set."""
        return int(tags[:, 1].max()) + 1

    def _first_slot(self, block: int) -> int:
        return ((block * _SPREAD & _MASK) >> 32) % (self.num_slots // WAYS) * WAYS

    def _set(self, block: int) -> np.ndarray | None:
        """Return the tags of the slots that a block may have, (WAYS, 2)."""
        if self._tags is None or not self.num_slots:
            return None
        return self._tags[self._first_slot(block) // WAYS]


def _grow(descriptor: int, size: int) -> None:
    """Give a file its size, as a hole: the disk is used as blocks come."""
    if os.fstat(descriptor).st_size != size:
        os.ftruncate(descriptor, size)
