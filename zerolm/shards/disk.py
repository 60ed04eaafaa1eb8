"""Files in a local shard directory: sizes, SHA-256, and memory-mapped, verified shards.

Uses the shards' manifest entries, but does not track which shards are open.
"""

import contextlib
import hashlib
import mmap
import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from shlex import quote
from typing import Any

import numpy as np

from zerolm.common.errors import ShardReadError
from zerolm.common.files import barrier
from zerolm.common.records import unreadable
from zerolm.shards.checksums import BLOCK_BYTES, FINE_BYTES, block_checksum
from zerolm.shards.manifest import DTYPES, FILE_KEYS, wrong_id

# Maximum number of small blocks to read without prefetching; streams have prefetched already.
MAX_FAULTS = 4
SIZE_HOLDS_SECONDS = 1.0  # time until the size of a mapped file is checked again
MAX_READ_AHEAD_BYTES = 1 << 20  # of .fine checksums when a shard is opened
MAX_SAMPLED_FILES = 4096  # sizes that a node checks when a run starts: 10 ms on a local disk


def require_digest(path: Path, content: bytes | mmap.mmap, digest: str) -> None:
    """Raise a `ShardReadError` if the SHA-256 of the content is not `digest`."""
    if hashlib.sha256(content).hexdigest() != digest:
        raise ShardReadError(
            f"{path}: its SHA-256 differs from the manifest. The file is damaged: restore it, or "
            f"tokenize again."
        )


def map_file(path: Path, size: int) -> mmap.mmap:
    """Map a file for reading, and check that its size is as expected.

    Raises:
        ShardReadError: the file is missing, or has another size.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if (actual := os.fstat(descriptor).st_size) > size:
                raise ShardReadError(size_problem(path, size, actual))
            return mmap.mmap(descriptor, size, access=mmap.ACCESS_READ)
        finally:
            os.close(descriptor)
    except (OSError, ValueError) as error:  # ValueError: the file is shorter
        what = f"can no longer be opened with {size} bytes"
        raise ShardReadError(unreadable(path, error, "Restore it.", what)) from error


def size_problem(path: Path, size: int, actual: int | None) -> str:
    """Return the message for a file of the wrong size; `actual` is None if the file is missing."""
    if actual is None:
        return f"{path}: the manifest lists it, but it is missing. Restore it, or tokenize again."
    return (
        f"{path}: {actual} bytes, but the manifest says {size}. The file was truncated or "
        "overwritten: restore it, or tokenize again."
    )


def size_problems(directory: Path, shards: Iterable[dict[str, Any]]) -> list[str]:
    """Return a problem for each shard file that is missing or has another size."""
    try:
        sizes = _file_sizes(directory)
    except OSError as error:
        return [f"{directory}: cannot be listed ({error.strerror}). Let this user read it."]
    problems: dict[str, list[str]] = {key: [] for key in FILE_KEYS}
    for shard in shards:
        for key, size_key in FILE_KEYS.items():
            if key in shard and sizes.get(shard[key]) != shard[size_key]:
                name, size = shard[key], shard[size_key]
                problems[key].append(size_problem(directory / name, size, sizes.get(name)))
    return [line for lines in problems.values() for line in lines]


def sampled_size_problems(directory: Path, shards: Sequence[dict[str, Any]]) -> list[str]:
    """Check the file sizes of evenly spaced shards without listing the directory.

    Nodes check different shards: each begins at its own number, which DeepSpeed's launcher and
    torchrun name differently.
    """
    distance = len(shards) * len(FILE_KEYS) // MAX_SAMPLED_FILES + 1
    node = os.environ.get("CROSS_RANK") or os.environ.get("GROUP_RANK") or "0"
    first = int(node) % distance
    problems = []
    for number in range(first, len(shards), distance):
        shard = shards[number]
        for key, size_key in FILE_KEYS.items():
            if key not in shard:
                continue
            path, actual = directory / shard[key], None
            with contextlib.suppress(OSError):
                actual = path.stat().st_size
            if actual != shard[size_key]:
                problems.append(size_problem(path, shard[size_key], actual))
    return problems


def unreadable_files(directory: Path, shards: Sequence[dict[str, Any]]) -> list[str]:
    """Return a problem for each file that this user may not read.

    If there are many shards, only a sample of them is checked.
    """
    step = len(shards) * len(FILE_KEYS) // MAX_SAMPLED_FILES + 1
    names = (shard[key] for shard in shards[::step] for key in FILE_KEYS if key in shard)
    paths = (directory / name for name in names)
    return [f"{path}: cannot be read (Permission denied). Let this user read {barrier(path)}."
            for path in paths if path.exists() and not os.access(path, os.R_OK)]  # fmt: skip


def _file_sizes(directory: Path) -> dict[str, int]:
    """Return {name: size in bytes} for the files in a directory.

    Sizes are read in listing order, because network file systems send them with the listing.
    """
    sizes = {}
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        with os.scandir(descriptor) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):  # a dangling link
                    if entry.is_file():
                        sizes[entry.name] = entry.stat().st_size
    finally:
        os.close(descriptor)
    return sizes


class OpenShard:
    """A memory-mapped shard, verified by block.

    With `FINE_BYTES`, blocks are compared with the 8 KiB checksums. These are not verified
    themselves: if one differs, the checksum of the 64 KiB block decides, because only 64 KiB
    checksums are compared with the manifest.

    Args:
        entry: the shard's entry in the manifest.
        head: the manifest without its shards.
        block_bytes: `FINE_BYTES` or `BLOCK_BYTES`.
        sums_are_verified: whether its 64 KiB checksums are known to match the manifest.

    Attributes:
        tokens: all ids in the shard.
        unverified: one byte per block, 1 until it is verified; None: every read is verified.
        sums_are_verified: whether its 64 KiB checksums are known to match the manifest.

    Raises:
        ShardReadError: a file is missing, or has another size.
    """

    __slots__ = (
        "_block_bytes",
        "_content",
        "_directory",
        "_entry",
        "_fine",
        "_head",
        "_mapped",
        "_size_required_until",
        "_sums",
        "sums_are_verified",
        "tokens",
        "unverified",
    )

    def __init__(
        self,
        directory: Path,
        entry: dict[str, Any],
        head: dict[str, Any],
        block_bytes: int,
        sums_are_verified: bool,
    ):
        self._directory, self._entry, self._head = directory, entry, head
        self._block_bytes, self.sums_are_verified = block_bytes, sums_are_verified
        self._mapped = map_file(directory / entry["file"], entry["size_bytes"])
        self._mapped.madvise(mmap.MADV_RANDOM)
        self._content = memoryview(self._mapped)
        # A plain ndarray, because slicing an np.memmap costs 2 us of subclass bookkeeping.
        self.tokens = np.frombuffer(self._mapped, DTYPES[head["dtype"]])
        self.unverified: bytearray | None = None
        self._size_required_until = 0.0
        self._sums: np.ndarray | None = None
        self._fine: np.ndarray | None = None
        if block_bytes == FINE_BYTES:
            fine = map_file(directory / entry["fine"], entry["fine_size_bytes"])
            fine.madvise(mmap.MADV_WILLNEED, 0, min(len(fine), MAX_READ_AHEAD_BYTES))
            self._fine = np.frombuffer(fine, "<u8")

    def prefetch(self, start: int, stop: int) -> None:
        """Ask the kernel to read these bytes ahead; do not wait for them."""
        start -= start % mmap.PAGESIZE
        self._mapped.madvise(mmap.MADV_WILLNEED, start, stop - start)

    def verify(self, first: int, end: int, check_ids: bool) -> int:
        """Verify the blocks in [first, end) that are still unverified; return how many there were.

        Args:
            check_ids: whether to compare ids with the vocabulary size. In 64 KiB blocks they are
                always compared.

        Raises:
            ShardReadError: a block is damaged, or contains an id outside the vocabulary.
        """
        if (now := time.monotonic()) > self._size_required_until:
            self._require_size()
            self._size_required_until = now + SIZE_HOLDS_SECONDS
        size, unverified, num_verified = self._block_bytes, self.unverified, 0
        if end - first > MAX_FAULTS or size == BLOCK_BYTES:
            self.prefetch(first * size, end * size)
        sums = self._open_sums() if self._fine is None else self._fine
        for block in range(first, end):
            if unverified is not None and not unverified[block]:
                continue
            part = self._content[block * size : (block + 1) * size]
            if sums is not None and block_checksum(part) != sums.item(block):
                self._require_block(block * size // BLOCK_BYTES)
            num_verified += 1
        if check_ids or size == BLOCK_BYTES:
            self.require_ids(first * size, end * size)
        if unverified is not None:
            unverified[first:end] = bytes(end - first)
        return num_verified

    def _require_block(self, block: int) -> None:
        """Raise an error if a 64 KiB block does not match its checksum."""
        sums = self._open_sums()
        part = self._content[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES]
        if sums is not None and block_checksum(part) != sums.item(block):
            raise ShardReadError(
                f"{self._place(block)} is damaged: its checksum differs. Restore the "
                f"file (and check its disk), or tokenize again. To find all damage, run: "
                f"zerolm data verify {quote(str(self._directory))}"
            )

    def require_ids(self, start: int, stop: int) -> None:
        """Raise an error if the bytes [start, stop) contain an id outside the vocabulary."""
        size = self.tokens.itemsize
        tokens = self.tokens[start // size : stop // size]
        if tokens.max() < self._head["vocab_size"]:
            return
        block = (start + int(np.argmax(tokens)) * size) // BLOCK_BYTES
        part = self._content[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES]
        raise ShardReadError(f"{self._place(block)} {wrong_id(part, self._head)}")

    def _require_size(self) -> None:
        """Check that the file has not been truncated, because reading its map would then raise
        SIGBUS.
        """
        actual, size = self._mapped.size(), self._entry["size_bytes"]  # current file size
        if actual < size:
            raise ShardReadError(size_problem(self._directory / self._entry["file"], size, actual))

    def _place(self, block: int) -> str:
        """Return a description of a 64 KiB block's location, for messages."""
        per_block = BLOCK_BYTES // self.tokens.itemsize
        stop = min((block + 1) * per_block, self._entry["num_tokens"])
        return (
            f"{self._directory / self._entry['file']}: block {block} (bytes from "
            f"{block * BLOCK_BYTES}, tokens {block * per_block} to {stop})"
        )

    def _open_sums(self) -> np.ndarray | None:
        """Map the checksums of 64 KiB blocks, and compare them with the manifest once.

        Returns None if the shard has no checksums.

        If the checksums are damaged later, this is also detected, because they no longer match the
        blocks.

        Raises:
            ShardReadError: the checksum file is damaged.
        """
        if self._sums is None and "sums" in self._entry:
            path = self._directory / self._entry["sums"]
            content = map_file(path, self._entry["sums_size_bytes"])
            if not self.sums_are_verified:
                require_digest(path, content, self._entry["sums_sha256"])
                self.sums_are_verified = True
            self._sums = np.frombuffer(content, "<u8")
        return self._sums
