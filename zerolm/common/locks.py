"""Locks on files, held by at most one process and released by the kernel when that process dies.

The `filelock` package does not fit: block caches need shared locks, for which it has an SQLite
database or marker files only, and its `FileLock` always creates the file, which `--check` must not
do. Standard library only.
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
        owner: what that process wrote into the lock file, without surrounding whitespace.
    """

    def __init__(self, path: Path, owner: str = ""):
        super().__init__(f"{path}: locked by another process")
        self.owner = owner


class FileLock:
    """A lock that this process holds from now until `release`, or until it ends.

    Processes started by this one do not hold it: forked ones close their copy of the file. The lock
    file stays in place when it is released. Works on NFS, whose locks need a file open for writing.

    Args:
        shared: together with other shared locks, none of which excludes another. Waits for the
            holder of an exclusive lock; an exclusive lock never waits.
        create: create the file if it is absent.
        owner: text written into the file, which `LockTaken` shows to others.

    Attributes:
        unsupported: the error of a file system without locks, which the caller may accept: nothing
            keeps other processes out. None where the lock is real.

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
            self._file.close()  # the file was removed or replaced meanwhile
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
        """Release the lock; does nothing if it is not held."""
        self._file.close()

    def __enter__(self) -> "FileLock":
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()


def wait_for_lock(path: Path, give_up: Callable[[], bool], poll_seconds: float) -> FileLock:
    """Take an exclusive lock as soon as its holder releases it.

    Args:
        give_up: called before each attempt.

    Raises:
        LockTaken: `give_up` returned true first.
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
        lock.release()  # closing a copy of the file leaves the parent's lock alone
    _held.clear()


os.register_at_fork(after_in_child=_release_in_child)
