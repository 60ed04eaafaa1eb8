"""Blocks of one source in a store: fetched, checked, and kept in the cache of the node.

What one process has of it; zerolm/remote_shards.py gives the blocks to those who read ids.
"""

import contextlib
import hashlib
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np

from zerolm.block_cache import BlockCache, Cache, claim
from zerolm.block_sums import BLOCK_BYTES, block_sum, num_blocks
from zerolm.errors import ShardReadError
from zerolm.files import write_atomically
from zerolm.object_ranges import Ranges
from zerolm.object_store import StoreError

SUMS_KEPT = 4096  # shards whose sums stay in memory: 0.13 GB of those of 256 MiB


class RemoteBlocks:
    """Blocks are named by their shard and by their number in it.

    Args:
        ranges: of the directory of the shards.
        manifest: checked; every shard has sums.
        cache: None: nothing is kept.

    Attributes:
        counts: blocks that were `hits` in the cache, and `fetched`.
    """

    def __init__(self, ranges: Ranges, manifest: dict[str, Any], cache: Cache | None):
        self.ranges, self.shards, self.cache = ranges, manifest["shards"], cache
        sizes = [num_blocks(shard["size_bytes"]) for shard in self.shards]
        self.first_keys = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]).tolist()
        self.counts: Counter[str] = Counter()
        self._kept: BlockCache | None = None
        self._unchecked = bytearray()  # of a mirror: a byte for each block, 1 until it is checked
        self._sums: OrderedDict[int, np.ndarray] = OrderedDict()
        self._lock = threading.Lock()
        if cache is not None:
            try:
                self._claim = claim(cache)
                self._kept = BlockCache(cache.directory, self.first_keys[-1], cache.num_slots)
            except OSError as error:  # a disk that filled since the run began stops the keeping
                self.cache = None
                print(f"note: {cache.directory}: nothing is kept there ({error}); blocks of "
                      f"{ranges.url} are fetched whenever they are read", flush=True)  # fmt: skip
        if self._kept is not None and self._kept.is_mirror:
            self._unchecked = bytearray(b"\1" * self.first_keys[-1])

    @property
    def is_mirror(self) -> bool:
        """Whether all blocks have room in the cache."""
        return bool(self._unchecked)

    def key(self, number: int, block: int) -> int:
        """Return a block's number in the whole source."""
        return self.first_keys[number] + block

    def is_here(self, number: int, block: int) -> bool:
        """Tell whether a block can be had without the store, as far as that is quickly known."""
        key = self.key(number, block)
        if self._kept is None or not self._kept.has(key):
            return False
        if not self._unchecked:
            return True  # read, and compared, when its time comes
        return not self._unchecked[key] or self._whole(number, block) is not None

    def part(self, number: int, block: int, first: int, end: int) -> bytes | memoryview:
        """Return the bytes [first, end) of a block, checked, from the cache or else the store.

        Raises:
            ShardReadError: see `fetch`.
        """
        key = self.key(number, block)
        if self._kept is not None and self._unchecked and not self._unchecked[key]:
            content = self._kept.get(key, end - first, first)
            if content is not None and len(content) == end - first:
                self.counts["hits"] += 1
                return content
        content = self._whole(number, block)
        if content is None:
            content = self.fetch(number, block, block + 1)
        else:
            self.counts["hits"] += 1
        return memoryview(content)[first:end]

    def _whole(self, number: int, block: int) -> bytes | None:
        """Return a block from the cache if it is there as it was written."""
        if self._kept is None:
            return None
        key = self.key(number, block)
        content = self._kept.get(key, self._begin(number, block + 1) - block * BLOCK_BYTES)
        if content is None or block_sum(content) != int(self.sums(number)[block]):
            return None
        if self._unchecked:
            self._unchecked[key] = 0
        return content

    def _begin(self, number: int, block: int) -> int:
        """Return where a block begins, in bytes, or the end of the shard if that is before."""
        return min(block * BLOCK_BYTES, self.shards[number]["size_bytes"])

    def fetch(self, number: int, first: int, end: int) -> bytes:
        """Return the blocks [first, end) of a shard from the store, checked, and keep them.

        Raises:
            ShardReadError: they are not to be had as they were written.
        """
        begun = time.monotonic()  # one patience for both: the watchdog has only one as well
        sums = self.sums(number, begun)

        def wrong(content: bytes) -> str | None:
            view = memoryview(content)
            for at in range(0, len(view), BLOCK_BYTES):
                block = first + at // BLOCK_BYTES
                if block_sum(view[at : at + BLOCK_BYTES]) != int(sums[block]):
                    return (
                        f"block {block} (bytes from {block * BLOCK_BYTES}) came otherwise than it "
                        f"was written: its sum differs"
                    )
            return None

        name, start = self.shards[number]["file"], first * BLOCK_BYTES
        content = self.read(name, start, self._begin(number, end), wrong, begun)
        self.counts["fetched"] += num_blocks(len(content))
        if self._kept is not None:
            for at in range(0, len(content), BLOCK_BYTES):
                key = self.key(number, first + at // BLOCK_BYTES)
                self._kept.put(key, content[at : at + BLOCK_BYTES])
                if self._unchecked and self._kept.full is None:
                    self._unchecked[key] = 0
        return content

    def sums(self, number: int, begun: float | None = None) -> np.ndarray:
        """Return the sums of a shard, (B,) uint64, from the disk of the node if they are there."""
        with self._lock:
            sums = self._sums.get(number)
            if sums is not None:
                self._sums.move_to_end(number)
                return sums
        shard = self.shards[number]
        content = b""
        kept = self.cache.directory / shard["sums"] if self.cache is not None else None
        if kept is not None:
            with contextlib.suppress(OSError):
                content = kept.read_bytes()
        if hexadecimal(content) != shard["sums_sha256"]:
            same = sha256_check(shard["sums_sha256"])
            content = self.read(shard["sums"], 0, shard["sums_size_bytes"], same, begun)
            if kept is not None:
                with contextlib.suppress(OSError):
                    write_atomically(kept, lambda file: file.write(content), many_writers=True)
        sums = np.frombuffer(content, "<u8")
        with self._lock:
            self._sums[number] = sums
            while len(self._sums) > SUMS_KEPT:
                self._sums.popitem(last=False)
        return sums

    def read(
        self,
        name: str,
        start: int | None,
        stop: int | None,
        wrong: Callable[[bytes], str | None] = lambda content: None,
        begun: float | None = None,
    ) -> bytes:
        """Return bytes of an object; `begun` as for `Ranges.read`.

        Raises:
            ShardReadError: they are not to be had.
        """
        try:
            return self.ranges.read(name, start, stop, wrong, begun)
        except StoreError as error:
            raise ShardReadError(
                f"{error}. If the store is well, copy the object there again; a run goes on from "
                f"its last checkpoint."
            ) from None


def sha256_check(expected: str) -> Callable[[bytes], str | None]:
    """Return what says of a content whether it is another than the manifest names."""

    def wrong(content: bytes) -> str | None:
        same = hexadecimal(content) == expected
        return None if same else "another content than the manifest says (SHA-256)"

    return wrong


def hexadecimal(content: bytes) -> str:
    """Return the SHA-256 of a content."""
    return hashlib.sha256(content).hexdigest()
