"""The files of a shard directory on this machine. Each block is checked when it is first read.

zerolm/remote_shards.py does the same for files in a store. Both know the format's files, not what a
source, a window or a document is.
"""

import contextlib
import hashlib
import mmap
import os
import resource
import weakref
from collections import deque
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from zerolm.block_sums import BLOCK_BYTES, block_sum, num_blocks
from zerolm.errors import ShardReadError
from zerolm.manifest import DTYPES, FILE_KEYS, TOKENIZER_DIRECTORY

# A map keeps a descriptor, and an open shard has two: a quarter of what a process may have. The
# system's limit of maps (65,530) is far above the most.
FEWEST_OPEN, MOST_OPEN, OPEN_SHARE = 16, 8192, 8
CACHED_SHARE = 4  # of the machine's memory: a source below it is read from the disk once


class LocalFiles:
    """Reads shards through memory maps. Nothing is open before it is read.

    Args:
        directory: of the shards.
        manifest: checked.
    """

    is_remote = False

    def __init__(self, directory: Path, manifest: dict[str, Any]):
        self.directory, self.manifest = directory, manifest
        self.dtype = DTYPES[manifest["dtype"]]
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        size = manifest["num_tokens"] * self.dtype.itemsize
        self._stays_cached = size <= memory // CACHED_SHARE
        self._begin()

    def _begin(self) -> None:
        self._open: dict[int, _Shard] = {}
        self._closed: dict[int, bytes] = {}  # which blocks are unchecked, a bit each
        self._with_sums: set[int] = set()  # shards whose sums were compared with the manifest
        self._num_checked = 0

    def __getstate__(self) -> dict[str, Any]:  # maps are not sent: each process opens its own
        return {"directory": self.directory, "manifest": self.manifest}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def problems(self) -> list[str]:
        """Return what is wrong with the sizes of the files, a line each.

        One process of a node looks: all of them see the same files.
        """
        if os.environ.get("LOCAL_RANK", "0") != "0":
            return []
        try:
            found = _sizes(self.directory)
        except OSError as error:
            return [
                f"{self.directory}: cannot be listed ({error.strerror}). Let this user read it."
            ]
        shards, problems = self.manifest["shards"], []
        for name, size in FILE_KEYS.items():
            wrong = [
                (shard[name], shard[size])
                for shard in shards
                if name in shard and found.get(shard[name]) != shard[size]
            ]
            problems += [self._problem(*file, found) for file in wrong]
        return problems

    def _problem(self, name: str, size: int, found: dict[str, int]) -> str:
        path = self.directory / name
        if name not in found:
            return (
                f"{path}: the manifest lists it, but it is missing. Restore it, or tokenize again."
            )
        return (
            f"{path}: {found[name]} bytes, the manifest says {size}. "
            f"The file was cut or overwritten: restore it, or tokenize again."
        )

    @property
    def wants_notice(self) -> bool:
        """Whether `expect` does anything: not once everything is in memory, and checked."""
        return not self._stays_cached or self._num_checked != self._num_blocks

    def expect(self, ranges: Iterable[tuple[int, int, int]]) -> list[Any]:
        """Have the system read what will be read soon: (shard, first id, end) each.

        All at once, and only that: a page that is first touched when it is needed would be waited
        for alone, with as much around it as the disk's read-ahead is set to.
        """
        size = self.dtype.itemsize
        for number, start, stop in ranges:
            shard = self._open.get(number) or self._opened(number)
            first, end = start * size // BLOCK_BYTES, -(-stop * size // BLOCK_BYTES)
            if shard.unchecked.find(1, first, end) >= 0:
                shard.fetch(first * BLOCK_BYTES, end * BLOCK_BYTES)
            elif not (self._stays_cached and shard.unchecked):
                shard.fetch(start * size, stop * size)
        return []

    def ids(self, number: int, start: int, stop: int) -> np.ndarray:
        """Return the ids at [start, stop) of a shard, a read-only view.

        Raises:
            ShardReadError: a block of them is not as it was written.
        """
        shard = self._open.get(number) or self._opened(number)
        size = self.dtype.itemsize
        first, end = start * size // BLOCK_BYTES, -(-stop * size // BLOCK_BYTES)
        if shard.unchecked.find(1, first, end) >= 0:
            self._check(number, shard, first, end)
        return shard.tokens[start:stop]

    def shard(self, number: int) -> np.ndarray:
        """Return all ids of a shard, unchecked."""
        shard = self._open.get(number) or self._opened(number)
        shard.fetch(0, shard.tokens.nbytes)
        return shard.tokens

    def bytes_of(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """Return bytes of a file of the directory, unchecked, fewer if there are no more."""
        with open(self.directory / name, "rb") as file:
            file.seek(start)
            return file.read(-1 if stop is None else stop - start)

    def sidecar(self, number: int, key: str) -> bytes:
        """Return what lies beside a shard, unchecked: `index`, `sums` or `origins`."""
        return self.bytes_of(self.manifest["shards"][number][key])

    def index(self, number: int) -> bytes:
        """Return the `index` beside a shard, unchecked."""
        return self.sidecar(number, "index")

    def tokenizer_directory(self) -> Path:
        """Return where the tokenizer's copy is, or would be."""
        return self.directory / TOKENIZER_DIRECTORY

    # ---- Open shards

    @cached_property
    def _num_blocks(self) -> int:
        """Return how many blocks there are, with sums or without."""
        return sum(num_blocks(shard["size_bytes"]) for shard in self.manifest["shards"])

    def _opened(self, number: int) -> "_Shard":
        _close_oldest()
        entry = self.manifest["shards"][number]
        mapped = _map(self.directory / entry["file"], entry["size_bytes"])
        blocks = entry["sums_size_bytes"] // 8 if "sums" in entry else 0
        known = self._closed.pop(number, None)
        if known is None:
            unchecked = bytearray(b"\1" * blocks)
        else:
            unchecked = bytearray(np.unpackbits(np.frombuffer(known, np.uint8), count=blocks))
        shard = self._open[number] = _Shard(mapped, self.dtype, unchecked)
        _OPENED.append((weakref.ref(self), number))
        return shard

    def _close(self, number: int) -> None:
        """Let go of a shard; who reads in it now keeps its map."""
        shard = self._open.pop(number, None)
        if shard is not None and shard.unchecked:
            self._closed[number] = np.packbits(np.frombuffer(shard.unchecked, np.uint8)).tobytes()

    def _check(self, number: int, shard: "_Shard", first: int, end: int) -> None:
        """Check those blocks of [first, end) that are not yet."""
        entry = self.manifest["shards"][number]
        if shard.sums is None:
            shard.sums = self._sums(number)
        shard.fetch(first * BLOCK_BYTES, end * BLOCK_BYTES)
        content = memoryview(shard.mapped)
        for block in range(first, end):
            if not shard.unchecked[block]:
                continue
            part = content[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES]
            if block_sum(part) != int(shard.sums[block]):
                raise ShardReadError(
                    damage(self.directory / entry["file"], entry["num_tokens"], block, self.dtype)
                )
            shard.unchecked[block] = 0
            self._num_checked += 1

    def _sums(self, number: int) -> np.ndarray:
        """Return the sums of a shard's blocks, mapped; compared with the manifest the first time.

        A sum that is damaged later is another than its block's, and so not taken for right.
        """
        entry = self.manifest["shards"][number]
        where = self.directory / entry["sums"]
        content = _map(where, entry["sums_size_bytes"])
        if number not in self._with_sums:
            checked_sums(where, content, entry)
            self._with_sums.add(number)
        return np.frombuffer(content, "<u8")


class _Shard:
    """An open shard.

    Attributes:
        tokens: all its ids.
        unchecked: a byte for each block, 1 until it is checked; empty without sums.
        sums: of the blocks; None until the first check.
    """

    __slots__ = ("mapped", "sums", "tokens", "unchecked")

    def __init__(self, mapped: mmap.mmap, dtype: np.dtype, unchecked: bytearray):
        mapped.madvise(mmap.MADV_RANDOM)
        self.mapped, self.unchecked = mapped, unchecked
        # A plain ndarray: slicing np.memmap itself costs 2 us of subclass bookkeeping.
        self.tokens = np.frombuffer(mapped, dtype)
        self.sums: np.ndarray | None = None

    def fetch(self, start: int, stop: int) -> None:
        """Have the system read these bytes, without waiting for them."""
        start -= start % mmap.PAGESIZE
        self.mapped.madvise(mmap.MADV_WILLNEED, start, stop - start)


# Every open shard of this process, the oldest first, of whatever source.
_OPENED: deque[tuple[weakref.ref[LocalFiles], int]] = deque()


def _close_oldest() -> None:
    """Make room for one more open shard."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    most = MOST_OPEN if limit == resource.RLIM_INFINITY else limit // OPEN_SHARE
    while len(_OPENED) >= max(FEWEST_OPEN, min(most, MOST_OPEN)):
        files, number = _OPENED.popleft()
        owner = files()
        if owner is not None:
            owner._close(number)


def _map(path: Path, size: int) -> mmap.mmap:
    """Map a file to read it.

    Raises:
        ShardReadError: it is not there any more, or shorter than it was.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return mmap.mmap(descriptor, size, access=mmap.ACCESS_READ)
        finally:
            os.close(descriptor)
    except (OSError, ValueError) as error:  # ValueError: longer than the file
        raise ShardReadError(
            f"{path}: cannot be opened with {size} bytes ({error}), as it could when this began. "
            f"Restore it."
        ) from error


def _sizes(directory: Path) -> dict[str, int]:
    """Return the size of each file of a directory, by its name.

    In the order of the listing, with which file systems of a network send the sizes.
    """
    sizes = {}
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        with os.scandir(descriptor) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):  # a link to nothing
                    if entry.is_file():
                        sizes[entry.name] = entry.stat().st_size
    finally:
        os.close(descriptor)
    return sizes


def checked_sums(where: Any, content: Any, shard: dict[str, Any]) -> np.ndarray:
    """Return the sums of a shard's blocks, (B,) uint64.

    Raises:
        ShardReadError: they are not those of the manifest.
    """
    if hashlib.sha256(content).hexdigest() != shard["sums_sha256"]:
        raise ShardReadError(
            f"{where}: not the sums that the manifest names (SHA-256). The file is damaged: "
            f"restore it, or tokenize again."
        )
    return np.frombuffer(content, "<u8")


def damage(where: Any, num_tokens: int, block: int, dtype: np.dtype) -> str:
    """Say that a block of a file is not as it was written."""
    per_block = BLOCK_BYTES // dtype.itemsize
    stop = min((block + 1) * per_block, num_tokens)
    return (
        f"{where}: block {block} (bytes from {block * BLOCK_BYTES}, tokens {block * per_block} to "
        f"{stop}) is not as it was written: its sum differs. The file is damaged: restore it (and "
        f"look at its disk), or tokenize again; python -m data_prep verify tells what else is."
    )
