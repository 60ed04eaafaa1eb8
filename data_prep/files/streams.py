"""`Stream`: the decompressed bytes of a file, read in bounded memory.

Bad content does not raise an error; instead, the stream ends and `failure` contains the reason.
Independent of the format of documents.
"""

import bz2
import contextlib
import lzma
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, BinaryIO, NamedTuple

from data_prep.files.remote import open_stored
from zerolm.common.errors import reason

READ_BYTES = 1 << 16  # read from the file at a time; larger blocks do not stay in the CPU cache
BLOCK_BYTES = 1 << 18  # decompressed at a time
MIN_CHECKED_BYTES = 64 << 20  # decompressed size up to which the expansion is not limited
SALVAGE_BYTES = 256  # step size for reading the last data before a damaged position
MEMBERS = {".bz2": bz2.BZ2Decompressor, ".xz": lzma.LZMADecompressor}
COMPRESSIONS = (".gz", ".zst", *MEMBERS)
LONG_WINDOW_BYTES = 1 << 10  # zstd data read at a time, which expands to at most 32 MiB
GZIP = 16 + zlib.MAX_WBITS
GZIP_MAGIC = b"\x1f\x8b"

Blocks = Callable[[BinaryIO], Iterator[bytes]]


class Failure(NamedTuple):
    """The reason why a stream ended before the end of its file, or why a file cannot be read."""

    reason: str  # of `formats.describe_reason`
    detail: str


RESTORE_HINT = (
    "The file is damaged, and documents read from it may be wrong: restore it, or remove it."
)
TRUNCATED = Failure(
    "cut", "the compressed data ends too early. The file is truncated: restore it, or remove it."
)


class Stream:
    """The content of a file from a given byte; iteration yields blocks of at most 256 KiB.

    Args:
        path: a regular file or a URL.
        suffix: end of the file's name; the file is decompressed if the suffix is in COMPRESSIONS.
        start: first byte of the decompressed content to yield.
        max_expansion: maximum ratio of decompressed to compressed size; above it, the stream ends.
    """

    encoding = ""  # the file's encoding, if not UTF-8

    def __init__(self, path: str, suffix: str, start: int, max_expansion: int):
        self.path, self.start, self.max_expansion = path, start, max_expansion
        self.read_bytes = 0  # of the stored file
        self.skipped_bytes = 0  # of these, before `start`
        self.failure: Failure | None = None
        self._blocks: Blocks
        if suffix.endswith(".gz"):
            self._blocks = self._from_start(self._gzip)
        elif suffix.endswith(".zst"):
            self._blocks = self._from_start(self._zstd)
        elif suffix.endswith(tuple(MEMBERS)):
            open_member = MEMBERS[suffix[suffix.rindex(".") :]]
            self._blocks = self._from_start(partial(self._members, open_member=open_member))
        else:
            self._blocks = self._plain

    def __iter__(self) -> Iterator[bytes]:
        try:
            raw = open_stored(self.path)
        except OSError as error:
            self.failure = Failure("unreadable", f"cannot be opened ({error.strerror}).")
            return
        with raw:
            yield from self._blocks(raw)

    def _plain(self, raw: BinaryIO) -> Iterator[bytes]:
        skip = self.start % READ_BYTES  # block boundaries must not depend on the start position
        raw.seek(self.start - skip)
        self.read_bytes, self.skipped_bytes = self.start - skip, self.start
        while block := self._read(raw):
            yield block[skip:]
            skip = 0

    def _read(self, raw: BinaryIO, size: int = 0) -> bytes:
        try:
            block = raw.read(size or READ_BYTES)
        except OSError as error:
            self.failure = Failure("damaged", f"cannot be read further ({error.strerror}).")
            return b""
        self.read_bytes += len(block)
        return block

    def _from_start(self, decompress: Blocks) -> Blocks:
        """Wrap a decompressor so that it drops bytes before `start`, and stops if a file expands
        too much.
        """

        def blocks(raw: BinaryIO) -> Iterator[bytes]:
            decompressed = 0
            for block in decompress(raw):
                decompressed += len(block)
                if decompressed > max(MIN_CHECKED_BYTES, self.max_expansion * self.read_bytes):
                    self.failure = Failure(
                        "expands",
                        f"expands more than --max_expansion {self.max_expansion} times. If that "
                        f"is correct, raise the limit.",
                    )
                    return
                if decompressed <= self.start:
                    self.skipped_bytes = self.read_bytes
                else:
                    yield block[max(0, len(block) - (decompressed - self.start)) :]

        return blocks

    def _gzip(self, raw: BinaryIO) -> Iterator[bytes]:
        with contextlib.suppress(OSError):  # the next read reports the error
            start = raw.peek(len(GZIP_MAGIC))[: len(GZIP_MAGIC)]  # type: ignore[attr-defined]
            if start and start != GZIP_MAGIC:
                detail = "is not a gzip file: rename it, or restore it."
                self.failure = Failure("damaged", detail)
                return
        fast, exact = partial(_Gzip, _fast_zlib()), partial(_Gzip, zlib)
        yield from self._members(raw, fast, again=exact)

    def _zstd(self, raw: BinaryIO) -> Iterator[bytes]:
        import pyarrow as pa

        stream = pa.CompressedInputStream(pa.PythonFile(raw, mode="r"), "zstd")
        done = 0
        while True:
            try:
                block = stream.read(BLOCK_BYTES)
            except (OSError, ValueError) as error:
                if "too much memory" in str(error):  # a window of more than 128 MiB
                    yield from self._long_zstd(raw, done)
                    return
                self.failure = Failure("damaged", f"{reason(error, named=False)}. {RESTORE_HINT}")
                if "Truncated" in str(error):
                    self.failure = TRUNCATED
                break
            self.read_bytes = raw.tell()
            if not block:
                if self.read_bytes == 0:
                    self.failure = TRUNCATED
                return
            done += len(block)
            yield block
        for step in (SALVAGE_BYTES, 1):  # read the data up to the damage in small steps
            with open_stored(self.path) as again:
                stream = pa.CompressedInputStream(pa.PythonFile(again, mode="r"), "zstd")
                remaining = done
                while remaining:
                    remaining -= len(stream.read(min(remaining, BLOCK_BYTES)))
                try:
                    while block := stream.read(step):
                        done += len(block)
                        yield block
                except (OSError, ValueError):
                    pass

    def _long_zstd(self, raw: BinaryIO, skip: int) -> Iterator[bytes]:
        """Reread a file with `zstandard`, which supports windows larger than pyarrow's limit of 128
        MiB.

        Args:
            skip: number of content bytes that have already been yielded.
        """
        try:
            from zstandard import ZstdDecompressor
        except ImportError:
            detail = "uses a zstd window larger than 128 MiB. Run: pip install zstandard"
            self.failure = Failure("damaged", detail)
            return
        raw.seek(0)
        self.read_bytes = 0
        new = ZstdDecompressor(max_window_size=1 << 31).decompressobj
        for block in self._members(raw, new, LONG_WINDOW_BYTES, limit=()):
            yield block[skip:]
            skip = max(0, skip - len(block))

    def _members(
        self,
        raw: BinaryIO,
        open_member: Callable[[], Any],
        piece_bytes: int = READ_BYTES,
        limit: tuple[int, ...] = (BLOCK_BYTES,),
        again: Callable[[], Any] | None = None,
    ) -> Iterator[bytes]:
        """Decompress a file with one or more members, up to the last byte before any damage.

        Args:
            limit: additional arguments for a member's `decompress`: the maximum number of bytes to
                return, if supported.
            again: opens members for rereading a damaged or truncated file; if it is None, truncated
                files are not reread.
        """
        done = 0
        for block in self._decompress(raw, open_member, lambda: piece_bytes, limit):
            done += len(block)
            yield block
        if self.failure is None or (again is None and self.failure.reason != "damaged"):
            return
        damaged_at = self.read_bytes - piece_bytes  # from here on, reread byte by byte
        self.failure, self.read_bytes = None, 0
        raw.seek(0)
        pieces = lambda: piece_bytes if self.read_bytes < damaged_at else 1  # noqa: E731
        for block in self._decompress(raw, again or open_member, pieces, limit):
            yield block[done:]
            done = max(0, done - len(block))

    def _decompress(
        self,
        raw: BinaryIO,
        open_member: Callable[[], Any],
        piece_bytes: Callable[[], int],
        limit: tuple[int, ...],
    ) -> Iterator[bytes]:
        member, data, first = None, b"", True
        while True:
            if not data and getattr(member, "needs_input", True):
                data = self._read(raw, piece_bytes())
                if not data:
                    if self.failure is None and (member is not None or first):
                        self.failure = TRUNCATED
                    return
            if member is None:
                if not first and not data.strip(b"\0"):  # padding
                    data = b""
                    continue
                member, first = open_member(), False
            try:
                block = member.decompress(data, *limit)
            except Exception as error:  # each library raises its own exceptions
                self.failure = Failure("damaged", f"{reason(error, named=False)}. {RESTORE_HINT}")
                return
            data = b""
            if member.eof:
                data, member = member.unused_data, None
            for start in range(0, len(block), BLOCK_BYTES):
                yield block[start : start + BLOCK_BYTES]


def _fast_zlib() -> Any:
    """Return Intel's isa-l if installed, else zlib; isa-l is faster, with identical output."""
    try:
        from isal import isal_zlib
    except ImportError:  # wheels do not exist for every platform
        return zlib
    return isal_zlib


class _Gzip:
    """A decompressor for a gzip member, with the same interface as the decompressors of bz2 and
    lzma.
    """

    def __init__(self, library: Any):
        self.inflate = library.decompressobj(GZIP)

    def decompress(self, data: bytes, limit: int) -> bytes:
        return self.inflate.decompress(data or self.inflate.unconsumed_tail, limit)

    @property
    def needs_input(self) -> bool:
        return not self.inflate.unconsumed_tail

    @property
    def eof(self) -> bool:
        return self.inflate.eof

    @property
    def unused_data(self) -> bytes:
        return self.inflate.unused_data
