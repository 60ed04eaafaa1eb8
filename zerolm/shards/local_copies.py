"""Copies of small files of stores, on this machine: tokenizers, and where documents end.

They are named by what is in them and compared with their SHA-256 each time, in a directory that is
this user's alone. Knows no store.
"""

import contextlib
import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from zerolm.errors import ShardReadError
from zerolm.files import write_atomically
from zerolm.own_directory import make_own, own_directory

MOST_INDEXES = 64  # of shards of 256 MiB with documents of 1,000 tokens: 69 MB


def index(digest: str, fetch: Callable[[], bytes]) -> bytes:
    """Return the content of that SHA-256; those that were used last are kept."""
    kept = own_directory("copies") / f"{digest}.idx"
    with contextlib.suppress(OSError):
        make_own(kept.parent)
        content = kept.read_bytes()
        if hashlib.sha256(content).hexdigest() == digest:
            os.utime(kept)
            return content
    content = fetch()
    with contextlib.suppress(OSError):  # it is here, kept or not
        make_own(kept.parent)
        _write(kept, content)
        oldest_first = sorted(kept.parent.glob("*.idx"), key=lambda path: path.stat().st_mtime)
        for path in oldest_first[:-MOST_INDEXES]:
            path.unlink()
    return content


def tokenizer(files: Sequence[dict[str, Any]], fetch: Callable[[dict[str, Any]], bytes]) -> Path:
    """Return the directory with a tokenizer's files.

    Args:
        files: `file` and `sha256` of each.
        fetch: one of them.

    Raises:
        ShardReadError: the place is not this user's alone, or cannot be made.
    """
    names = "\n".join(f"{entry['file']} {entry['sha256']}" for entry in files)
    digest = hashlib.sha256(names.encode()).hexdigest()[:16]
    target = own_directory("copies") / f"tokenizer-{digest}"
    try:
        make_own(target.parent)
        make_own(target)
    except OSError as error:
        raise ShardReadError(
            f"{error}, so that no tokenizer can be copied there. Remove it (or have its owner do "
            f"so), or set TMPDIR to another directory."
        ) from None
    for entry in files:
        path = target / entry["file"]
        if path.is_file():
            content = path.read_bytes()
            if hashlib.sha256(content).hexdigest() == entry["sha256"]:
                continue
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        _write(path, fetch(entry))
    return target


def _write(path: Path, content: bytes) -> None:
    write_atomically(path, lambda file: file.write(content), many_writers=True)
