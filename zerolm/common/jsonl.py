"""A file of JSON lines whose `step` never falls: its end is read, and cut, without the rest.

A run may have a million lines when it is resumed; what a resume needs is at the end. Standard
library only.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCK_BYTES = 1 << 16

Row = dict[str, Any]


def read_end(path: Path, step: int) -> tuple[list[Row], int]:
    """Read the lines of `step` and later ones, oldest first.

    Lines that are not whole (a writer was killed in one) count as later ones, but are not returned.

    Returns:
        The rows; and where in the file the first line of a later step begins, in bytes.
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


def cut_end(path: Path, size_bytes: int) -> None:
    """Cut a file to a size, durably; one that is not there becomes an empty one."""
    with open(path, "ab") as file:
        if file.tell() > size_bytes:
            file.truncate(size_bytes)
        os.fsync(file.fileno())


def read_all(path: Path) -> list[Row]:
    """Read every line, up to the first that is not whole."""
    rows: list[Row] = []
    if path.is_file():
        for line in path.read_text(errors="replace").splitlines():
            try:
                rows.append(json.loads(line))
            except ValueError:
                break
    return rows


def rows_with(path: Path, key: str) -> Iterator[Row]:
    """Yield the rows that have a key, up to the first line that is not whole; parses no other."""
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


def _lines_backwards(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield (where it begins, the line) from the last line to the first."""
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
