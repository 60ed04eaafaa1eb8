"""Files with one JSON object per line: reading and appending.

In a run's metrics and samples `step` never decreases, so a resume can read and truncate the end of
a file with a million lines without reading the rest. Readers skip incomplete lines, which a killed
writer may leave, and lines with unexpected types. Standard library only.
"""

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import NoneType
from typing import Any, TypedDict

from zerolm.common.files import is_file, sync_directory
from zerolm.common.records import Count, mismatch, open_regular, parse_json, unreadable

BLOCK_BYTES = 1 << 16
MAX_PENDING_BYTES = 64 << 20  # maximum size of lines kept in memory while the disk is full
MAX_SHOWN_LINES = 5
NUMBERS = frozenset({int, float, NoneType})

Row = dict[str, Any]


class MetricsRow(TypedDict):
    """A line of metrics.jsonl. Its other keys are metrics, whose values are numbers or null."""

    step: Count
    tokens: Count


class EventRow(TypedDict):
    """A line of events.jsonl. Its other keys and their types depend on the event."""

    event: str
    step: int


class _Sampled(TypedDict):
    step: Count
    tokens: Count
    prompt: str
    text: str


class SampleRow(_Sampled, total=False):
    """A line of samples.jsonl; further keys record how the text was sampled."""

    prompt_number: Count
    seed: int
    temperature: float | None


# ---- Reading


def parse_row(line: bytes, kind: Any) -> Row:
    """Parse a line.

    Args:
        kind: `MetricsRow`, `EventRow` or `SampleRow`.

    Raises:
        ValueError, RecursionError: the line is not JSON, or is not a row of this type.
    """
    row = parse_json(line)
    if problem := mismatch(row, kind):
        raise ValueError(problem)
    if kind is MetricsRow and not NUMBERS.issuperset(map(type, row.values())):
        raise ValueError("has a value that is not a number")
    return row


def read_rows(
    path: Path,
    kind: Any,
    problems: list[str] | None = None,
    *,
    key: str = "",
    start_bytes: int = 0,
) -> Iterator[Row]:
    """Yield the rows of a file that can be read; yield nothing if the file does not exist.

    Args:
        kind: see `parse_row`.
        key: yield only rows with this key; other lines are not parsed.
        start_bytes: offset of the first line to read.
        problems: list to which a problem is added if the file or some of its lines cannot be read.
            An incomplete last line is ignored: it is being written, or its writer was killed.
    """
    bad: list[int] = []
    quoted = json.dumps(key).encode() if key else b""
    problems = [] if problems is None else problems
    try:
        file = open_regular(path)
        if file is None:
            return
        with file:
            file.seek(start_bytes)
            for number, line in enumerate(file, start=1):
                if not line.strip() or quoted not in line:
                    continue
                try:
                    row = parse_row(line, kind)
                except (ValueError, RecursionError):
                    if line.endswith(b"\n"):
                        bad.append(number)
                    continue
                if not key or key in row:
                    yield row
    except OSError as error:
        problems.append(unreadable(path, error, "").rstrip(". "))
    if bad:
        shown = ", ".join(map(str, bad[:MAX_SHOWN_LINES]))
        shown += ", ..." if len(bad) > MAX_SHOWN_LINES else ""
        problems.append(f"{path}: {len(bad)} lines cannot be read: {shown}")


def rows_from(path: Path, step: int, kind: Any) -> tuple[list[Row], int]:
    """Read the rows for `step` and later steps, starting from the end of the file.

    Args:
        kind: see `parse_row`.

    Returns: The rows, oldest first, and the byte offset of the first line after `step`. An
    unreadable line counts as after `step`, and is not returned.
    """
    rows: list[Row] = []
    if not is_file(path):
        return rows, 0
    end = path.stat().st_size
    for start, line in _lines_backwards(path):
        try:
            row = parse_row(line, kind)
        except (ValueError, RecursionError):
            end = start
            continue
        if row["step"] < step:
            break
        if row["step"] > step:
            end = start
        rows.append(row)
    return rows[::-1], end


def last_step(path: Path) -> int | None:
    """Return the step of the last row that can be read; None if there is no such row."""
    if is_file(path):
        for _, line in _lines_backwards(path):
            with contextlib.suppress(ValueError, RecursionError):
                return parse_row(line, MetricsRow)["step"]
    return None


def _lines_backwards(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield (offset, line) for each line, from the last to the first."""
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
                start -= 1  # newline before the line
            rest = first
        if rest:
            yield 0, rest


# ---- Writing


def truncate(path: Path, size_bytes: int) -> None:
    """Truncate a file to at most this size, durably; create the file if it does not exist."""
    with open(path, "ab") as file:
        if file.tell() > size_bytes:
            file.truncate(size_bytes)
        os.fsync(file.fileno())


def append_line(path: Path, text: str) -> None:
    """Append a line to a file; if a killed writer left an incomplete last line, end that line
    first.
    """
    with open(path, "a+b", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        incomplete = bool(size) and os.pread(file.fileno(), 1, size - 1) != b"\n"
        file.write((b"\n" if incomplete else b"") + text.encode() + b"\n")


class LineFile:
    """An append-only file of lines that can be written even while the disk is temporarily full.

    If the file is removed, `sync` writes all lines again, because the kernel keeps the content of
    an open file.

    Args:
        path: created if it does not exist.
        warn: prints a message for the user.

    Raises:
        OSError: the file cannot be opened. Only `sync` raises errors.
    """

    def __init__(self, path: Path, warn: Callable[[str], object]):
        self.path, self._warn = path, warn
        self._file = open(path, "a+b", buffering=0)
        self._pending = b""  # not yet written; may start in the middle of a line
        self._is_named = False  # whether the file's directory entry is durable
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
                self._warn(
                    f"{self.path}: {error}; its lines are kept in memory until they can be written"
                )
            self._failed = True

    def sync(self) -> None:
        """Make all lines durable.

        Raises:
            OSError: some lines could not be written.
        """
        self._follow_path()
        self._flush()
        if self._pending:
            raise OSError(f"{self.path}: some lines could not be written")
        os.fsync(self._file.fileno())
        if not self._is_named:
            sync_directory(self.path.parent)
            self._is_named = True

    def _follow_path(self) -> None:
        """Open the file at this path again if the path no longer refers to the open file."""
        removed = not self.path.exists()
        if not removed and os.path.samestat(self.path.stat(), os.fstat(self._file.fileno())):
            return
        file = open(self.path, "a+b", buffering=0)
        try:
            if removed:
                self._file.seek(0)
                shutil.copyfileobj(self._file, file)
        except OSError as error:
            if (
                error.errno != errno.ESTALE
            ):  # ESTALE: the file server has lost the file. A full disk can be retried later.
                file.close()
                self.path.unlink()
                raise
        self._file.close()
        self._file, self._is_named = file, False
        self._warn(
            f"{self.path}: was {'removed' if removed else 'replaced'} while the run writes to it; "
            + ("written again" if removed else "the last lines before that may be missing")
        )

    def close(self) -> None:
        """Try one last time to write the pending lines, and report how many lines are lost."""
        if self.closed:
            return
        self._flush()
        self._num_lost += self._pending.count(b"\n")
        if self._num_lost:
            self._warn(f"{self.path}: {self._num_lost} lines could not be written and are lost")
        self._file.close()
