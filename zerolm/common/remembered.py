"""Values that follow from known inputs alone, kept between processes in the user's cache directory.

A command that wants this opens the memory; without it `recall` only computes. The key of a value
has its inputs, the names and versions of all installed packages, and a digest of zerolm's sources
and of those that all models of transformers share, so an update forgets everything. A file per
value is replaced as a whole, so that processes may use the directory at the same time; a file that
is damaged, or cannot be written, is ignored. `ZEROLM_CACHE` moves the directory, or turns the
memory off. Standard library only.
"""

import contextlib
import functools
import hashlib
import json
import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from zerolm.common import family_sources
from zerolm.common.files import make_private, write_atomically

T = TypeVar("T")

VARIABLE, OFF = "ZEROLM_CACHE", "off"
MAX_FILES, KEPT_FILES = 2_000, 1_000  # a value has some KB
MAX_BYTES = 64 << 20  # of a file

_directory: Path | None = None  # None while the memory is closed
_at_close: list[Callable[[], None]] = []
_has_written = False


def cache_directory(environment: Mapping[str, str] = os.environ) -> Path | None:
    """Return the directory for remembered values; None if there shall be none."""
    if (named := environment.get(VARIABLE)) is not None:
        return Path(named).expanduser() if named not in (OFF, "") else None
    caches = environment.get("XDG_CACHE_HOME") or f"{environment.get('HOME', '')}/.cache"
    return Path(caches, "zerolm") if caches.startswith("/") else None


@contextlib.contextmanager
def opened() -> Iterator[None]:
    """Let `recall` remember inside this context, or inside one that is open already."""
    global _directory, _has_written
    if _directory is not None:
        yield
        return
    found = cache_directory()
    if found is not None:
        with contextlib.suppress(OSError):
            make_private(found)
            _directory = found
    try:
        yield
        if _directory is not None:
            for each in _at_close:
                each()
            if _has_written:
                _forget_oldest(_directory)
    finally:
        _has_written = False
        _at_close.clear()
        _directory = None


def is_open() -> bool:
    return _directory is not None


def at_close(function: Callable[[], None]) -> None:
    """Call a function when the memory is closed, unless the command has failed."""
    _at_close.append(function)


def recall(
    name: str,
    inputs: object,
    compute: Callable[[], T],
    encode: Callable[[T], Any] = lambda value: value,
    decode: Callable[[Any], T] = lambda value: value,
) -> T:
    """Return a remembered value, or compute and remember it.

    Args:
        name: of the value, unique in the project.
        inputs: all that the value depends on besides code, to be written as JSON.
        compute: called if the value is not known; an error is not remembered.
        encode, decode: convert the value to what JSON can write, and back.
    """
    if _directory is None:
        return compute()
    try:
        path = _path(name, inputs)
    except (TypeError, ValueError):  # JSON cannot write these inputs
        return compute()
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        return decode(_read(path))
    value = compute()
    with contextlib.suppress(TypeError, ValueError):
        _write(path, encode(value))
    return value


def remember(name: str, inputs: object, value: Any) -> None:
    """Replace what `recall` finds by a value that JSON can write; do nothing without a memory."""
    if _directory is not None:
        _write(_path(name, inputs), value)


def _write(path: Path, value: Any) -> None:
    global _has_written
    text = json.dumps(value)
    if json.loads(text) != value:
        raise ValueError("JSON changes it")
    content = f"{hashlib.sha256(text.encode()).hexdigest()}\n{text}\n".encode()
    with contextlib.suppress(OSError):
        write_atomically(path, content, many_writers=True, durable=False)
        _has_written = True


def _path(name: str, inputs: object) -> Path:
    assert _directory is not None
    key = json.dumps([name, inputs, code_digest()])
    return _directory / f"{name}-{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"


def _read(path: Path) -> Any:
    """Return the value in a file.

    Raises:
        OSError, ValueError: there is none, or it is damaged.
    """
    with path.open("rb") as file:
        content = file.read(MAX_BYTES)
    digest, _, text = content.rstrip(b"\n").partition(b"\n")
    if hashlib.sha256(text).hexdigest().encode() != digest:
        raise ValueError("damaged")
    return json.loads(text)


@functools.cache
def code_digest() -> str:
    """Return a digest of all code that values may depend on; a fork inherits it."""
    digest = hashlib.sha256(f"{platform.python_version()} {platform.machine()}".encode())
    for directory in sorted(set(sys.path)):
        with contextlib.suppress(OSError):
            names = sorted(each.name for each in Path(directory or ".").glob("*-info"))
            digest.update(repr(names).encode())
    digest.update(family_sources.shared_digest().encode())
    package = Path(__file__).resolve().parent.parent
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def knows_code() -> bool:
    """Return whether this process, or one that it was forked from, has read the sources."""
    return code_digest.cache_info().currsize > 0


def _forget_oldest(directory: Path) -> None:
    """Remove the files that were written first if there are too many."""
    with contextlib.suppress(OSError):
        files = list(directory.glob("*.json*"))
        if len(files) > MAX_FILES:
            files.sort(key=lambda file: file.stat().st_mtime)
            for file in files[:-KEPT_FILES]:
                file.unlink(missing_ok=True)
