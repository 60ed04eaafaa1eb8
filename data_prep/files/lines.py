"""Splits a file's content at line ends into blocks of many lines, using bounded memory.

Independent of the format of documents.
"""

import contextlib
import os
from collections.abc import Iterator
from typing import NamedTuple

from data_prep.files.streams import Stream

SEARCH_BYTES = 1 << 14  # bytes read at a time to find the end of a line


class LineBlock(NamedTuple):
    """Several complete lines, or the position of one line that is too long."""

    start: int  # byte at which the first line starts
    data: bytes  # ends with a newline, except at the end of the file; empty if too long
    stop: int  # byte after the last line
    read_bytes: int  # number of bytes read so far from the stored file


def read_plain_line_blocks(
    stream: Stream, start: int, stop: int | None, chunk_bytes: int, max_bytes: int
) -> Iterator[LineBlock]:
    """Yield the lines of an uncompressed local UTF-8 file, like `read_line_blocks` but faster.

    The end of each block's last line is located first, so that one read returns the block without
    copying. If a line is too long or a read fails, `read_line_blocks` takes over at that position.
    """
    position = start
    with contextlib.suppress(OSError), open(stream.path, "rb", buffering=0) as raw:
        file, size = raw.fileno(), os.fstat(raw.fileno()).st_size
        last = size if stop is None else min(stop, size)
        end = _next_line(file, start - 1, max_bytes) if start else 0
        while end is not None:
            position = end
            if position >= last:
                return
            end = _next_line(file, min(position + chunk_bytes, last) - 1, max_bytes)
            if end is None:
                break
            data = os.pread(file, end - position, position)
            if len(data) < end - position:  # the file has shrunk
                break
            yield LineBlock(position, data, end, end)
    stream.start = max(0, position - 1)
    yield from read_line_blocks(stream, position, stop, chunk_bytes, max_bytes)


def _next_line(file: int, offset: int, max_bytes: int) -> int | None:
    """Return the start of the next line after `offset`, or the end of the file; None if the line is
    too long.
    """
    limit = offset + max_bytes
    while offset <= limit:
        block = os.pread(file, SEARCH_BYTES, offset)
        newline = block.find(b"\n") + 1
        if newline or not block:
            return offset + newline
        offset += len(block)
    return None


def read_line_blocks(
    stream: Stream, start: int, stop: int | None, chunk_bytes: int, max_bytes: int
) -> Iterator[LineBlock]:
    """Yield the lines that start in [start, stop), joined into blocks of about `chunk_bytes`.

    A line longer than `max_bytes` is not kept in memory: it is yielded as a block with empty
    `data`, and its length is `stop - start`.

    Args:
        stream: the content from byte max(0, start - 1), which shows whether a line begins at
            `start`.
    """
    position = max(0, start - 1)  # byte after the current block of the stream
    in_range = start == 0  # whether a line that starts in the range has been reached
    first = start  # byte at which `pending` starts
    pending: list[bytes] = []  # complete lines and the beginning of the next line, not yet yielded
    pending_bytes = 0
    lines_end = 0  # index in `pending` after the last complete line
    too_long = False  # whether the current line is being dropped
    for block in stream:
        position += len(block)
        if not in_range or too_long:
            newline = block.find(b"\n") + 1
            if not newline:
                if not in_range and stop is not None and position >= stop:
                    return
                continue
            line_end = position - len(block) + newline
            if too_long:
                yield LineBlock(first, b"", line_end, stream.read_bytes)
            in_range, too_long, first, block = True, False, line_end, block[newline:]
        if stop is not None and first >= stop:
            return
        pending.append(block)
        newline = block.rfind(b"\n") + 1
        if newline:
            lines_end = pending_bytes + newline
        pending_bytes += len(block)
        at_stop = bool(lines_end) and stop is not None and first + lines_end >= stop
        next_too_long = lines_end and pending_bytes - lines_end > max_bytes
        if lines_end >= chunk_bytes or next_too_long or at_stop:
            if at_stop:
                assert stop is not None
                data = b"".join(pending)
                lines_end = data.find(b"\n", stop - 1 - first) + 1
                yield LineBlock(first, data[:lines_end], first + lines_end, stream.read_bytes)
                return
            if not newline:  # the last complete line ends before this block
                pending = [b"".join(pending)]
                newline = lines_end
            last = pending.pop()
            data = b"".join([*pending, last[:newline]])
            yield LineBlock(first, data, first + lines_end, stream.read_bytes)
            pending, pending_bytes = [last[newline:]], pending_bytes - lines_end
            first, lines_end = first + lines_end, 0
        if not lines_end and pending_bytes > max_bytes:
            pending, pending_bytes, too_long = [], 0, True
    data = b"".join(pending)
    if too_long:
        yield LineBlock(first, b"", position, stream.read_bytes)
    elif stream.failure is None:
        lines_end = len(data)
    if in_range and lines_end:  # if a stream fails, its last, incomplete line is lost
        yield LineBlock(first, data[:lines_end], first + lines_end, stream.read_bytes)


def count_lines(stream: Stream, offsets: list[int]) -> list[int]:
    """Return the line numbers, counted from 1, at ascending byte offsets."""
    numbers: list[int] = []
    start, line = 0, 1  # of the current block
    for block in stream:
        while len(numbers) < len(offsets) and offsets[len(numbers)] < start + len(block):
            numbers.append(line + block.count(b"\n", 0, offsets[len(numbers)] - start))
        if len(numbers) == len(offsets):
            break
        start, line = start + len(block), line + block.count(b"\n")
    return numbers + [line] * (len(offsets) - len(numbers))
