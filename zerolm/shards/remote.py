"""The files of a shard directory in a store: blocks come by ranges, ahead of their use.

Who knows what will be read says so (`expect`), and a few threads fetch it in that order. Each block
is compared with its sum when it arrives, fetched again if it differs, kept in this process until
whoever expected it lets go, and in the cache on the disk of the node as long as there is room.
zerolm/shard_files.py has the same methods for what is not remote.
"""

import contextlib
import fcntl
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

from zerolm import store_copies
from zerolm.block_cache import Cache
from zerolm.block_sums import BLOCK_BYTES, num_blocks
from zerolm.errors import ShardError, ShardReadError
from zerolm.manifest import DTYPES, MANIFEST, TOKENIZER_DIRECTORY, checked_manifest, files_of
from zerolm.object_ranges import PATIENCE_SECONDS, Ranges
from zerolm.object_store import Missing, StoreError
from zerolm.range_threads import Arrival, RangeThreads
from zerolm.remote_blocks import RemoteBlocks, sha256_check
from zerolm.url import Url, url_problem

REACH_SECONDS = 30.0  # for the first answers of a store, when a run starts
MOST_BLOCKS = 64  # of one request: 4 MiB, of which most of the time is transfer
FILL_PAUSE_SECONDS = 0.05


class RemoteFiles:
    """Reads the shards of a store.

    Args:
        url: of the directory.
        manifest: checked.

    Attributes:
        cache: None: nothing is kept beyond what is expected. Set before anything is read.
        patience_seconds: how long the store may fail in the middle of a run.
    """

    is_remote = True
    wants_notice = True

    def __init__(self, url: Url, manifest: dict[str, Any], cache: Cache | None = None):
        self.url, self.manifest, self.cache = url, manifest, cache
        self.dtype = DTYPES[manifest["dtype"]]
        self.patience_seconds = PATIENCE_SECONDS
        self._begin()

    @classmethod
    def open(cls, url: Url) -> "RemoteFiles":
        """Read the manifest.

        Raises:
            ShardError: the URL is wrong, the store does not answer, or there is no manifest.
        """
        problem = url_problem(str(url))
        if problem:
            raise ShardError(f"{url}: {problem}")
        try:
            content = Ranges(url, REACH_SECONDS).read(MANIFEST, wrong=_not_json)
        except Missing:
            raise ShardError(
                f"{url}: no {MANIFEST} there, so these are no token shards (or not all of them "
                f"are copied: the manifest comes last). Check the URL."
            ) from None
        except StoreError as error:
            raise ShardError(
                f"{error}. Check the URL, the network and the credentials in the environment."
            ) from None
        return cls(url, checked_manifest(content, url / MANIFEST))

    def problems(self) -> list[str]:
        """Return what is wrong with the files as far as it shows without reading them all.

        Asks for the list of objects, and for the first and the last block.
        """
        without = [shard["file"] for shard in self.manifest["shards"] if "sums" not in shard]
        if without:
            return [
                f"{self.url / without[0]}: has no sums of its blocks, without which nothing says "
                f"whether it arrived as it was written. Tokenize again, or copy the shards here "
                f"and use them by their path."
            ]
        if os.environ.get("LOCAL_RANK", "0") != "0":
            return []  # one process of a node looks
        try:
            sizes = Ranges(self.url, REACH_SECONDS).sizes()
        except StoreError as error:
            return [f"{error}. Check the URL, the network and the credentials."]
        problems = []
        for shard in self.manifest["shards"]:
            for name, size, _ in files_of(shard):
                if sizes is not None and sizes.get(name) != size:
                    found = f"{sizes[name]} bytes" if name in sizes else "missing"
                    problems.append(
                        f"{self.url / name}: {found}, the manifest says {size} bytes. Copy it "
                        f"there again."
                    )
        return problems or self._problems_of_reading()

    def _problems_of_reading(self) -> list[str]:
        blocks = RemoteBlocks(Ranges(self.url, REACH_SECONDS), self.manifest, None)
        last = len(self.manifest["shards"]) - 1
        end = num_blocks(self.manifest["shards"][last]["size_bytes"])
        try:
            blocks.fetch(0, 0, 1)
            blocks.fetch(last, end - 1, end)
        except ShardReadError as error:
            return error.problems
        return []

    # ---- What a process has of it

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._blocks: RemoteBlocks | None = None
        self._threads = RangeThreads()
        self._arriving: WeakValueDictionary[int, Arrival] = WeakValueDictionary()

    def __getstate__(self) -> dict[str, Any]:
        names = ("url", "manifest", "cache", "dtype", "patience_seconds")
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()

    def _own(self) -> RemoteBlocks:
        """Return this process's blocks: a forked one has none of its parent's threads."""
        if self._pid != os.getpid():
            self._begin()
        if self._blocks is None:
            ranges = Ranges(self.url, self.patience_seconds)
            self._blocks = RemoteBlocks(ranges, self.manifest, self.cache)
        return self._blocks

    @property
    def counts(self) -> Counter[str]:
        """What this process has had from the cache and from the store so far.

        Blocks: `hits` and `fetched`; `requests`, of which some were `repeated`, and their `bytes`.
        """
        if self._pid != os.getpid() or self._blocks is None:
            return Counter()
        return self._blocks.counts + self._blocks.ranges.counts

    # ---- Reading

    def expect(self, ranges: Iterable[tuple[int, int, int]]) -> list[Arrival]:
        """Begin to fetch what will be read, in this order, unless it is here.

        Args:
            ranges: (shard, first id, end) each.

        Returns:
            What keeps the blocks in memory, as long as it is held; they are also in the cache.
        """
        fetched, arriving = self._missing(self._own(), ranges)
        for arrival in fetched:
            self._threads.submit(arrival)
        return arriving + fetched

    def _missing(
        self, blocks: RemoteBlocks, ranges: Iterable[tuple[int, int, int]]
    ) -> tuple[list[Arrival], list[Arrival]]:
        """Return arrivals of what is not here: those that have to be begun, and those that are."""
        arrivals: dict[Arrival, None] = {}
        begun: list[Arrival] = []
        missing: dict[tuple[int, int], None] = {}
        seen = set()
        for number, start, stop in ranges:
            for block in self._blocks_of(start, stop):
                if (number, block) in seen:
                    continue
                seen.add((number, block))
                arrival = self._arriving.get(blocks.key(number, block))
                if arrival is not None:
                    arrivals[arrival] = None
                elif not blocks.is_here(number, block):
                    missing[number, block] = None
        for number, first, end in _runs(missing):
            arrival = Arrival(partial(blocks.fetch, number, first, end), first)
            begun.append(arrival)
            for block in range(first, end):
                self._arriving[blocks.key(number, block)] = arrival
        return begun, list(arrivals)

    def ids(self, number: int, start: int, stop: int) -> np.ndarray:
        """Return the ids at [start, stop) of a shard; waits for what is not here.

        Raises:
            ShardReadError: the store does not give them as they were written.
        """
        blocks, size = self._own(), self.dtype.itemsize
        parts: list[bytes | memoryview] = []
        for block in self._blocks_of(start, stop):
            base = block * BLOCK_BYTES
            first, end = max(start * size - base, 0), min(stop * size - base, BLOCK_BYTES)
            arrival = self._arriving.get(blocks.key(number, block))
            if arrival is None:
                parts.append(blocks.part(number, block, first, end))
            else:
                at = (block - arrival.first) * BLOCK_BYTES
                parts.append(memoryview(arrival.result())[at + first : at + end])
        return np.frombuffer(parts[0] if len(parts) == 1 else b"".join(parts), self.dtype)

    def shard(self, number: int) -> np.ndarray:
        """Return all ids of a shard."""
        return self.ids(number, 0, self.manifest["shards"][number]["num_tokens"])

    def bytes_of(self, name: str, start: int | None = None, stop: int | None = None) -> bytes:
        """Return bytes of an object of the directory as they come, unchecked."""
        return self._own().read(name, start, stop)

    def sidecar(self, number: int, key: str) -> bytes:
        """Return what lies beside a shard, checked: `index`, `sums` or `origins`."""
        shard = self.manifest["shards"][number]
        wrong = sha256_check(shard[f"{key}_sha256"])
        return self._own().read(shard[key], 0, shard[f"{key}_size_bytes"], wrong)

    def index(self, number: int) -> bytes:
        """Return the `index` beside a shard, from this machine if it was fetched before."""
        digest = self.manifest["shards"][number]["index_sha256"]
        return store_copies.index(digest, partial(self.sidecar, number, "index"))

    def tokenizer_directory(self) -> Path:
        """Return a directory of this machine with the copy of the tokenizer, fetched and checked.

        Raises:
            ShardReadError: it is not to be had as the manifest says.
        """

        def fetch(entry: dict[str, Any]) -> bytes:
            name, wrong = f"{TOKENIZER_DIRECTORY}/{entry['file']}", sha256_check(entry["sha256"])
            return self._own().read(name, 0, entry["size_bytes"], wrong)

        return store_copies.tokenizer(self.manifest["tokenizer"].get("files", []), fetch)

    def _blocks_of(self, start: int, stop: int) -> range:
        size = self.dtype.itemsize
        return range(start * size // BLOCK_BYTES, -(-stop * size // BLOCK_BYTES))

    # ---- A mirror

    def mirror(self) -> None:
        """Fetch everything behind what is read, if all of it has room; one process of a node does.

        Whole shards in pieces of a few MiB, in idle times only.
        """
        blocks = self._own()
        if self.cache is None or not blocks.is_mirror:
            return
        try:
            mark = open(self.cache.directory / "filling", "ab")
        except OSError:  # a full disk: what is read is fetched as it is needed
            return
        try:
            fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            mark.close()
            return
        fill = partial(self._fill, blocks, mark)
        threading.Thread(target=fill, daemon=True, name="mirror").start()

    def _fill(self, blocks: RemoteBlocks, mark: Any) -> None:
        with mark, contextlib.suppress(ShardReadError):  # whoever needs it will say so
            for number, shard in enumerate(self.manifest["shards"]):
                count = num_blocks(shard["size_bytes"])
                for first in range(0, count, MOST_BLOCKS):
                    time.sleep(FILL_PAUSE_SECONDS)
                    while not self._threads.idle:
                        time.sleep(FILL_PAUSE_SECONDS)
                    ids = BLOCK_BYTES // self.dtype.itemsize
                    end = min(first + MOST_BLOCKS, count) * ids
                    for arrival in self._missing(blocks, [(number, first * ids, end)])[0]:
                        arrival.come()


def _not_json(content: bytes) -> str | None:
    """Say why a manifest, whose size nothing tells, cannot be all of it."""
    try:
        json.loads(content)
    except ValueError as error:
        return f"not JSON ({error}): cut off, or no manifest"
    return None


def _runs(blocks: Iterable[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Return (shard, first block, end) of neighbours, in the order in which they are needed."""
    needed = {block: place for place, block in enumerate(blocks)}
    runs: list[tuple[int, int, int, int]] = []
    for number, block in sorted(needed):
        place = needed[number, block]
        if runs and runs[-1][1] == number and runs[-1][3] == block:
            before, _, first, _ = runs[-1]
            if block - first < MOST_BLOCKS:
                runs[-1] = min(before, place), number, first, block + 1
                continue
        runs.append((place, number, block, block + 1))
    return [run[1:] for run in sorted(runs)]
