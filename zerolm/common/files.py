"""Files that are either absent or whole: hashing, syncing, atomic writes. Standard library only."""

import functools
import hashlib
import json
import os
import re
import socket
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


def attempt_token() -> str:
    """Return a name that no other process, here or on another machine, has or will have."""
    return f"{host_name()}-{os.getpid()}-{os.urandom(4).hex()}"


@functools.cache
def host_name() -> str:
    """Return the name of this machine, as file names may have it."""
    return re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname())[:32]


def temporary_name(path: Path) -> Path:
    """Return where to write what is renamed to `path` when it is whole, by one writer of many."""
    return path.with_name(f"{path.name}.{attempt_token()}.tmp")


def write_atomically(
    path: str | Path, write: Callable[[BinaryIO], object], many_writers: bool = False
) -> None:
    """Write a file so that it is either absent (or as before) or whole, also after a power cut.

    Args:
        many_writers: others, here or on other machines, may write it at the same time; one that is
            killed then leaves a file that nobody overwrites.
    """
    path = Path(path)
    temporary = temporary_name(path) if many_writers else path.with_name(path.name + ".tmp")
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


def write_json(path: str | Path, value: Any, many_writers: bool = False) -> None:
    """Write JSON atomically, indented, ending in a newline; `write_atomically` has the rest."""
    text = json.dumps(value, indent=2, sort_keys=False, ensure_ascii=False) + "\n"
    write_atomically(path, lambda file: file.write(text.encode()), many_writers)
