"""Files with one JSON object per line: reading, appending, and the events of a run.

In a run's metrics and samples `step` never decreases, so that a resume can read and truncate the
end of a file with a million lines without reading the rest. A killed writer may leave an incomplete
last line: every reader stops there or skips it. Standard library only.
"""

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from zerolm.common.run_files import RunFiles

BLOCK_BYTES = 1 << 16
MAX_PENDING_BYTES = 64 << 20  # kept in memory while a disk is full

Row = dict[str, Any]


# ---- Reading


def read_all(path: Path) -> list[Row]:
    """Return all rows before the first incomplete line; none if the file does not exist."""
    rows: list[Row] = []
    if path.is_file():
        for line in path.read_text(errors="replace").splitlines():
            try:
                rows.append(json.loads(line))
            except ValueError:
                break
    return rows


def rows_with(path: Path, key: str) -> Iterator[Row]:
    """Yield the rows that have a key, up to the first incomplete one; parses no other lines."""
    if not path.is_file():
        return
    quoted = json.dumps(key)
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            if quoted not in line:
                continue
            try:
                row = json.loads(line)
            except ValueError:
                return
            if key in row:
                yield row


def rows_from(path: Path, step: int) -> tuple[list[Row], int]:
    """Read the rows of `step` and later steps from the end of a file.

    Returns:
        The rows, oldest first; and the offset in bytes of the first line of a later step. An
        incomplete line counts as one of a later step and is not returned.
    """
    rows: list[Row] = []
    if not path.is_file():
        return rows, 0
    end = path.stat().st_size
    for start, line in _lines_backwards(path):
        try:
            row = json.loads(line)
            later = row["step"] > step
        except (ValueError, TypeError, KeyError):
            row, later = None, True
        if row is not None and row["step"] < step:
            break
        if later:
            end = start
        if row is not None:
            rows.append(row)
    return rows[::-1], end


def last_step(path: Path) -> int | None:
    """Return the step of the last complete row, None if there is none."""
    if path.is_file():
        for _, line in _lines_backwards(path):
            with contextlib.suppress(ValueError, TypeError, KeyError):
                return int(json.loads(line)["step"])
    return None


def _lines_backwards(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield (offset, line) from the last line to the first."""
    with open(path, "rb") as file:
        position = file.seek(0, os.SEEK_END)
        rest = b""
        while position > 0:
            size = min(BLOCK_BYTES, position)
            position -= size
            file.seek(position)
            block = file.read(size) + rest
            first, *lines = block.split(b"\n")
            start = position + len(block)
            for line in reversed(lines):
                start -= len(line)
                if line:
                    yield start, line
                start -= 1  # the newline before it
            rest = first
        if rest:
            yield 0, rest


# ---- Writing


def truncate(path: Path, size_bytes: int) -> None:
    """Truncate a file to a size, durably. Creates it if it does not exist; never extends it."""
    with open(path, "ab") as file:
        if file.tell() > size_bytes:
            file.truncate(size_bytes)
        os.fsync(file.fileno())


def append_line(path: Path, text: str) -> None:
    """Append a line; starts a new one first if a killed writer has left the last incomplete."""
    with open(path, "a+b", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        incomplete = bool(size) and os.pread(file.fileno(), 1, size - 1) != b"\n"
        file.write((b"\n" if incomplete else b"") + text.encode() + b"\n")


class LineFile:
    """A file that lines are appended to, which survives a disk that is full for a while.

    Args:
        path: created if it does not exist.
        warn: prints a message for the user.

    Raises:
        OSError: it cannot be opened. Of the methods only `sync` raises.
    """

    def __init__(self, path: Path, warn: Callable[[str], object]):
        self.path, self._warn = path, warn
        self._file = open(path, "ab", buffering=0)
        self._pending = b""  # not written yet; may begin in the middle of a line
        self._failed = False
        self._num_lost = 0

    @property
    def closed(self) -> bool:
        return self._file.closed

    def write(self, line: str) -> None:
        """Append a line, given without its newline."""
        data = line.encode() + b"\n"
        if len(self._pending) + len(data) > MAX_PENDING_BYTES:
            self._num_lost += 1
        else:
            self._pending += data
        self._flush()

    def _flush(self) -> None:
        try:
            while self._pending:
                self._pending = self._pending[self._file.write(self._pending) or 0 :]
            self._failed = False
        except OSError as error:
            if not self._failed:
                self._warn(f"{self.path}: {error}; its lines are kept in memory until they fit")
            self._failed = True

    def sync(self) -> None:
        """Make all lines durable.

        Raises:
            OSError: some could not be written.
        """
        self._flush()
        if self._pending:
            raise OSError(f"{self.path}: not all of it could be written")
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Try once more to write pending lines, and report those that are lost."""
        if self.closed:
            return
        self._flush()
        self._num_lost += self._pending.count(b"\n")
        if self._num_lost:
            self._warn(f"{self.path}: {self._num_lost} lines could not be written and are lost")
        self._file.close()


# ---- Events of a run


def event_line(event: str, step: int, **details: Any) -> str:
    """Return an event as a line of events.jsonl, without the newline."""
    timestamp = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    return json.dumps({"event": event, "step": step, "time": timestamp, **details})


def append_event(run_dir: str | Path, event: str, step: int, **details: Any) -> None:
    """Append an event to a run's events.jsonl, from a process that has no `RunLog`.

    Args:
        step: the step that the event belongs to, -1 for none.
        details: further keys, JSON values; docs/run_directory.md lists those of each event.
    """
    append_line(RunFiles(run_dir).events, event_line(event, step, **details))
