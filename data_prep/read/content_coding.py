"""Undoes the transfer and content codings of an HTTP message: gzip, deflate, br, zstd, chunked.

Independent of archives and pages. warcio is used only to join chunks: it supports only one
spelling of each coding and only one coding at a time, and fails on br with brotli 1.2.
"""

import codecs
import zlib
from collections.abc import Sequence
from io import BytesIO
from typing import Any

from data_prep.read.streams import BLOCK_BYTES, GZIP

PIECE_BYTES = 1 << 10  # decompressed at a time, which bounds the size of the output
SAMPLE_BYTES = 1 << 10
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
        try:
            if coding == "chunked":
                from warcio.bufferedreaders import ChunkedDataReader

                content = ChunkedDataReader(BytesIO(content)).read()
            elif coding != "identity":
                decompressor = _decompressor(coding, content, max_bytes)
                content = _unpack(content, decompressor, max_bytes, is_truncated)
        except Exception as error:  # each library raises its own exceptions
            if not _is_text(content):
                raise ValueError(f"encoding {name}: {error}") from None
    return content


def _unpack(content: bytes, decompressor: Any, max_bytes: int, is_truncated: bool) -> bytes:
    blocks, size = [], 0
    for start in range(0, len(content), PIECE_BYTES):
        blocks.append(decompressor.decompress(content[start : start + PIECE_BYTES]))
        size += len(blocks[-1])
        if size > max_bytes:
            break
    if content and size <= max_bytes and not is_truncated and not decompressor.eof:
        raise ValueError("ends too early")
    return b"".join(blocks)


class _Brotli:
    """A decompressor with zlib's interface that stops after `max_bytes`."""

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


def _decompressor(coding: str, content: bytes, max_bytes: int) -> Any:
    if coding == "gzip":
        return zlib.decompressobj(GZIP)
    if coding == "deflate":  # with the zlib header that some servers omit
        has_header = content[:1] == b"\x78" and int.from_bytes(content[:2], "big") % 31 == 0
        return zlib.decompressobj(zlib.MAX_WBITS if has_header else -zlib.MAX_WBITS)
    if coding == "br":
        return _Brotli(max_bytes)
    if coding == "zstd":
        import zstandard

        return zstandard.ZstdDecompressor().decompressobj()
    raise ValueError("is not one of gzip, deflate, br and zstd")


def _is_text(content: bytes) -> bool:
    """Return whether the beginning of the content is UTF-8, which compressed data never is."""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(content[:SAMPLE_BYTES])
    except UnicodeDecodeError:
        return False
    return b"\0" not in content[:SAMPLE_BYTES]
