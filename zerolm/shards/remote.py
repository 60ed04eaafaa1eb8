"""Read the files of a shard directory in a store, and fetch blocks ahead of use.

The caller announces its reads (`prefetch`), and a few threads fetch the blocks in that order. Each
block is compared with its checksum on arrival, and fetched again if it differs. A block stays in
memory while the caller references its fetch, and in the node's disk cache while there is room.
`LocalFiles` has the same methods for a local directory.
"""

import contextlib
import json
import os
import threading
import time
from collections import Counter
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from zerolm.common.errors import ShardError, ShardReadError
from zerolm.common.locks import FileLock
from zerolm.common.store import RETRY_SECONDS, Missing, StoreError
from zerolm.common.url import Url, url_problem
from zerolm.shards import local_copies
from zerolm.shards.block_cache import Cache
from zerolm.shards.checksums import BLOCK_BYTES, num_blocks
from zerolm.shards.manifest import DTYPES, MANIFEST, TOKENIZER_DIRECTORY, files_of, parse_manifest
from zerolm.shards.range_reader import RangeReader
from zerolm.shards.remote_blocks import FetchThreads, PendingFetch, RemoteBlocks, sha256_check

STARTUP_RETRY_SECONDS = 30.0  # time allowed for a store's first responses when a run starts
MAX_BLOCKS = 64  # per request: 4 MiB, dominated by transfer rather than latency
MIRROR_PAUSE_SECONDS = 0.05  # between two checks for idle threads


class RemoteFiles:
    """Reads shards in a store.

    Attributes:
        cache: the node's cache, set before the first read; None: only prefetched blocks are kept.
        retry_seconds: how long failed reads are retried during a run.
    """

    is_remote = True
    wants_prefetch = True

    def __init__(self, url: Url, manifest: dict[str, Any], cache: Cache | None = None):
        self.url, self.manifest, self.cache = url, manifest, cache
        self.head, self.shards = manifest, manifest["shards"]
        self.dtype = DTYPES[manifest["dtype"]]
        self.retry_seconds = RETRY_SECONDS
        self._reset()

    @classmethod
    def open(cls, url: Url) -> "RemoteFiles":
        """Read the manifest.

        Raises:
            ShardError: the URL is invalid, the store does not answer, or there is no manifest.
        """
        problem = url_problem(str(url))
        if problem:
            raise ShardError(f"{url}: {problem}")
        try:
            content = RangeReader(url, STARTUP_RETRY_SECONDS).read(
                MANIFEST, find_problem=_json_problem
            )
        except Missing:
            raise ShardError(
                f"{url}: no {MANIFEST} there, so this is not a token shard directory (or its copy "
                "is incomplete: the manifest is copied last). Check the URL."
            ) from None
        except StoreError as error:
            raise ShardError(
                f"{error}. Check the URL, the network and the credentials in the environment."
            ) from None
        return cls(url, parse_manifest(content, url / MANIFEST))

    def problems(self) -> list[str]:
        """Return the problems that can be found without reading all files.

        One process per node lists the objects, and fetches the first and the last block.
        """
        without = [shard["file"] for shard in self.manifest["shards"] if "sums" not in shard]
        if without:
            return [
                f"{self.url / without[0]}: has no block checksums, so damage in transfer could not "
                f"be detected. Tokenize again, or copy the shards here and use their path."
            ]
        if os.environ.get("LOCAL_RANK", "0") != "0":
            return []
        try:
            sizes = RangeReader(self.url, STARTUP_RETRY_SECONDS).sizes()
        except StoreError as error:
            return [f"{error}. Check the URL, the network and the credentials."]
        problems = []
        for shard in self.manifest["shards"]:
            for name, size, _ in files_of(shard):
                if sizes is not None and sizes.get(name) != size:
                    actual = f"{sizes[name]} bytes" if name in sizes else "missing"
                    problems.append(
                        f"{self.url / name}: {actual}, but the manifest says {size} bytes. Copy "
                        "it there again."
                    )
        return problems or self._first_read_problems()

    def size_problems(self) -> list[str]:
        """Return an empty list, because no file in a store is mapped."""
        return []

    def check_sizes(self) -> None:
        """Do nothing, because `problems` has checked all sizes."""

    def _first_read_problems(self) -> list[str]:
        blocks = RemoteBlocks(RangeReader(self.url, STARTUP_RETRY_SECONDS), self.manifest, None)
        last = len(self.manifest["shards"]) - 1
        end = num_blocks(self.manifest["shards"][last]["size_bytes"])
        try:
            blocks.fetch(0, 0, 1)
            blocks.fetch(last, end - 1, end)
        except ShardReadError as error:
            return error.problems
        return []

    # ---- State of one process

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._process_blocks: RemoteBlocks | None = None
        self._threads = FetchThreads()
        self._pending: WeakValueDictionary[int, PendingFetch] = WeakValueDictionary()

    def __getstate__(self) -> dict[str, Any]:
        names = ("url", "manifest", "cache", "dtype", "retry_seconds")
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.head, self.shards = self.manifest, self.manifest["shards"]
        self._reset()

    def _blocks(self) -> RemoteBlocks:
        """Return this process's blocks. A forked process needs its own, because it inherits no
        threads.
        """
        if self._pid != os.getpid():
            self._reset()
        if self._process_blocks is None:
            reader = RangeReader(self.url, self.retry_seconds)
            self._process_blocks = RemoteBlocks(reader, self.manifest, self.cache)
        return self._process_blocks

    @property
    def counts(self) -> Counter[str]:
        """Return counts of what this process has read so far from the cache and the store.

        Blocks: `hits` and `fetched`. Requests: `requests`, `repeated` requests and received
            `bytes`.
        """
        if self._pid != os.getpid() or self._process_blocks is None:
            return Counter()
        return self._process_blocks.counts + self._process_blocks.reader.counts

    # ---- Reading

    def prefetch(self, ranges: Iterable[tuple[int, int, int]]) -> list[PendingFetch]:
        """Start fetching the blocks in these (shard, first id, end) ranges in order, unless cached.

        Returns: The fetches. A block stays in memory while the caller references its fetch.
        """
        new, running = self._missing(self._blocks(), ranges)
        for fetch in new:
            self._threads.submit(fetch)
        return running + new

    def _missing(
        self, blocks: RemoteBlocks, ranges: Iterable[tuple[int, int, int]]
    ) -> tuple[list[PendingFetch], list[PendingFetch]]:
        """Return the fetches for blocks that are not cached: (new fetches, pending fetches)."""
        pending: dict[PendingFetch, None] = {}
        new: list[PendingFetch] = []
        missing: dict[tuple[int, int], None] = {}
        seen = set()
        for number, start, stop in ranges:
            for block in self._block_range(start, stop):
                if (number, block) in seen:
                    continue
                seen.add((number, block))
                fetch = self._pending.get(blocks.key(number, block))
                if fetch is not None:
                    pending[fetch] = None
                elif not blocks.is_cached(number, block):
                    missing[number, block] = None
        for number, first, end in _consecutive(missing):
            fetch = PendingFetch(partial(blocks.fetch, number, first, end), first)
            new.append(fetch)
            for block in range(first, end):
                self._pending[blocks.key(number, block)] = fetch
        return new, list(pending)

    def ids(self, number: int, start: int, stop: int, check_ids: bool = True) -> np.ndarray:
        """Return the ids at [start, stop) in a shard; wait for blocks that are being fetched.

        All ids are compared with the vocabulary size, regardless of `check_ids`.

        Raises:
            ShardReadError: the store does not deliver a block, or delivers it damaged.
        """
        blocks, size = self._blocks(), self.dtype.itemsize
        parts: list[bytes | memoryview] = []
        for block in self._block_range(start, stop):
            base = block * BLOCK_BYTES
            first, end = max(start * size - base, 0), min(stop * size - base, BLOCK_BYTES)
            fetch = self._pending.get(blocks.key(number, block))
            if fetch is None:
                parts.append(blocks.read_part(number, block, first, end))
            else:
                at = (block - fetch.first) * BLOCK_BYTES
                parts.append(memoryview(fetch.result())[at + first : at + end])
        return np.frombuffer(parts[0] if len(parts) == 1 else b"".join(parts), self.dtype)

    def shard(self, number: int) -> np.ndarray:
        """Return all ids of a shard."""
        return self.ids(number, 0, self.manifest["shards"][number]["num_tokens"])

    def read_bytes(self, name: str, start: int | None = None, stop: int | None = None) -> bytes:
        """Return the bytes [start, stop) of an object, without verifying them."""
        return self._blocks().read(name, start, stop)

    def read_sidecar(self, number: int, key: str) -> bytes:
        """Return the verified content of a shard's `index`, `sums` or `origins`."""
        shard = self.manifest["shards"][number]
        check = sha256_check(shard[f"{key}_sha256"])
        return self._blocks().read(shard[key], 0, shard[f"{key}_size_bytes"], check)

    def read_file(self, name: str, digest: str) -> bytes:
        """Return the content of an object after verifying its SHA-256."""
        return self._blocks().read(name, None, None, sha256_check(digest))

    def read_index(self, number: int) -> bytes:
        """Return the content of a shard's `index` file, from a local copy if there is one."""
        digest = self.manifest["shards"][number]["index_sha256"]
        return local_copies.index_content(digest, partial(self.read_sidecar, number, "index"))

    def tokenizer_directory(self) -> Path:
        """Fetch the tokenizer if necessary; return a local directory with a verified copy.

        Raises:
            ShardReadError: the store's files do not match the manifest, or cannot be read.
        """

        def fetch(entry: dict[str, Any]) -> bytes:
            name, check = f"{TOKENIZER_DIRECTORY}/{entry['file']}", sha256_check(entry["sha256"])
            return self._blocks().read(name, 0, entry["size_bytes"], check)

        files = self.manifest["tokenizer"].get("files", [])
        return local_copies.tokenizer_directory(files, fetch)

    def _block_range(self, start: int, stop: int) -> range:
        """Return the indices of the blocks that contain the ids at [start, stop) in a shard."""
        size = self.dtype.itemsize
        return range(start * size // BLOCK_BYTES, -(-stop * size // BLOCK_BYTES))

    # ---- Mirroring

    def start_mirror(self) -> None:
        """Start fetching all shards while threads are idle, if the cache has room for them.

        Only one process per node does this, in requests of a few MiB.
        """
        blocks = self._blocks()
        if self.cache is None or not blocks.is_mirror:
            return
        try:
            lock = FileLock(self.cache.directory / "filling")
        # If another process is filling the cache or the disk is full, reads fetch blocks on demand.
        except OSError:
            return
        if lock.unsupported is not None:
            return lock.release()
        fill = partial(self._fill_mirror, blocks, lock)
        threading.Thread(target=fill, daemon=True, name="mirror").start()

    def _fill_mirror(self, blocks: RemoteBlocks, lock: FileLock) -> None:
        # An error is raised again when the block is read.
        with lock, contextlib.suppress(ShardReadError):
            for number, shard in enumerate(self.manifest["shards"]):
                count = num_blocks(shard["size_bytes"])
                for first in range(0, count, MAX_BLOCKS):
                    time.sleep(MIRROR_PAUSE_SECONDS)
                    while not self._threads.idle:
                        time.sleep(MIRROR_PAUSE_SECONDS)
                    ids = BLOCK_BYTES // self.dtype.itemsize
                    end = min(first + MAX_BLOCKS, count) * ids
                    for fetch in self._missing(blocks, [(number, first * ids, end)])[0]:
                        fetch.run()


def _json_problem(content: bytes) -> str | None:
    """Return a problem if the content of a manifest is not complete JSON, else None."""
    try:
        json.loads(content)
    except ValueError as error:
        return f"not JSON ({error}): truncated, or not a manifest"
    return None


def _consecutive(blocks: Iterable[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Merge neighbouring blocks into requests, in the order in which their blocks are first needed.

    A request is (shard, first block, end).
    """
    needed = {block: place for place, block in enumerate(blocks)}
    runs: list[tuple[int, int, int, int]] = []
    for number, block in sorted(needed):
        place = needed[number, block]
        if runs and runs[-1][1] == number and runs[-1][3] == block:
            before, _, first, _ = runs[-1]
            if block - first < MAX_BLOCKS:
                runs[-1] = min(before, place), number, first, block + 1
                continue
        runs.append((place, number, block, block + 1))
    return [run[1:] for run in sorted(runs)]
