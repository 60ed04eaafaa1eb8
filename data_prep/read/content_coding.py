"""Undoes the transfer and content codings of an HTTP message: gzip, deflate, br, zstd, chunked.

Independent of archives and pages. warcio joins chunks, but knows a coding in one
spelling and one at a time, and fails at br with brotli 1.2.
"""

import codecs
import zlib
from collections.abc import Sequence
from io import BytesIO
from typing import Any

from data_prep.read.streams import BLOCK_BYTES, GZIP

PIECE_BYTES = 1 << 10  # of packed content at a time, which bounds what it expands to
SAMPLE_BYTES = 1 << 10
ALIASES = {"x-gzip": "gzip", "x-deflate": "deflate", "": "identity"}


def split_values(headers: Sequence[tuple[str, str]], name: str) -> list[str]:
    """Return the values of a header in lower case: of all its lines, separated by commas."""
    lines = [value for key, value in headers if key.lower() == name]
    return [each.strip().lower() for line in lines for each in line.split(",")]


def decode_content(
    content: bytes, headers: Sequence[tuple[str, str]], max_bytes: int, is_truncated: bool
) -> bytes:
    """Return the content as it was before coding; cut after `max_bytes` or a little more.

    A crawler may have undone a coding and kept the header: content that is text stays as it is.

    Args:
        is_truncated: whether the crawler says that it did not keep all of the content.

    Raises:
        ValueError: it cannot be decoded; the message says why.
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
        except Exception as error:  # each library has its own
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
    """A decompressor with the methods of those of zlib, which stops after `max_bytes`."""

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
    if coding == "deflate":  # with the header of zlib, or as some servers send it without
        has_header = content[:1] == b"\x78" and int.from_bytes(content[:2], "big") % 31 == 0
        return zlib.decompressobj(zlib.MAX_WBITS if has_header else -zlib.MAX_WBITS)
    if coding == "br":
        return _Brotli(max_bytes)
    if coding == "zstd":
        import zstandard

        return zstandard.ZstdDecompressor().decompressobj()
    raise ValueError("is not one of gzip, deflate, br and zstd")


def _is_text(content: bytes) -> bool:
    """Return whether the beginning is UTF-8, which nothing compressed is."""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(content[:SAMPLE_BYTES])
    except UnicodeDecodeError:
        return False
    return b"\0" not in content[:SAMPLE_BYTES]
