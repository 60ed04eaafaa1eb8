"""Divide a node's bounded cache among the remote sources, and check its directory.

    DIRECTORY/
      <source>-<slots>/   a `BlockCache` (blocks, tags), and the checksum files of the shards

A source that is smaller than an even share is cached completely, and the remainder of its share is
divided among the other sources. A starting run removes the caches that other runs have left, unless
a process still uses them.
"""

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from zerolm.common.files import privacy_problem, private_directory
from zerolm.common.values import shown_bytes, split_evenly
from zerolm.config.settings import Settings
from zerolm.shards.block_cache import (
    TAG_BYTES,
    WAYS,
    Cache,
    num_slots_within,
    reclaimable_bytes,
)
from zerolm.shards.checksums import BLOCK_BYTES, num_blocks
from zerolm.shards.reader import Source

DEFAULT_BYTES = 32 << 30
MIN_BYTES = WAYS * (BLOCK_BYTES + TAG_BYTES)  # one set of slots per source
# Share of --hang_timeout, so the store's error is reported before a hang is detected.
RETRY_SHARE = 0.5


def cache_directory(settings: Settings) -> Path:
    """Return the directory for all caches on this node; nodes do not share it."""
    return Path(settings.data_cache) if settings.data_cache else private_directory("data-cache")


def allocate(settings: Settings, sources: Sequence[Source]) -> list[str]:
    """Allocate each remote source its share of the cache; return problems, one per line.

    Nothing is written yet: a cache is created when its first block is read.
    """
    remote = [source for source in sources if source.is_remote]
    if not remote:
        return [
            f"{settings.where(name)}: {getattr(settings, name)}, but all token shards are on this "
            f"machine. Remove it, or give a URL to --data."
            for name in ("data_cache", "data_cache_bytes")
            if name in settings.explicit
        ]
    directory, size = cache_directory(settings), settings.data_cache_bytes or DEFAULT_BYTES
    overhead = [_overhead_bytes(source) for source in remote]
    blocks = [_num_blocks(source) for source in remote]
    minimum = sum(overhead) + MIN_BYTES * len(remote)
    if size < minimum:
        return [
            f"{settings.where('data_cache_bytes')}: {size} must be at least {minimum} for "
            f"{len(remote)} sources in stores, and should be at least 1% of their "
            f"{shown_bytes(sum(blocks) * BLOCK_BYTES)}. Raise it."
        ]
    shares = split_evenly(size - sum(overhead), [count * BLOCK_BYTES for count in blocks])
    slots = [num_slots_within(share, count) for share, count in zip(shares, blocks, strict=True)]
    names = [
        f"{source.fingerprint[:16]}-{count}" for source, count in zip(remote, slots, strict=True)
    ]
    for source, name, count in zip(remote, names, slots, strict=True):
        source.files.cache = Cache(directory / name, count, tuple(names))
        if settings.hang_timeout:
            source.files.retry_seconds = min(
                source.files.retry_seconds, RETRY_SHARE * settings.hang_timeout
            )
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return []
    needed = sum(overhead) + sum(slots) * BLOCK_BYTES
    return _directory_problems(settings, directory, needed, names)


def figures(sources: Sequence[Source]) -> dict[str, str]:
    """Return {"data cache": description} for display, or {} if there is no cache."""
    caches = [source.files.cache for source in sources if source.is_remote and source.files.cache]
    if not caches:
        return {}
    size = sum(cache.num_slots for cache in caches) * BLOCK_BYTES
    total = sum(_num_blocks(source) for source in sources if source.is_remote) * BLOCK_BYTES
    part = "all" if size >= total else f"{shown_bytes(size)}"
    return {"data cache": f"{caches[0].directory.parent}, {part} of {shown_bytes(total)} in stores"}


def _num_blocks(source: Source) -> int:
    return sum(num_blocks(shard["size_bytes"]) for shard in source.manifest["shards"])


def _overhead_bytes(source: Source) -> int:
    """Return the bytes on disk needed for a source's checksums and other small files."""
    page = 4096
    return 4 * page + sum(
        -(-shard.get("sums_size_bytes", 0) // page) * page for shard in source.manifest["shards"]
    )


def _directory_problems(
    settings: Settings, directory: Path, needed: int, names: Sequence[str]
) -> list[str]:
    """Return a problem if a directory cannot hold caches: not private, not writable, in memory, or
    full.
    """
    where = f"{settings.where('data_cache')}: {directory}"
    if settings.data_cache is None and (problem := privacy_problem(directory)):
        return [
            f"{where} {problem}, so its content cannot be trusted. Remove it (or have its owner "
            "remove it), or give --data_cache a directory."
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
            f"{where} is not writable ({error.strerror}). Give --data_cache a directory on a disk "
            f"of this node."
        ]
    if settings.data_cache is None and _is_in_memory(existing, Path("/proc/self/mountinfo")):
        return [
            f"{where}: the directory for temporary files is in this node's memory (tmpfs), so a "
            f"cache of {shown_bytes(needed)} would use memory that the ranks need. Give "
            "--data_cache a directory on a disk of this node, or this directory explicitly."
        ]
    available = stat.f_bavail * stat.f_frsize + reclaimable_bytes(directory, names)
    if available < needed:
        return [
            f"{where}: its file system has {shown_bytes(available)} free, but the cache needs "
            f"{shown_bytes(needed)}. Lower --data_cache_bytes, or choose another --data_cache."
        ]
    return []


def _is_in_memory(path: Path, mounts: Path) -> bool:
    """Return whether a path is on a file system in RAM according to mountinfo; False if unknown."""
    try:
        lines = mounts.read_text().splitlines()
    except OSError:
        return False
    path, depth, kind = path.resolve(), -1, ""
    for line in lines:  # a later mount hides earlier mounts at the same mount point
        fields, _, rest = line.partition(" - ")
        mount_point = Path(fields.split()[4].replace("\\040", " "))
        if path.is_relative_to(mount_point) and len(mount_point.parts) >= depth:
            depth, kind = len(mount_point.parts), rest.split()[0]
    return kind in ("tmpfs", "ramfs")
