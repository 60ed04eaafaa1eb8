"""Checksums of the blocks of a shard, so that a part of a shard can be verified by itself.

`shard-00000.sums` holds the XXH3 checksum (64 bits, seed 0) of each 64 KiB block of
`shard-00000.bin`, as little-endian uint64; the last block may be shorter. The manifest has the
SHA-256 of this file. 64 bits detect accidental damage, but not deliberate collisions.

Source: https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md
"""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from zerolm.common.files import write_atomically

# Small enough to fetch a window of a few KiB over a network with little else, and a multiple of the
# page size; large enough that the checksums of 1 T tokens of 2 bytes take 0.25 GB.
BLOCK_BYTES = 1 << 16
CHECKSUM_BYTES = 8
CHECKSUMS_SUFFIX = ".sums"


def num_blocks(size_bytes: int) -> int:
    """Return the number of blocks of a file of this size."""
    return -(-size_bytes // BLOCK_BYTES)


def block_checksum(block: Any) -> int:
    """Return the checksum of one block, any contiguous buffer."""
    return xxhash.xxh3_64_intdigest(block)


class BlockChecksums:
    """Computes the block checksums of a file from its bytes, passed in any number of parts."""

    def __init__(self) -> None:
        self._checksums: list[int] = []
        self._partial = xxhash.xxh3_64()  # of the block that is not full yet
        self._partial_bytes = 0

    def update(self, data: Any) -> None:
        """Add the next bytes of the file, any contiguous buffer."""
        view = memoryview(data).cast("B")
        start = 0
        while start < len(view):
            part = view[start : start + BLOCK_BYTES - self._partial_bytes]
            start += len(part)
            if len(part) == BLOCK_BYTES:
                self._checksums.append(block_checksum(part))
                continue
            self._partial.update(part)
            self._partial_bytes += len(part)
            if self._partial_bytes == BLOCK_BYTES:
                self._finish_block()

    def _finish_block(self) -> None:
        self._checksums.append(self._partial.intdigest())
        self._partial.reset()
        self._partial_bytes = 0

    def content(self) -> bytes:
        """Return the content of the checksum file; call it after the last `update`."""
        if self._partial_bytes:
            self._finish_block()
        return np.array(self._checksums, "<u8").tobytes()

    def write(self, path: Path) -> dict[str, Any]:
        """Write the checksum file atomically, after the last `update`; return its manifest keys."""
        content = self.content()
        write_atomically(path, content)
        return {
            "sums": path.name,
            "sums_size_bytes": len(content),
            "sums_sha256": hashlib.sha256(content).hexdigest(),
        }
