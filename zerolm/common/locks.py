"""File locks that the kernel releases when their holder exits or is killed.

The `filelock` package does not fit: block caches need shared locks, which `filelock` implements
only with an SQLite database or marker files, and `FileLock` always creates the file, which
`--check` must not do. Standard library only.
"""

import fcntl
import os
import time
import weakref
from collections.abc import Callable
from pathlib import Path

MAX_OWNER_BYTES = 4096


class LockTaken(BlockingIOError):
    """Another process holds the lock.

    Attributes:
        owner: the text that the holder wrote into the lock file, without surrounding whitespace.
    """

    def __init__(self, path: Path, owner: str = ""):
        super().__init__(f"{path}: locked by another process")
        self.owner = owner


class FileLock:
    """A lock on a file, held from construction until `release` is called or this process exits.

    Child processes do not hold the lock, because forked children close their copy of the file.
    Releasing the lock leaves the file in place. Works on NFS, where exclusive locks require a file
    opened for writing.

    Args:
        shared: whether other shared locks may be held at the same time. A shared lock waits for the
            holder of an exclusive one; an exclusive lock never waits.
        create: whether to create a missing file.
        owner: text to write into the file; `LockTaken` reports it to other processes.

    Attributes:
        unsupported: the error if the file system does not support locks; otherwise None. The caller
            may ignore the error, but then nothing keeps other processes out.

    Raises:
        LockTaken: another process holds the lock.
        OSError: the file cannot be opened.
    """

    unsupported: OSError | None = None

    def __init__(
        self, path: str | Path, *, shared: bool = False, create: bool = True, owner: str = ""
    ):
        self.path = Path(path)
        operation = fcntl.LOCK_SH if shared else fcntl.LOCK_EX | fcntl.LOCK_NB
        while True:
            self._file = open(self.path, "a+b" if create else "r+b", buffering=0)
            try:
                self._lock(operation)
                if self._is_in_place():
                    if owner:
                        self._file.truncate(0)
                        self._file.write(owner.encode())
                    break
            except BaseException:
                self._file.close()
                raise
            self._file.close()  # the file was removed or replaced in the meantime
        _held.add(self)

    def _lock(self, operation: int) -> None:
        try:
            fcntl.flock(self._file, operation)
        except BlockingIOError:
            self._file.seek(0)
            owner = self._file.read(MAX_OWNER_BYTES).decode(errors="replace").strip()
            raise LockTaken(self.path, owner) from None
        except OSError as error:  # Lustre and NFS may be mounted without locks
            self.unsupported = error

    def _is_in_place(self) -> bool:
        try:
            return os.path.samestat(os.fstat(self._file.fileno()), self.path.stat())
        except FileNotFoundError:
            return False

    @property
    def held(self) -> bool:
        return not self._file.closed

    def release(self) -> None:
        """Release the lock, if it is held."""
        self._file.close()

    def __enter__(self) -> "FileLock":
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()


def wait_for_lock(path: Path, give_up: Callable[[], bool], poll_seconds: float) -> FileLock:
    """Acquire an exclusive lock as soon as its holder releases it.

    Args:
        give_up: called before each attempt; returns True to stop.

    Raises:
        LockTaken: `give_up` returned True before the lock was released.
    """
    while not give_up():
        try:
            return FileLock(path)
        except LockTaken:
            time.sleep(poll_seconds)
    raise LockTaken(path)


_held: "weakref.WeakSet[FileLock]" = weakref.WeakSet()


def _release_in_child() -> None:
    for lock in list(_held):
        lock.release()  # closing the child's copy does not release the parent's lock
    _held.clear()


os.register_at_fork(after_in_child=_release_in_child)
