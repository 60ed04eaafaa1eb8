"""Sums of the blocks of a shard, so that what is read can be checked without reading all of it.

`shard-00000.sums` has the XXH3 (64 bits, seed 0) of each 64 KiB of `shard-00000.bin` in turn, the
last block as short as it is, as little-endian uint64. A SHA-256 of the manifest vouches for the
file. 64 bits find damage, which is blind; they are no proof against somebody who makes a collision.

Source: https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md
"""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from zerolm.files import write_atomically

# Small enough for a window's few KiB to be had over a network without much else, and a whole number
# of pages; large enough that the sums of 1 T tokens of 2 bytes are 0.25 GB.
BLOCK_BYTES = 1 << 16
SUM_BYTES = 8
SUMS_SUFFIX = ".sums"


def num_blocks(size_bytes: int) -> int:
    """Return how many blocks a file of this size has."""
    return -(-size_bytes // BLOCK_BYTES)


def block_sum(block: Any) -> int:
    """Return the sum of one block, any contiguous buffer, as an integer."""
    return xxhash.xxh3_64_intdigest(block)


class BlockSums:
    """The sums of a file, taken of its bytes as they come."""

    def __init__(self) -> None:
        self._sums: list[int] = []
        self._open = xxhash.xxh3_64()  # of the block that is not full yet
        self._filled = 0

    def update(self, data: Any) -> None:
        """Go on with the next bytes, any contiguous buffer and any number of them."""
        view = memoryview(data).cast("B")
        start = 0
        while start < len(view):
            part = view[start : start + BLOCK_BYTES - self._filled]
            start += len(part)
            if len(part) == BLOCK_BYTES:
                self._sums.append(block_sum(part))
                continue
            self._open.update(part)
            self._filled += len(part)
            if self._filled == BLOCK_BYTES:
                self._close()

    def _close(self) -> None:
        self._sums.append(self._open.intdigest())
        self._open.reset()
        self._filled = 0

    def content(self) -> bytes:
        """Return what the file of sums has, at the end of the data."""
        if self._filled:
            self._close()
        return np.array(self._sums, "<u8").tobytes()

    def write(self, path: Path) -> dict[str, Any]:
        """Write the sums atomically, at the end of the data; return the keys of the manifest."""
        content = self.content()
        write_atomically(path, lambda file: file.write(content))
        return {
            "sums": path.name,
            "sums_size_bytes": len(content),
            "sums_sha256": hashlib.sha256(content).hexdigest(),
        }
