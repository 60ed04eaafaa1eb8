"""The bounded cache of a node for token shards in stores: who has how much of it, and where.

    DIRECTORY/
      <source>-<slots>/   blocks, tags (zerolm/block_cache.py), the sums of the shards

A source that fits its share is kept whole; what it leaves is the others'. What other runs left
there is removed when a run begins, unless a process uses it.
"""

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from zerolm.block_cache import TAG_BYTES, WAYS, Cache, held_bytes, slots_within
from zerolm.block_sums import BLOCK_BYTES, num_blocks
from zerolm.own_directory import own_directory, own_problem
from zerolm.settings import Settings
from zerolm.shards import Source
from zerolm.shares import split_evenly
from zerolm.values import shown_bytes

DEFAULT_BYTES = 32 << 30
LEAST_BYTES = WAYS * (BLOCK_BYTES + TAG_BYTES)  # one set of a source
PATIENCE_SHARE = 0.5  # of --hang_timeout: the store's silence is told of before the run is ended


def directory_of(settings: Settings) -> Path:
    """Return where the cache is: on this node, since every node has its own."""
    return Path(settings.data_cache) if settings.data_cache else own_directory("data-cache")


def prepare(settings: Settings, sources: Sequence[Source]) -> list[str]:
    """Give each source that is in a store its part of the cache; return problems, a line each.

    Writes nothing: the cache is made when the first block is read.
    """
    remote = [source for source in sources if source.is_remote]
    if not remote:
        return [
            f"{settings.where(name)}: {getattr(settings, name)}, but all token shards are on this "
            f"machine. Remove it, or give a URL to --data."
            for name in ("data_cache", "data_cache_bytes")
            if name in settings.explicit
        ]
    directory, size = directory_of(settings), settings.data_cache_bytes or DEFAULT_BYTES
    overhead = [_overhead(source) for source in remote]
    blocks = [_blocks(source) for source in remote]
    least = sum(overhead) + LEAST_BYTES * len(remote)
    if size < least:
        return [
            f"{settings.where('data_cache_bytes')}: {size}, must be at least {least} for "
            f"{len(remote)} sources in stores, and is better 1% of their "
            f"{shown_bytes(sum(blocks) * BLOCK_BYTES)}. Raise it."
        ]
    shares = split_evenly(size - sum(overhead), [count * BLOCK_BYTES for count in blocks])
    slots = [slots_within(share, count) for share, count in zip(shares, blocks, strict=True)]
    names = [
        f"{source.fingerprint[:16]}-{count}" for source, count in zip(remote, slots, strict=True)
    ]
    for source, name, count in zip(remote, names, slots, strict=True):
        source.files.cache = Cache(directory / name, count, tuple(names))
        if settings.hang_timeout:
            source.files.patience_seconds = min(
                source.files.patience_seconds, PATIENCE_SHARE * settings.hang_timeout
            )
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return []
    wanted = sum(overhead) + sum(slots) * BLOCK_BYTES
    return _room_problems(settings, directory, wanted, names)


def figures(sources: Sequence[Source]) -> dict[str, str]:
    """Return a line for the cache, if there is one."""
    caches = [source.files.cache for source in sources if source.is_remote and source.files.cache]
    if not caches:
        return {}
    size = sum(cache.num_slots for cache in caches) * BLOCK_BYTES
    total = sum(_blocks(source) for source in sources if source.is_remote) * BLOCK_BYTES
    what = "all" if size >= total else f"{shown_bytes(size)}"
    return {"data cache": f"{caches[0].directory.parent}, {what} of {shown_bytes(total)} in stores"}


def _blocks(source: Source) -> int:
    return sum(num_blocks(shard["size_bytes"]) for shard in source.manifest["shards"])


def _overhead(source: Source) -> int:
    """Return what a source needs beside its blocks: the sums of its shards, and small files."""
    page = 4096
    return 4 * page + sum(
        -(-shard.get("sums_size_bytes", 0) // page) * page for shard in source.manifest["shards"]
    )


def _room_problems(
    settings: Settings, directory: Path, wanted: int, names: Sequence[str]
) -> list[str]:
    where = f"{settings.where('data_cache')}: {directory}"
    if settings.data_cache is None and (problem := own_problem(directory)):
        return [
            f"{where}, {problem}: what lies there cannot be trusted. Remove it (or have its owner "
            f"do so), or give --data_cache a directory."
        ]
    existing = directory
    while not os.path.lexists(existing):
        existing = existing.parent
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
        stat = os.statvfs(existing)
    except OSError as error:
        return [
            f"{where}, nothing can be written there ({error.strerror}). Give --data_cache a "
            f"directory on a disk of this node."
        ]
    if settings.data_cache is None and _is_in_memory(existing, Path("/proc/self/mountinfo")):
        return [
            f"{where}, the directory for temporary files is in this node's memory (tmpfs), which a "
            f"cache of {shown_bytes(wanted)} would take from the ranks. Give --data_cache a "
            f"directory on a disk of this node, or that one if you mean it."
        ]
    has = stat.f_bavail * stat.f_frsize + held_bytes(directory, names)
    if has < wanted:
        return [
            f"{where}, its file system has {shown_bytes(has)} for a cache of "
            f"{shown_bytes(wanted)}. Lower --data_cache_bytes, or choose another --data_cache."
        ]
    return []


def _is_in_memory(path: Path, mounts: Path) -> bool:
    """Tell whether a path lies in memory, by Linux's list of mounts; False where there is none."""
    try:
        lines = mounts.read_text().splitlines()
    except OSError:
        return False
    path, depth, kind = path.resolve(), -1, ""
    for line in lines:  # the last one of a place hides those before it
        words, _, more = line.partition(" - ")
        place = Path(words.split()[4].replace("\\040", " "))
        if path.is_relative_to(place) and len(place.parts) >= depth:
            depth, kind = len(place.parts), more.split()[0]
    return kind in ("tmpfs", "ramfs")
