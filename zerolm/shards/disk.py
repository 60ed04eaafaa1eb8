"""The files of a shard directory on this machine: their sizes, maps and SHA-256.

Knows the entries of shards in a manifest, but not the content of the files.
"""

import contextlib
import hashlib
import mmap
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from zerolm.common.errors import ShardReadError
from zerolm.shards.manifest import FILE_KEYS

MAX_SAMPLED_FILES = 4096  # whose sizes a node compares when a run starts: 10 ms on a local disk


def require_digest(path: Path, content: bytes | mmap.mmap, digest: str) -> None:
    """Raise a `ShardReadError` if a content has another SHA-256."""
    if hashlib.sha256(content).hexdigest() != digest:
        raise ShardReadError(
            f"{path}: its SHA-256 differs from the manifest. The file is damaged: restore it, or "
            f"tokenize again."
        )


def map_file(path: Path, size: int) -> mmap.mmap:
    """Map a file of a known size for reading.

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
        raise ShardReadError(
            f"{path}: can no longer be opened with {size} bytes ({error}). Restore it."
        ) from error


def size_problem(path: Path, size: int, actual: int | None) -> str:
    """Return the message on a file whose size differs from the manifest; None: it is missing."""
    if actual is None:
        return f"{path}: the manifest lists it, but it is missing. Restore it, or tokenize again."
    return (
        f"{path}: {actual} bytes, the manifest says {size}. "
        f"The file was truncated or overwritten: restore it, or tokenize again."
    )


def size_problems(directory: Path, shards: Iterable[dict[str, Any]]) -> list[str]:
    """Return the files of shards that are missing or have another size, a line each."""
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
    """Return what `size_problems` does for evenly spaced shards, without listing the directory.

    Each node checks others: the distance is odd, and first ranks of nodes differ by even numbers.
    """
    distance = len(shards) * len(FILE_KEYS) // MAX_SAMPLED_FILES + 1 | 1
    first = int(os.environ.get("RANK", "0")) % distance
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


def _file_sizes(directory: Path) -> dict[str, int]:
    """Return {name: size in bytes} of the files of a directory.

    In listing order: network file systems send the sizes along with the listing.
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
