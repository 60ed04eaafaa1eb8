"""Keep local copies of small files from stores: tokenizers and document ends (`.idx` files).

Copies are named after their SHA-256, verified on each use, and stored in a directory that only this
user can write. Works with any kind of store.
"""

import contextlib
import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from zerolm.common.errors import ShardReadError
from zerolm.common.files import make_private, private_directory, write_atomically

MAX_INDEXES = 64  # takes 69 MB for 256 MiB shards with documents of 1,000 tokens


def index_content(digest: str, fetch: Callable[[], bytes]) -> bytes:
    """Return the content with this SHA-256 from its local copy; if there is none, fetch the
    content.

    Keeps the `MAX_INDEXES` most recently used copies.
    """
    copy = private_directory("copies") / f"{digest}.idx"
    with contextlib.suppress(OSError):
        make_private(copy.parent)
        content = copy.read_bytes()
        if hashlib.sha256(content).hexdigest() == digest:
            os.utime(copy)
            return content
    content = fetch()
    with contextlib.suppress(OSError):  # the content is valid even if it cannot be stored
        make_private(copy.parent)
        _write(copy, content)
        oldest_first = sorted(copy.parent.glob("*.idx"), key=lambda path: path.stat().st_mtime)
        for path in oldest_first[:-MAX_INDEXES]:
            path.unlink()
    return content


def tokenizer_directory(
    files: Sequence[dict[str, Any]], fetch: Callable[[dict[str, Any]], bytes]
) -> Path:
    """Return a local directory with a tokenizer's files; fetch the files that are missing.

    Args:
        files: `file` and `sha256` for each file.

    Raises:
        ShardReadError: the directory cannot be created, or is not private to this user.
    """
    names = "\n".join(f"{entry['file']} {entry['sha256']}" for entry in files)
    digest = hashlib.sha256(names.encode()).hexdigest()[:16]
    target = private_directory("copies") / f"tokenizer-{digest}"
    try:
        make_private(target.parent)
        make_private(target)
    except OSError as error:
        raise ShardReadError(
            f"{error}, so no tokenizer can be copied there. Remove it (or have its owner remove "
            "it), or set TMPDIR to another directory."
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
    write_atomically(path, content, many_writers=True)
