"""Undoes the transfer and content codings of an HTTP message: gzip, deflate, br, zstd, chunked.

Independent of archives and pages. warcio is not used: it supports only one spelling of each coding
and one coding at a time, fails on br with brotli 1.2, stops after the first gzip member, and leaves
the lengths of chunks in a text if the last chunk has trailers.
"""

import codecs
import re
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from data_prep.files.streams import BLOCK_BYTES, GZIP

PIECE_BYTES = 1 << 10  # decompressed at a time, which bounds the size of the output
SAMPLE_BYTES = 1 << 10
# Members and frames may follow one another; zstd also has frames that decoders skip.
MEMBER_STARTS = {"gzip": rb"\x1f\x8b", "zstd": rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18"}
_CHUNK_LENGTH = re.compile(rb"([0-9A-Fa-f]{1,8})[ \t]*(?:;[^\r\n]*)?\r?\n")
_TRAILERS = re.compile(rb"(?:[^\r\n]+\r?\n)*(?:\r?\n|\Z)")
ALIASES = {"x-gzip": "gzip", "x-deflate": "deflate", "": "identity"}


def split_values(headers: Sequence[tuple[str, str]], name: str) -> list[str]:
    """Return the comma-separated values from all lines of a header, in lower case."""
    lines = [value for key, value in headers if key.lower() == name]
    return [each.strip().lower() for line in lines for each in line.split(",")]


def decode_content(
    content: bytes, headers: Sequence[tuple[str, str]], max_bytes: int, is_truncated: bool
) -> bytes:
    """Decode the content of a message, truncated after `max_bytes` or slightly more.

    A crawler may have decoded the content but kept the header, so content that is already text is
    returned unchanged.

    Args:
        is_truncated: whether the crawler has marked the content as truncated.

    Raises:
        ValueError: the content cannot be decoded; the message states the reason.
    """
    codings = split_values(headers, "content-encoding")
    codings += split_values(headers, "transfer-encoding")
    for name in reversed(codings):
        coding = ALIASES.get(name, name)
        if coding == "identity" or (coding == "chunked" and not _CHUNK_LENGTH.match(content)):
            continue
        try:
            if coding == "chunked":
                content = _joined(content, is_truncated)
            else:
                content = _unpack(content, coding, max_bytes, is_truncated)
        except Exception as error:  # each library raises its own exceptions
            if coding == "chunked" or not _is_text(content):
                raise ValueError(f"encoding {name}: {error}") from None
    return content


def _joined(content: bytes, is_truncated: bool) -> bytes:
    """Join the chunks of a message."""
    chunks, place = list[bytes](), 0
    while (line := _CHUNK_LENGTH.match(content, place)) is not None:
        start, place = line.end(), line.end() + int(line[1], 16)
        if place == start:
            trailers = _TRAILERS.match(content, start)
            _refuse_rest(content[trailers.end() if trailers else start :], "last chunk")
            return b"".join(chunks)
        chunks.append(content[start:place])
        place += 2 if content.startswith(b"\r\n", place) else content.startswith(b"\n", place)
    if place < len(content):
        raise ValueError(f"the last {len(content) - place:,} bytes are not a chunk")
    if not is_truncated:
        raise ValueError("ends too early")
    return b"".join(chunks)


def _unpack(content: bytes, coding: str, max_bytes: int, is_truncated: bool) -> bytes:
    """Decompress all members or frames of a message."""
    open_member = _opener(coding, content, max_bytes)
    member_start = MEMBER_STARTS.get(coding)
    member, blocks, size = open_member(), list[bytes](), 0
    for start in range(0, len(content), PIECE_BYTES):
        piece = content[start : start + PIECE_BYTES]
        while piece:
            if member.eof:
                rest = piece + content[start + PIECE_BYTES :]
                if member_start is None or not re.match(member_start, rest):
                    _refuse_rest(rest, f"{coding} data")
                    return b"".join(blocks)
                member = open_member()
            blocks.append(member.decompress(piece))
            piece = member.unused_data
            size += len(blocks[-1])
        if size > max_bytes:
            break
    if content and size <= max_bytes and not is_truncated and not member.eof:
        raise ValueError("ends too early")
    return b"".join(blocks)


def _refuse_rest(rest: bytes, what: str) -> None:
    """Refuse bytes after the end of coded content, other than padding and line ends."""
    if rest.strip(b"\0\r\n\t "):
        raise ValueError(f"{len(rest):,} bytes follow the end of the {what}")


class _Brotli:
    """A decompressor with zlib's interface that stops after `max_bytes`."""

    unused_data = b""  # brotli itself refuses bytes after the end

    def __init__(self, max_bytes: int) -> None:
        import brotli

        self.decompressor, self.rest = brotli.Decompressor(), max_bytes

    @property
    def eof(self) -> bool:
        return self.decompressor.is_finished()

    def decompress(self, piece: bytes) -> bytes:
        process = self.decompressor.process
        block = process(piece, output_buffer_limit=BLOCK_BYTES)
        while not self.decompressor.can_accept_more_data() and len(block) <= self.rest:
            block += process(b"", output_buffer_limit=BLOCK_BYTES)
        self.rest -= len(block)
        return block


def _opener(coding: str, content: bytes, max_bytes: int) -> Callable[[], Any]:
    """Return a function that opens a decompressor for a member, with zlib's interface."""
    if coding == "gzip":
        return partial(zlib.decompressobj, GZIP)
    if coding == "deflate":  # with the zlib header that some servers omit
        has_header = content[:1] == b"\x78" and int.from_bytes(content[:2], "big") % 31 == 0
        return partial(zlib.decompressobj, zlib.MAX_WBITS if has_header else -zlib.MAX_WBITS)
    if coding == "br":
        return partial(_Brotli, max_bytes)
    if coding == "zstd":
        import zstandard

        return zstandard.ZstdDecompressor().decompressobj
    raise ValueError("is not one of gzip, deflate, br and zstd")


def _is_text(content: bytes) -> bool:
    """Return whether the beginning of the content is UTF-8, which compressed data never is."""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(content[:SAMPLE_BYTES])
    except UnicodeDecodeError:
        return False
    return b"\0" not in content[:SAMPLE_BYTES]
