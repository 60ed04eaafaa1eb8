"""Files that are either absent or whole: hashing, syncing, atomic writes. Standard library only."""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

HASH_CHUNK_BYTES = 1 << 22


def sha256_file(path: str | Path) -> str:
    """Return the hex SHA-256 of a file, read in chunks."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(HASH_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def sync_directory(path: str | Path) -> None:
    """Make renames inside a directory durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_file(path: str | Path) -> None:
    """Make what was written to a file durable."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def write_atomically(
    path: str | Path, write: Callable[[BinaryIO], object], many_writers: bool = False
) -> None:
    """Write a file so that it is either absent (or as before) or whole, also after a power cut.

    Args:
        many_writers: other processes may write it at the same time; one that is killed then leaves
            a file that nobody overwrites.
    """
    path = Path(path)
    suffix = f".{os.getpid()}.tmp" if many_writers else ".tmp"
    temporary = path.with_name(path.name + suffix)
    try:
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def write_json(path: str | Path, value: Any) -> None:
    """Write JSON atomically, indented, ending in a newline."""
    text = json.dumps(value, indent=2, sort_keys=False, ensure_ascii=False) + "\n"
    write_atomically(path, lambda file: file.write(text.encode()))
