"""`ShardDirectory`: lock a shard directory while it is written, then publish or remove it.

`.unfinished` marks and locks the directory. In the end the directory is published, kept for a later
command to resume, or removed with its content. Uses only file names, not file contents.
"""

import os
import re
import shutil
from pathlib import Path
from typing import Any

from zerolm.common.errors import ShardError
from zerolm.common.files import (
    encode_json,
    exists,
    make_directories,
    require_writable,
    sync_directory,
    sync_tree,
    write_atomically,
)
from zerolm.common.locks import FileLock, LockTaken
from zerolm.common.records import with_digest
from zerolm.shards.manifest import MANIFEST, TOKENIZER_DIRECTORY
from zerolm.shards.table import MIN_SHARDS, TABLE, encode_table

UNFINISHED = ".unfinished"
PARTS = "parts"  # intermediate files of a tokenization, removed when the shards are published

_OUR_FILE = re.compile(
    r"shard-\d{5,}\.(bin|idx|org|sums|fine)(\.[\w-]+)?(\.tmp)?|(manifest|inputs)\.json\.tmp|inputs\.json|"
    r"shards\.table(\.tmp)?"
)


def output_problems(directory: str | Path) -> list[str]:
    """Return the problems that prevent new shards from being written to a directory.

    A directory that is absent, empty, or left by a killed writer is accepted. Changes nothing on
    disk.
    """
    directory = Path(directory)
    if exists(directory / MANIFEST):
        return [
            f"{directory}: already holds token shards. Choose another directory, or remove this "
            "one to tokenize again."
        ]
    existing = directory
    while not os.path.lexists(existing):
        existing = existing.parent
    if not existing.is_dir():
        return [f"{directory}: {existing} is not a directory. Choose another directory."]
    try:
        require_writable(existing)
    except OSError as error:
        return [
            f"{directory}: {existing} is not writable ({error.strerror}). Choose another directory."
        ]
    if existing == directory and not (directory / UNFINISHED).exists():
        others = sorted(path.name for path in directory.iterdir())
        if others:
            return [
                f"{directory}: is not empty (it contains {others[0]!r}), but shards need their own "
                "directory. Choose another directory."
            ]
    return []


class ShardDirectory:
    """Exclusive write access to a directory, until `publish`, `release` or `remove` is called.

    Args:
        directory: created if absent; must be empty, or left by a writer that did not finish.
    """

    def __init__(self, directory: str | Path):
        self.directory = Path(directory)
        self.published = False
        if problems := output_problems(self.directory):
            raise ShardError(problems)
        paths = [self.directory, *self.directory.parents]
        self._created = [path for path in paths if not path.exists()]
        make_directories(self.directory)
        self._lock = _lock(self.directory)
        sync_directory(self.directory)  # makes the mark durable before any other file is written

    @property
    def is_locked(self) -> bool:
        """Whether this process still holds the lock."""
        return self._lock.held

    def clear(self) -> None:
        """Remove the files left by a writer that did not finish."""
        for path in self.directory.iterdir():
            if _OUR_FILE.fullmatch(path.name) and not path.is_dir():
                path.unlink()
        for name in (TOKENIZER_DIRECTORY, PARTS):
            shutil.rmtree(self.directory / name, ignore_errors=True)

    def publish(self, manifest: dict[str, Any]) -> None:
        """Write the table and then the manifest, which makes the directory valid data.

        The caller must have synced the shards; this function syncs the copy of the tokenizer.
        """
        if (copy := self.directory / TOKENIZER_DIRECTORY).is_dir():
            sync_tree(copy)
        sync_directory(self.directory)
        content = encode_json(with_digest(manifest))
        if len(manifest["shards"]) >= MIN_SHARDS and (table := encode_table(content)):
            write_atomically(self.directory / TABLE, table)
        write_atomically(self.directory / MANIFEST, content)
        self.published = True
        shutil.rmtree(self.directory / PARTS, ignore_errors=True)
        (self.directory / UNFINISHED).unlink()
        self._lock.release()

    def release(self) -> None:
        """Unlock the directory, but keep its files so a later writer can resume."""
        self._lock.release()

    def remove(self) -> None:
        """Remove everything that was written; does nothing if the directory is not locked."""
        if not self.is_locked:
            return
        self.clear()
        (self.directory / UNFINISHED).unlink(missing_ok=True)
        self._lock.release()
        for path in self._created:
            if not path.is_dir() or any(path.iterdir()):  # others have written there
                break
            path.rmdir()


def _lock(directory: Path) -> FileLock:
    """Mark a directory as unfinished and lock the mark."""
    try:
        return FileLock(directory / UNFINISHED)
    except LockTaken:
        raise ShardError(
            f"{directory}: another process is writing shards there now. Wait for it, stop it, or "
            "choose another directory."
        ) from None
