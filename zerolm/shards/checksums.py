"""Checksums of the blocks in a shard, to verify parts of a shard separately.

`shard-00000.sums` contains the XXH3 checksum (64 bits, seed 0) of each 64 KiB block in
`shard-00000.bin`, as little-endian uint64; the last block may be shorter. `shard-00000.fine`
contains a checksum for every 8 KiB, so verifying a window reads little more than the window itself.
The manifest contains the SHA-256 of both files. 64 bits detect accidental damage, but not
deliberate collisions.

Source: https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md
"""

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from zerolm.common.files import write_atomically

# A multiple of the page size. Small enough to fetch a window of a few KiB over a network with
# little overhead, and large enough that the checksums for 1 T tokens of 2 bytes take only 0.25 GB.
BLOCK_BYTES = 1 << 16
# A window of 2,048 ids of 2 bytes spans 1.5 fine blocks on average, so 12 KiB are read, not 68.
FINE_BYTES = 1 << 13
CHECKSUM_BYTES = 8
# {manifest key: (suffix, block size)} for each checksum file.
CHECKSUM_FILES = {"sums": (".sums", BLOCK_BYTES), "fine": (".fine", FINE_BYTES)}


def num_blocks(size_bytes: int, block_bytes: int = BLOCK_BYTES) -> int:
    """Return the number of blocks in a file of this size."""
    return -(-size_bytes // block_bytes)


def block_checksum(block: Any) -> int:
    """Return the checksum of a block, which may be any contiguous buffer."""
    return xxhash.xxh3_64_intdigest(block)


class BlockChecksums:
    """Computes the block checksums of a file, whose bytes may be passed in pieces of any size."""

    def __init__(self, block_bytes: int = BLOCK_BYTES) -> None:
        self._block_bytes = block_bytes
        self._checksums: list[int] = []
        self._partial = xxhash.xxh3_64()  # checksum of the incomplete block
        self._partial_bytes = 0

    def update(self, data: Any) -> None:
        """Add the next bytes of the file, from any contiguous buffer."""
        view = memoryview(data).cast("B")
        start, size = 0, self._block_bytes
        while start < len(view):
            part = view[start : start + size - self._partial_bytes]
            start += len(part)
            if len(part) == size:
                self._checksums.append(block_checksum(part))
                continue
            self._partial.update(part)
            self._partial_bytes += len(part)
            if self._partial_bytes == size:
                self._finish_block()

    def _finish_block(self) -> None:
        self._checksums.append(self._partial.intdigest())
        self._partial.reset()
        self._partial_bytes = 0

    def content(self) -> bytes:
        """Return the content of the checksum file. Call this after the last `update`."""
        if self._partial_bytes:
            self._finish_block()
        return np.array(self._checksums, "<u8").tobytes()


class ShardChecksums:
    """Computes the content of all checksum files for a shard."""

    def __init__(self) -> None:
        self._files = {key: BlockChecksums(size) for key, (_, size) in CHECKSUM_FILES.items()}

    def update(self, data: Any) -> None:
        """Add the next bytes of the shard, from any contiguous buffer."""
        for file in self._files.values():
            file.update(data)

    def contents(self) -> list[tuple[str, str, bytes]]:
        """Return (manifest key, suffix, content) for each file. Call this after the last
        `update`.
        """
        return [(key, CHECKSUM_FILES[key][0], file.content()) for key, file in self._files.items()]


def write_sidecars(
    stem: Path, contents: Iterable[tuple[str, str, bytes]], **how: bool
) -> dict[str, Any]:
    """Write a shard's sidecar files atomically, and return the manifest entries that describe them.

    Args:
        contents: (manifest key, suffix, content) for each file.
        how: keyword arguments of `write_atomically`.
    """
    keys: dict[str, Any] = {}
    for key, suffix, content in contents:
        path = stem.with_suffix(suffix)
        write_atomically(path, content, **how)
        keys[key], keys[f"{key}_size_bytes"] = path.name, len(content)
        keys[f"{key}_sha256"] = hashlib.sha256(content).hexdigest()
    return keys
