"""Fetch the blocks of one source from a store, verify them, and cache them on the node.

Holds the state of one process; `RemoteFiles` converts blocks to ids. `FetchThreads` fetches blocks
in the background.
"""

import contextlib
import hashlib
import queue
import threading
import time
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np

from zerolm.common.errors import ShardReadError
from zerolm.common.files import write_atomically
from zerolm.common.store import StoreError
from zerolm.shards.block_cache import BlockCache, Cache, lock_cache
from zerolm.shards.checksums import BLOCK_BYTES, block_checksum, num_blocks
from zerolm.shards.manifest import wrong_id
from zerolm.shards.range_reader import RangeReader

# Maximum number of shards whose checksums are kept: 0.13 GB for shards of 256 MiB.
MAX_CHECKSUM_SHARDS = 4096
NUM_THREADS = 16  # at a latency of 50 ms, 16 parallel requests of 64 KiB reach 20 MB/s


class RemoteBlocks:
    """The blocks of a source, each identified by its shard and its index in the shard.

    Args:
        manifest: a checked manifest whose shards all have checksums.
        cache: the node's cache; None to cache nothing.

    Attributes:
        counts: numbers of cache `hits` and blocks `fetched`.
    """

    def __init__(self, reader: RangeReader, manifest: dict[str, Any], cache: Cache | None):
        self.reader, self.manifest, self.cache = reader, manifest, cache
        self.shards = manifest["shards"]
        sizes = [num_blocks(shard["size_bytes"]) for shard in self.shards]
        self.first_keys = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]).tolist()
        self.counts: Counter[str] = Counter(hits=0, fetched=0)
        self._cached: BlockCache | None = None
        # For a mirror: one byte per block, 1 until the block is verified.
        self._unverified = bytearray()
        self._checksums: OrderedDict[int, np.ndarray] = OrderedDict()
        self._lock = threading.Lock()
        if cache is not None:
            try:
                self._cache_lock = lock_cache(cache)
                self._cached = BlockCache(cache.directory, self.first_keys[-1], cache.num_slots)
            except OSError as error:  # the disk may have become full since the run started
                self.cache = None
                print(f"note: {cache.directory}: cannot be used as a cache ({error}); blocks of "
                      f"{reader.url} are fetched each time they are read", flush=True)  # fmt: skip
        if self._cached is not None and self._cached.is_mirror:
            self._unverified = bytearray(b"\1" * self.first_keys[-1])

    @property
    def is_mirror(self) -> bool:
        """Whether the cache has room for all blocks."""
        return bool(self._unverified)

    def key(self, number: int, block: int) -> int:
        """Return a block's index in the whole source."""
        return self.first_keys[number] + block

    def is_cached(self, number: int, block: int) -> bool:
        """Return whether a block is probably in the cache; avoid reading the block to find out."""
        key = self.key(number, block)
        if self._cached is None or not self._cached.has(key):
            return False
        if not self._unverified:
            return True  # verified on reading
        return not self._unverified[key] or self._from_cache(number, block) is not None

    def read_part(self, number: int, block: int, first: int, end: int) -> bytes | memoryview:
        """Return the verified bytes [first, end) of a block, from the cache or the store."""
        key = self.key(number, block)
        if self._cached is not None and self._unverified and not self._unverified[key]:
            content = self._cached.get(key, end - first, first)
            if content is not None and len(content) == end - first:
                self.counts["hits"] += 1
                return content
        content = self._from_cache(number, block)
        if content is None:
            content = self.fetch(number, block, block + 1)
        else:
            self.counts["hits"] += 1
        return memoryview(content)[first:end]

    def _from_cache(self, number: int, block: int) -> bytes | None:
        """Return a block from the cache, or None if the block is not cached or the copy is
        damaged.
        """
        if self._cached is None:
            return None
        key = self.key(number, block)
        content = self._cached.get(key, self._offset(number, block + 1) - block * BLOCK_BYTES)
        if content is None or block_checksum(content) != int(self.checksums(number)[block]):
            return None
        self._require_ids(number, block, content)
        if self._unverified:
            self._unverified[key] = 0
        return content

    def _require_ids(self, number: int, first: int, content: bytes) -> None:
        """Check the ids in blocks, because checksums do not detect ids that were invalid when
        written.
        """
        for at in range(0, len(content), BLOCK_BYTES):
            problem = wrong_id(memoryview(content)[at : at + BLOCK_BYTES], self.manifest)
            if problem:
                url = self.reader.url / self.shards[number]["file"]
                raise ShardReadError(f"{url}: block {first + at // BLOCK_BYTES} {problem}")

    def _offset(self, number: int, block: int) -> int:
        """Return the byte offset of a block in its shard, or the shard's size if that is
        smaller.
        """
        return min(block * BLOCK_BYTES, self.shards[number]["size_bytes"])

    def fetch(self, number: int, first: int, end: int) -> bytes:
        """Fetch the blocks [first, end) of a shard from the store, verify them and cache them.

        Raises:
            ShardReadError: the store does not deliver them, or delivers them damaged.
        """
        # Both reads share one retry period, so they end before the watchdog's timeout.
        started_at = time.monotonic()
        checksums = self.checksums(number, started_at)

        def find_damage(content: bytes) -> str | None:
            view = memoryview(content)
            for at in range(0, len(view), BLOCK_BYTES):
                block = first + at // BLOCK_BYTES
                if block_checksum(view[at : at + BLOCK_BYTES]) != int(checksums[block]):
                    return (
                        f"block {block} (bytes from {block * BLOCK_BYTES}) is damaged: its "
                        f"checksum differs"
                    )
            return None

        name, start = self.shards[number]["file"], first * BLOCK_BYTES
        content = self.read(name, start, self._offset(number, end), find_damage, started_at)
        self._require_ids(number, first, content)
        num_fetched = num_blocks(len(content))  # inside `+=` this could lose another thread's count
        self.counts["fetched"] += num_fetched
        if self._cached is not None:
            for at in range(0, len(content), BLOCK_BYTES):
                key = self.key(number, first + at // BLOCK_BYTES)
                self._cached.put(key, content[at : at + BLOCK_BYTES])
                if self._unverified and self._cached.write_error is None:
                    self._unverified[key] = 0
        return content

    def checksums(self, number: int, started_at: float | None = None) -> np.ndarray:
        """Return a shard's block checksums, (B,) uint64, from memory, the cache or the store."""
        with self._lock:
            checksums = self._checksums.get(number)
            if checksums is not None:
                self._checksums.move_to_end(number)
                return checksums
        shard = self.shards[number]
        content = b""
        copy = self.cache.directory / shard["sums"] if self.cache is not None else None
        if copy is not None:
            with contextlib.suppress(OSError):
                content = copy.read_bytes()
        find_damage = sha256_check(shard["sums_sha256"])
        if find_damage(content) is not None:
            size = shard["sums_size_bytes"]
            content = self.read(shard["sums"], 0, size, find_damage, started_at)
            if copy is not None:
                with contextlib.suppress(OSError):
                    write_atomically(copy, content, many_writers=True)
        checksums = np.frombuffer(content, "<u8")
        with self._lock:
            self._checksums[number] = checksums
            while len(self._checksums) > MAX_CHECKSUM_SHARDS:
                self._checksums.popitem(last=False)
        return checksums

    def read(
        self,
        name: str,
        start: int | None,
        stop: int | None,
        find_problem: Callable[[bytes], str | None] = lambda content: None,
        started_at: float | None = None,
    ) -> bytes:
        """Return the bytes of an object, like `RangeReader.read`.

        Raises:
            ShardReadError: the store does not deliver them.
        """
        try:
            return self.reader.read(name, start, stop, find_problem, started_at)
        except StoreError as error:
            raise ShardReadError(
                f"{error}. If the store works, copy the object there again; the run resumes from "
                f"its last checkpoint."
            ) from None


def sha256_check(expected: str) -> Callable[[bytes], str | None]:
    """Return a function that returns a problem if its argument has another SHA-256, else None."""

    def find_problem(content: bytes) -> str | None:
        same = hashlib.sha256(content).hexdigest() == expected
        return None if same else "its content differs from the manifest (SHA-256)"

    return find_problem


# -------------------------------------------------------------------------------------------------
# Fetching in the background


class PendingFetch:
    """A queued, running or finished fetch of consecutive blocks, the first of which is `first`."""

    def __init__(self, fetch: Callable[[], bytes], first: int):
        self.first = first
        self._fetch, self._done = fetch, threading.Event()
        self._content: bytes | None = None
        self._error: BaseException | None = None
        self._started = threading.Lock()

    def result(self) -> bytes:
        """Return the bytes of the blocks; fetch them in this thread if no other thread has started
        to.

        Raises:
            The exception that the fetch raised.
        """
        self.run()
        self._done.wait()
        if self._error is not None:
            raise self._error
        assert self._content is not None
        return self._content

    def run(self) -> None:
        """Fetch the bytes, unless another thread has already started to."""
        if not self._started.acquire(blocking=False):
            return
        try:
            self._content = self._fetch()
        except BaseException as error:
            self._error = error
        self._done.set()


class FetchThreads:
    """A queue of fetches, and the threads that run them, which start with the first fetch."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[weakref.ref[PendingFetch]] = queue.SimpleQueue()
        self._started = False
        self._working: set[int] = set()  # ids of the threads that are fetching

    @property
    def idle(self) -> bool:
        """Whether no fetch is queued or running."""
        return self._queue.empty() and not self._working

    def submit(self, fetch: PendingFetch) -> None:
        """Queue a fetch, which is dropped if nothing references it when its turn comes."""
        if not self._started:
            self._started = True
            for _ in range(NUM_THREADS):
                threading.Thread(target=self._work, daemon=True, name="ranges").start()
        self._queue.put(weakref.ref(fetch))

    def _work(self) -> None:
        while True:
            fetch = self._queue.get()()
            if fetch is not None:
                self._working.add(threading.get_ident())
                fetch.run()
                self._working.discard(threading.get_ident())
            fetch = None
