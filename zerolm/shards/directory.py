"""A new shard directory while it is being made: who may write there, and what happens in the end.

`.unfinished` marks and locks the directory until the manifest is there. It is published, left for
a later command to go on in, or removed with everything in it. Knows the names of the files, not
what is in them; zerolm/shard_writer.py and `data_prep tokenize` write them.
"""

import errno
import fcntl
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any, BinaryIO

from zerolm.errors import ShardError
from zerolm.files import sync_directory, write_json
from zerolm.manifest import MANIFEST, TOKENIZER_DIRECTORY

UNFINISHED = ".unfinished"
PARTS = "parts"  # what a tokenization makes the shards of, until they are published

_OUR_FILE = re.compile(
    r"shard-\d{5,}\.(bin|idx|org|sums)(\.[\w-]+)?(\.tmp)?|(manifest|inputs)\.json\.tmp|inputs\.json"
)


def output_problems(directory: str | Path) -> list[str]:
    """Say why a new shard directory cannot be written there; an empty list when it can.

    Absent, empty, and left by a killed writer are all fine. Leaves nothing behind.
    """
    directory = Path(directory)
    if (directory / MANIFEST).exists():
        return [
            f"{directory}: already holds token shards. Choose another directory, or remove this "
            f"one to make them again."
        ]
    existing = directory
    while not os.path.lexists(existing):
        existing = existing.parent
    if not existing.is_dir():
        return [f"{directory}: {existing} is not a directory. Choose another directory."]
    try:  # os.access says yes to root, and on read-only mounts of some kinds
        Path(tempfile.mkdtemp(prefix=".zerolm-", dir=existing)).rmdir()
    except OSError as error:
        return [
            f"{directory}: {existing} is not writable ({error.strerror}). Choose another directory."
        ]
    if existing == directory and not (directory / UNFINISHED).exists():
        others = sorted(path.name for path in directory.iterdir())
        if others:
            return [
                f"{directory}: is not empty (it holds {others[0]!r}), and shards need a directory "
                f"of their own. Choose another directory."
            ]
    return []


class ShardDirectory:
    """A directory that is this process's to write, from now until one of the last three methods.

    Args:
        directory: created if absent; it must be empty, or left by a writer that did not finish.

    Raises:
        ShardError: the directory cannot be written, holds other files, or another process is
            writing to it.
    """

    def __init__(self, directory: str | Path):
        self.directory = Path(directory)
        self.published = False
        if problems := output_problems(self.directory):
            raise ShardError(problems)
        ladder = [self.directory, *self.directory.parents]
        self._created = [path for path in ladder if not path.exists()]
        self.directory.mkdir(parents=True, exist_ok=True)
        self._lock = _lock(self.directory)

    @property
    def held(self) -> bool:
        """Whether it is still this process's."""
        return not self._lock.closed

    def clear(self) -> None:
        """Remove what a writer that did not finish has left."""
        for path in self.directory.iterdir():
            if _OUR_FILE.fullmatch(path.name) and not path.is_dir():
                path.unlink()
        for name in (TOKENIZER_DIRECTORY, PARTS):
            shutil.rmtree(self.directory / name, ignore_errors=True)

    def publish(self, manifest: dict[str, Any]) -> None:
        """Write the manifest, with which the directory becomes data."""
        sync_directory(self.directory)
        write_json(self.directory / MANIFEST, manifest)
        self.published = True
        shutil.rmtree(self.directory / PARTS, ignore_errors=True)
        (self.directory / UNFINISHED).unlink()
        self._lock.close()

    def leave(self) -> None:
        """Keep everything, for a later writer to go on with; nothing if it is not held."""
        self._lock.close()

    def remove(self) -> None:
        """Remove everything that was written; nothing if it is not held."""
        if not self.held:
            return
        self.clear()
        (self.directory / UNFINISHED).unlink(missing_ok=True)
        self._lock.close()
        for path in self._created:
            if not path.is_dir() or any(path.iterdir()):  # somebody else's by now
                break
            path.rmdir()


def _lock(directory: Path) -> BinaryIO:
    """Mark a directory as unfinished and lock the mark; the kernel unlocks it if we are killed."""
    mark = open(directory / UNFINISHED, "ab")
    try:
        fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        mark.close()
        raise ShardError(
            f"{directory}: another process is writing shards there now. Wait for it, stop it, or "
            f"choose another directory."
        ) from None
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK):
            raise
        # A file system without locks: nothing keeps a second writer out, as on most of them.
    return mark
