"""A log of lines that a full disk does not end: what it cannot take is kept, and tried again.

Whoever writes to it goes on; the first failure and how many lines were lost in the end is told.
Knows nothing of what the lines say.
"""

import os
from collections.abc import Callable
from pathlib import Path

MOST_BYTES = 64 << 20  # that are kept for a disk with room again


class LineFile:
    """A file that lines are appended to, open until `close`.

    Args:
        path: is created if it is absent.
        tell: says something to the user.

    Raises:
        OSError: it cannot be opened. Nothing else here does, but `sync`.
    """

    def __init__(self, path: Path, tell: Callable[[str], object]):
        self.path, self._tell = path, tell
        self._file = open(path, "ab", buffering=0)
        self._left = b""  # what the disk did not take: a line may be written by half
        self._failed = False
        self._lost = 0

    @property
    def closed(self) -> bool:
        return self._file.closed

    def write(self, line: str) -> None:
        """Append a line, given without its end."""
        data = line.encode() + b"\n"
        if len(self._left) + len(data) > MOST_BYTES:
            self._lost += 1
        else:
            self._left += data
        self._flush()

    def _flush(self) -> None:
        try:
            while self._left:
                self._left = self._left[self._file.write(self._left) or 0 :]
            self._failed = False
        except OSError as error:
            if not self._failed:
                self._tell(f"{self.path}: {error}; its lines are kept in memory until they fit")
            self._failed = True

    def sync(self) -> None:
        """Make the lines durable.

        Raises:
            OSError: they are not.
        """
        self._flush()
        if self._left:
            raise OSError(f"{self.path}: not all of it could be written")
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Try once more, and say what is lost."""
        if self.closed:
            return
        self._flush()
        self._lost += self._left.count(b"\n")
        if self._lost:
            self._tell(f"{self.path}: {self._lost} lines could not be written and are lost")
        self._file.close()
