"""Bytes of a file, decompressed and cut at line ends, in bounded memory whatever the file holds.

A stream does not raise for what a file holds: it ends, and says in `failure` why. Knows nothing of
documents but how long one may be.
"""

import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

READ_BYTES = 1 << 16  # of the file at a time; larger blocks leave the processor's cache
BLOCK_BYTES = 1 << 18  # decompressed at a time
FREE_BYTES = 64 << 20  # decompressed, below which no file is one that expands too much
SALVAGE_BYTES = 256  # how finely damaged data is read up to the damage
GZIP = 16 + zlib.MAX_WBITS


class Failure(NamedTuple):
    """Why a stream ended before its file did."""

    reason: str  # a key of documents.REASONS
    detail: str


class Stream:
    """The content of a file from one byte on; iterate it for blocks of at most 256 KiB.

    Args:
        path: a regular file.
        suffix: its kind: `.gz` and `.zst` at the end decompress.
        start: the first byte, of the decompressed content.
        max_expansion: decompressed by compressed size that ends the stream.
    """

    def __init__(self, path: str, suffix: str, start: int, max_expansion: int):
        self.path, self.start, self.max_expansion = path, start, max_expansion
        self.read_bytes = 0  # of the file, as stored
        self.skipped_bytes = 0  # of these, those before `start`
        self.failure: Failure | None = None
        if suffix.endswith(".gz"):
            self._blocks = self._skipping(self._gzip)
        elif suffix.endswith(".zst"):
            self._blocks = self._skipping(self._zstd)
        else:
            self._blocks = self._plain

    def __iter__(self) -> Iterator[bytes]:
        try:
            raw = Path(self.path).open("rb")
        except OSError as error:
            self.failure = Failure("unreadable", f"cannot be opened ({error.strerror}).")
            return
        with raw:
            yield from self._blocks(raw)

    def _plain(self, raw: BinaryIO) -> Iterator[bytes]:
        skip = self.start % READ_BYTES  # blocks end at the same bytes wherever reading begins
        raw.seek(self.start - skip)
        self.read_bytes, self.skipped_bytes = self.start - skip, self.start
        while block := self._read(raw):
            yield block[skip:]
            skip = 0

    def _read(self, raw: BinaryIO) -> bytes:
        try:
            block = raw.read(READ_BYTES)
        except OSError as error:
            self.failure = Failure("damaged", f"cannot be read further ({error.strerror}).")
            return b""
        self.read_bytes += len(block)
        return block

    def _skipping(self, decompress: Any) -> Any:
        """Return blocks without what is before `start`, up to what expands too much."""

        def blocks(raw: BinaryIO) -> Iterator[bytes]:
            done = 0
            for block in decompress(raw):
                done += len(block)
                if done > max(FREE_BYTES, self.max_expansion * self.read_bytes):
                    self.failure = Failure(
                        "expands",
                        f"expands more than --max_expansion {self.max_expansion} times. If it is "
                        f"meant to, raise the limit.",
                    )
                    return
                if done <= self.start:
                    self.skipped_bytes = self.read_bytes
                else:
                    yield block[max(0, len(block) - (done - self.start)) :]

        return blocks

    def _gzip(self, raw: BinaryIO) -> Iterator[bytes]:
        done = 0
        for block in self._inflate(raw, _fast_zlib(), careful=False):
            done += len(block)
            yield block
        if self.failure is None:
            return
        self.failure, self.read_bytes = None, 0  # again, to the last byte before the damage
        raw.seek(0)
        for block in self._inflate(raw, zlib, careful=True):
            skip, done = min(done, len(block)), max(0, done - len(block))
            if skip < len(block):
                yield block[skip:]

    def _inflate(self, raw: BinaryIO, library: Any, careful: bool) -> Iterator[bytes]:
        inflate: Any = None
        data = b""
        while True:
            data = data or self._read(raw)
            if not data:
                if self.failure is None and (inflate is not None or self.read_bytes == 0):
                    self.failure = CUT
                return
            if inflate is None:
                if self.read_bytes > len(data) and not data.strip(b"\0"):  # padding of a tape
                    data = b""
                    continue
                inflate = library.decompressobj(GZIP)
            before = inflate.copy() if careful else None
            try:
                block = inflate.decompress(data, BLOCK_BYTES)
            except (zlib.error, library.error) as error:
                if before is not None:
                    yield from _salvage(before, data)
                self.failure = Failure("damaged", f"{_plainly(error)}. {RESTORE}")
                return
            data = inflate.unconsumed_tail
            if inflate.eof:
                inflate, data = None, inflate.unused_data
            if block:
                yield block

    def _zstd(self, raw: BinaryIO) -> Iterator[bytes]:
        import pyarrow as pa

        stream = pa.CompressedInputStream(pa.PythonFile(raw, mode="r"), "zstd")
        done = 0
        while True:
            try:
                block = stream.read(BLOCK_BYTES)
            except (OSError, ValueError) as error:
                cut = "Truncated" in str(error)
                self.failure = CUT if cut else Failure("damaged", f"{_plainly(error)}. {RESTORE}")
                break
            self.read_bytes = raw.tell()
            if not block:
                if self.read_bytes == 0:
                    self.failure = CUT
                return
            done += len(block)
            yield block
        for step in (SALVAGE_BYTES, 1):  # up to the damage, in small steps
            with Path(self.path).open("rb") as again:
                stream = pa.CompressedInputStream(pa.PythonFile(again, mode="r"), "zstd")
                left = done
                while left:
                    left -= len(stream.read(min(left, BLOCK_BYTES)))
                try:
                    while block := stream.read(step):
                        done += len(block)
                        yield block
                except (OSError, ValueError):
                    pass


RESTORE = "The file is damaged, and what was read of it may be wrong: restore it, or remove it."
CUT = Failure(
    "cut", "the compressed data ends too early. The file is cut: restore it, or remove it."
)


def _fast_zlib() -> Any:
    """Return Intel's isa-l where it is installed: faster, with the same bytes."""
    try:
        from isal import isal_zlib
    except ImportError:  # there are no wheels for every machine
        return zlib
    return isal_zlib


def _salvage(inflate: Any, data: bytes) -> Iterator[bytes]:
    """Yield what can be decompressed before the damage."""
    for at in range(0, len(data), SALVAGE_BYTES):
        before = inflate.copy()
        try:
            yield inflate.decompress(data[at : at + SALVAGE_BYTES])
        except zlib.error:
            for byte in data[at : at + SALVAGE_BYTES]:
                try:
                    yield before.decompress(bytes([byte]))
                except zlib.error:
                    return


def _plainly(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


class Lines(NamedTuple):
    """Whole lines, or one that is too long."""

    start: int  # byte of the first line
    data: bytes  # ends with a newline, except at the end of the file; empty when too long
    stop: int  # byte behind them
    read_bytes: int  # of the file, as stored, up to here


def read_lines(
    stream: Stream, start: int, stop: int | None, chunk_bytes: int, max_bytes: int
) -> Iterator[Lines]:
    """Yield the lines that start in [start, stop), joined to about `chunk_bytes`.

    `stream` begins at max(0, start - 1). Of a line longer than `max_bytes` nothing is kept: it
    comes with `data` empty, and how long it is in `stop - start`.
    """
    at = max(0, start - 1)  # of the stream
    begun = start == 0  # whether the first line's start has been passed
    first = start  # byte that `held` starts at
    held: list[bytes] = []  # lines and the beginning of one, not yielded yet
    size = 0  # of `held`
    end = 0  # of the last whole line, in `held`
    dropping = False  # a line that is too long
    for block in stream:
        at += len(block)
        if not begun or dropping:
            cut = block.find(b"\n") + 1
            if not cut:
                if not begun and stop is not None and at >= stop:
                    return
                continue
            line_end = at - len(block) + cut
            if dropping:
                yield Lines(first, b"", line_end, stream.read_bytes)
            begun, dropping, first, block = True, False, line_end, block[cut:]
        if stop is not None and first >= stop:
            return
        held.append(block)
        cut = block.rfind(b"\n") + 1
        if cut:
            end = size + cut
        size += len(block)
        if end >= chunk_bytes or (end and size - end > max_bytes) or _passed(first, end, stop):
            data = b"".join(held)
            held, size = [data[end:]], size - end
            if _passed(first, end, stop):
                assert stop is not None
                end = data.find(b"\n", stop - 1 - first) + 1
                yield Lines(first, data[:end], first + end, stream.read_bytes)
                return
            yield Lines(first, data[:end], first + end, stream.read_bytes)
            first, end = first + end, 0
        if not end and size > max_bytes:
            held, size, dropping = [], 0, True
    data = b"".join(held)
    if dropping:
        yield Lines(first, b"", at, stream.read_bytes)
    elif stream.failure is None:
        end = len(data)
    if begun and end:  # of a stream that failed, the line that it ends in is lost
        yield Lines(first, data[:end], first + end, stream.read_bytes)


def _passed(first: int, end: int, stop: int | None) -> bool:
    return bool(end) and stop is not None and first + end >= stop


def count_lines(stream: Stream, offsets: list[int]) -> list[int]:
    """Return the numbers, from 1, of the lines that ascending byte offsets are in."""
    numbers: list[int] = []
    at, lines = 0, 1
    for block in stream:
        while len(numbers) < len(offsets) and offsets[len(numbers)] < at + len(block):
            numbers.append(lines + block.count(b"\n", 0, offsets[len(numbers)] - at))
        if len(numbers) == len(offsets):
            break
        at, lines = at + len(block), lines + block.count(b"\n")
    return numbers + [lines] * (len(offsets) - len(numbers))
