"""Read the files in a local shard directory, and verify each block when it is first used.

`RemoteFiles` does the same for a directory in a store. Both handle the files of a shard directory,
but not sources, windows or documents.
"""

import os
import resource
import sys
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from zerolm.common.errors import ShardError, ShardReadError
from zerolm.common.records import unreadable
from zerolm.shards.checksums import BLOCK_BYTES, FINE_BYTES, num_blocks
from zerolm.shards.disk import (
    MAX_SAMPLED_FILES,
    OpenShard,
    require_digest,
    sampled_size_problems,
    size_problems,
    unreadable_files,
)
from zerolm.shards.manifest import DTYPES, FILE_KEYS, TOKENIZER_DIRECTORY, read_manifest
from zerolm.shards.table import ShardTable, all_have, column, read_table
from zerolm.shards.tokenizer import copy_problems

# A map holds a file descriptor, and an open shard has two maps, so open shards use at most a
# quarter of the process's limit on descriptors. The kernel's limit on maps (65,530) is far above
# MAX_OPEN.
MIN_OPEN, MAX_OPEN, OPEN_SHARE = 16, 8192, 8
CHECK_DELAY_SECONDS = 10.0  # delay, so checking 10^5 files does not slow down the first batches
CACHED_SHARE = 4  # sources below 1/4 of the machine's memory are assumed to stay cached


class LocalFiles:
    """Reads shards through memory maps, which are opened on first use.

    Args:
        head: the checked manifest, with or without `shards`.
    """

    is_remote = False

    def __init__(self, directory: Path, head: dict[str, Any], shards: Sequence[dict[str, Any]]):
        self.directory, self.head, self.shards = directory, head, shards
        self.dtype = DTYPES[head["dtype"]]
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        size = head["num_tokens"] * self.dtype.itemsize
        self._stays_cached = size <= memory // CACHED_SHARE
        is_fine = all_have(shards, "fine") and all_have(shards, "sums")
        self._block_bytes = FINE_BYTES if is_fine else BLOCK_BYTES
        # Tracking which small blocks in 20 TB are verified would take 0.3 GB, and blocks are rarely
        # reread.
        self._keeps_verified = self._stays_cached or not is_fine
        self._open: dict[int, OpenShard] = {}
        self._closed: dict[int, bytes] = {}  # one bit per block: whether it is unverified
        self._verified_checksums: set[int] = set()  # shards whose .sums file matches the manifest
        self._num_verified = 0
        self._wrong_sizes: list[str] = []  # problems found in the background

    @classmethod
    def open(cls, directory: Path) -> "LocalFiles":
        """Read the manifest, or the table made from it.

        Raises:
            ShardError: the manifest is missing, has another format or version, or has invalid keys;
                all problems are listed.
        """
        try:
            if found := read_table(directory):
                return cls(directory, *found)
        except ShardError as error:
            if _is_first_of_node():
                print(f"note: {error}", file=sys.stderr, flush=True)
        manifest = read_manifest(directory)
        return cls(directory, manifest, manifest["shards"])

    def __getstate__(self) -> dict[str, Any]:  # maps cannot be pickled; each process opens its own
        return {"directory": self.directory, "head": self.head, "shards": self.shards}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    @cached_property
    def manifest(self) -> dict[str, Any]:
        """The complete manifest. Building it takes two seconds for 75,000 shards, so runs use its
        parts.
        """
        return self.head if "shards" in self.head else {**self.head, "shards": list(self.shards)}

    def problems(self) -> list[str]:
        """Return a problem for each file that is unreadable or whose size differs from the
        manifest.

        Only one process per node checks, because all processes on a node read the same files. If a
        table lists very many shards, only a sample is checked; `check_sizes` checks all of them
        later, and opening a shard also checks its files.
        """
        if not _is_first_of_node():
            return []
        if self._is_sampled:
            found = sampled_size_problems(self.directory, self.shards)
        else:
            found = self.size_problems()
        return found + unreadable_files(self.directory, self.shards)

    @property
    def _is_sampled(self) -> bool:
        is_large = len(self.shards) * len(FILE_KEYS) > MAX_SAMPLED_FILES
        return is_large and isinstance(self.shards, ShardTable)

    def size_problems(self) -> list[str]:
        """Return a problem for each file with a wrong size; unlike `problems`, check in every
        process.
        """
        return size_problems(self.directory, self.shards)

    def check_sizes(self) -> None:
        """Check all sizes later in the background, unless `problems` has already checked all of
        them.

        If a size is wrong, the next `prefetch` raises a `ShardReadError`.
        """
        if self._is_sampled:
            timer = threading.Timer(CHECK_DELAY_SECONDS, self._find_wrong_sizes)
            timer.daemon = True
            timer.start()

    def _find_wrong_sizes(self) -> None:
        self._wrong_sizes = self.size_problems()

    @property
    def wants_prefetch(self) -> bool:
        """Whether `prefetch` has an effect; False once everything is in memory and verified."""
        return not self._stays_cached or self._num_verified != self._num_blocks

    def prefetch(self, ranges: Iterable[tuple[int, int, int]]) -> list[Any]:
        """Ask the kernel to read these (shard, first id, end) ranges in advance, and nothing else.

        Without this, the process would wait for each page on first access, and the kernel would
        also read surrounding data, as much as the disk's read-ahead setting allows.

        Returns: An empty list; `RemoteFiles.prefetch` returns fetches that hold blocks in memory.

        Raises:
            ShardReadError: a file is missing, or has another size.
        """
        if self._wrong_sizes:
            raise ShardReadError(self._wrong_sizes)
        size, block_bytes = self.dtype.itemsize, self._block_bytes
        for number, start, stop in ranges:
            shard = self._open.get(number) or self._open_shard(number)
            first, end = start * size // block_bytes, -(-stop * size // block_bytes)
            if shard.unverified is None or shard.unverified.find(1, first, end) >= 0:
                shard.prefetch(first * block_bytes, end * block_bytes)
            elif not self._stays_cached:
                shard.prefetch(start * size, stop * size)
        return []

    def ids(self, number: int, start: int, stop: int, check_ids: bool = True) -> np.ndarray:
        """Return the ids at [start, stop) in a shard as a read-only view.

        Args:
            check_ids: if False, the caller must compare the ids with the vocabulary size, which is
                faster for many windows at once, and call `require_ids` to raise the error.

        Raises:
            ShardReadError: a block is damaged.
        """
        shard = self._open.get(number) or self._open_shard(number)
        size, block_bytes = self.dtype.itemsize, self._block_bytes
        first, end = start * size // block_bytes, -(-stop * size // block_bytes)
        if shard.unverified is None or shard.unverified.find(1, first, end) >= 0:
            self._num_verified += shard.verify(first, end, check_ids)
        return shard.tokens[start:stop]

    def require_ids(self, number: int, start: int, stop: int) -> None:
        """Raise a `ShardReadError` if an id at [start, stop) is outside the vocabulary."""
        shard, size = self._open.get(number) or self._open_shard(number), self.dtype.itemsize
        shard.require_ids(start * size, stop * size)

    def shard(self, number: int) -> np.ndarray:
        """Return all ids in a shard, without verifying them."""
        shard = self._open.get(number) or self._open_shard(number)
        shard.prefetch(0, shard.tokens.nbytes)
        return shard.tokens

    def read_bytes(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """Return the bytes [start, stop) of a file without verifying them; fewer if the file is
        shorter.
        """
        with open(self.directory / name, "rb") as file:
            file.seek(start)
            return file.read(-1 if stop is None else stop - start)

    def read_sidecar(self, number: int, key: str) -> bytes:
        """Return the verified content of a shard's `index`, `sums` or `origins`."""
        entry = self.shards[number]
        return self.read_file(entry[key], entry[f"{key}_sha256"])

    def read_file(self, name: str, digest: str) -> bytes:
        """Return the content of a file after verifying its SHA-256.

        Raises:
            ShardReadError: the file is damaged, or cannot be read.
        """
        path = self.directory / name
        try:
            content = path.read_bytes()
        except OSError as error:
            raise ShardReadError(unreadable(path, error, "Restore it.")) from None
        require_digest(path, content, digest)
        return content

    def read_index(self, number: int) -> bytes:
        """Return the verified content of a shard's `index` file."""
        return self.read_sidecar(number, "index")

    def tokenizer_directory(self) -> Path:
        """Return the directory of the verified tokenizer copy; it may not exist.

        Raises:
            ShardError: its files do not match the manifest.
        """
        directory = self.directory / TOKENIZER_DIRECTORY
        files = self.head["tokenizer"].get("files", [])
        if directory.is_dir() and (problems := copy_problems(directory, files)):
            raise ShardError(problems)
        return directory

    # ---- Open shards

    @cached_property
    def _num_blocks(self) -> int:
        """Number of blocks in all shards, with or without checksums."""
        return int((-(-column(self.shards, "size_bytes") // self._block_bytes)).sum())

    def _open_shard(self, number: int) -> OpenShard:
        _close_oldest()
        entry = self.shards[number]
        shard = OpenShard(
            self.directory, entry, self.head, self._block_bytes, number in self._verified_checksums
        )
        if self._keeps_verified:
            count = num_blocks(entry["size_bytes"], self._block_bytes)
            known = self._closed.pop(number, None)
            if known is None:
                shard.unverified = bytearray(b"\1" * count)
            else:
                bits = np.unpackbits(np.frombuffer(known, np.uint8), count=count)
                shard.unverified = bytearray(bits)
        self._open[number] = shard
        _OPENED.append((weakref.ref(self), number))
        return shard

    def _close_shard(self, number: int) -> None:
        """Close a shard; its memory map remains valid for readers that still use it."""
        shard = self._open.pop(number, None)
        if shard is None:
            return
        if shard.unverified is not None:
            self._closed[number] = np.packbits(np.frombuffer(shard.unverified, np.uint8)).tobytes()
        if shard.sums_are_verified:
            self._verified_checksums.add(number)


def _is_first_of_node() -> bool:
    return os.environ.get("LOCAL_RANK", "0") == "0"


# The open shards of all sources in this process, oldest first.
_OPENED: deque[tuple[weakref.ref[LocalFiles], int]] = deque()


def _close_oldest() -> None:
    """Close the shards that were opened first, until there is room for one more."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    most = MAX_OPEN if limit == resource.RLIM_INFINITY else limit // OPEN_SHARE
    while len(_OPENED) >= max(MIN_OPEN, min(most, MAX_OPEN)):
        files, number = _OPENED.popleft()
        owner = files()
        if owner is not None:
            owner._close_shard(number)
