"""The files of a shard directory on this machine: their sizes, maps and SHA-256.

Knows neither the manifest nor the content of the files.
"""

import contextlib
import hashlib
import mmap
import os
from pathlib import Path

from zerolm.common.errors import ShardReadError


def require_digest(path: Path, content: bytes | mmap.mmap, digest: str) -> None:
    """Raise a `ShardReadError` if a content has another SHA-256."""
    if hashlib.sha256(content).hexdigest() != digest:
        raise ShardReadError(
            f"{path}: its SHA-256 differs from the manifest. The file is damaged: restore it, or "
            f"tokenize again."
        )


def map_file(path: Path, size: int) -> mmap.mmap:
    """Map a file for reading.

    Raises:
        ShardReadError: the file was removed or truncated since the source was opened.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return mmap.mmap(descriptor, size, access=mmap.ACCESS_READ)
        finally:
            os.close(descriptor)
    except (OSError, ValueError) as error:  # ValueError: the file is shorter
        raise ShardReadError(
            f"{path}: can no longer be opened with {size} bytes ({error}). Restore it."
        ) from error


def file_sizes(directory: Path) -> dict[str, int]:
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
