"""Reads WARC and WET files record by record: web pages with their URL and date.

In a compressed file each record is its own gzip member, so a reader can start at any record, and
continue with the next record after a damaged one. warcio only parses records; it is not used for
decompression because it silently truncates damaged records.
"""

import re
import zlib
from collections.abc import Iterator
from io import BytesIO
from typing import BinaryIO, NamedTuple

from data_prep.files.documents import Chunk, InputRules
from data_prep.files.inputs import END, Input, InputRange, problem_chunk
from data_prep.files.remote import open_stored
from data_prep.files.streams import BLOCK_BYTES, GZIP, GZIP_MAGIC, READ_BYTES, TRUNCATED, Failure
from data_prep.formats.content_coding import decode_content
from data_prep.formats.format import Format, Split, split_anywhere
from data_prep.formats.pages import MAX_PAGE_BYTES, PACKAGES, Page, read_pages
from zerolm.common.errors import reason

VERSION_LINE = b"WARC/"
SEARCH_BYTES = 1 << 20
PROBE_BYTES = 1 << 12  # read from a member to check whether it is a record
MAX_HEADER_BYTES = 1 << 16
HTML_TYPES = ("text/html", "application/xhtml+xml")
PAGE_RECORDS = ("response", "resource", "conversion")  # the others describe these
_TYPE_LINE = re.compile(rb"(?im)^warc-type:.*$")
_MEDIA_TYPE = re.compile(r"[\w.+-]{1,40}/[\w.+-]{1,40}")
_CONTENT_LENGTH = re.compile(rb"(?im)^content-length:\s*(\d+)\s*$")
_HTML_START = re.compile(
    rb"\s*(?:<!--.*?-->\s*)*<(?:!doctype\s+html|html|head|body)\b", re.I | re.S
)
NOT_A_RECORD = Failure(
    "damaged", "is not a WARC record. The file is damaged: restore it, or remove it."
)
ONE_MEMBER = Failure(
    "damaged",
    "has several records in one gzip member. Rewrite the file with: warcio recompress OLD NEW.",
)
WRONG_LENGTH = (
    "differs from its Content-Length: {missing:,} bytes are missing, and {rest:,} follow it. The "
    "record is cut, or not in one gzip member. Restore the file, or remove it."
)


class Record(NamedTuple):
    """A record in bytes [start, stop) of the stored file."""

    start: int
    stop: int
    data: bytes  # headers and content
    failure: Failure | None = None


def read_archive(
    source: Input, part: InputRange, rules: InputRules, chunk_bytes: int
) -> Iterator[tuple[Chunk, int]]:
    """Yield (chunk, start of the next chunk) for a part of a WARC; see `readers.read_input`."""
    size = source.size_bytes or 0
    is_gzip = source.suffix.endswith(".gz")
    limit = min(rules.max_document_bytes, MAX_PAGE_BYTES)
    pages: list[Page] = []
    first, stop, content_bytes, seen = 0, 0, 0, False
    with open_stored(source.name) as raw:
        for record in read_records(raw, size, is_gzip, part.start, part.stop, limit):
            if not seen:
                first, seen = record.start, True
            failure = record.failure
            page = page_of(record, limit) if failure is None else None
            if isinstance(page, Failure):
                failure = page
            elif page is not None:
                pages.append(page)
                content_bytes += len(page.content)
            stop = record.start if failure is not None else record.stop
            if failure is None and content_bytes < chunk_bytes:
                continue
            if stop > first:
                chunk = Chunk(source.name, "pages", first, pages, stop - first, part.input)
                yield chunk, stop
                pages, content_bytes, first = [], 0, stop
            if failure is not None:
                lost = record.stop - record.start
                yield problem_chunk(source, part, record.start, failure, 1, lost), record.stop
                first = stop = record.stop
    yield Chunk(source.name, "pages", first, pages, stop - first, part.input), END


def read_records(
    raw: BinaryIO, size: int, is_gzip: bool, start: int, stop: int | None, max_bytes: int
) -> Iterator[Record]:
    """Yield the records that start in [start, stop), and a failure for each damaged part.

    Args:
        raw: the stored file, which contains `size` bytes.
        start: any byte of a compressed file; in an uncompressed file, the start of a record.
        max_bytes: maximum size of a record; for a larger record, a failure is yielded.
    """
    find, read = (_find_member, _read_member) if is_gzip else (_find_plain, _read_plain)
    place = find(raw, start) if start else 0
    end = size if stop is None or (after := find(raw, stop)) is None else after
    while place is not None and place < end:
        data, following, failure = read(raw, place, max_bytes)
        if failure is None and not data and not raw.read(1):
            return  # padding at the end of a file
        if failure is None and not data.startswith(VERSION_LINE):
            failure = NOT_A_RECORD
        if failure is not None and failure.reason != "too_long":
            found = find(raw, place + 1)
            following = size if found is None else found
        following = min(following, size)  # the newlines after the last record may be missing
        yield Record(place, following, data, failure)
        place = following


def _find_member(raw: BinaryIO, start: int) -> int | None:
    """Return the position of the first gzip member, at or after `start`, with a WARC record."""
    magic = GZIP_MAGIC + b"\x08"
    while True:
        raw.seek(start)
        block = raw.read(SEARCH_BYTES)
        place = block.find(magic)
        while place >= 0:
            raw.seek(start + place)
            try:
                begins = zlib.decompressobj(GZIP).decompress(raw.read(PROBE_BYTES), 5)
            except zlib.error:
                begins = b""
            if begins == VERSION_LINE:
                return start + place
            place = block.find(magic, place + 1)
        if len(block) < SEARCH_BYTES:
            return None
        start += len(block) - len(magic) + 1


def _read_member(raw: BinaryIO, start: int, max_bytes: int) -> tuple[bytes, int, Failure | None]:
    """Decompress the member at `start`; return (data, stop, failure)."""
    raw.seek(start)
    inflate = zlib.decompressobj(GZIP)
    blocks, size, read = [], 0, 0
    while not inflate.eof:
        data = inflate.unconsumed_tail
        if not data:
            data = raw.read(READ_BYTES)
            if not data:
                return b"", start + read, TRUNCATED
            if not read and not data.strip(b"\0"):  # padding
                raw.seek(0, 2)
                return b"", raw.tell(), None
            read += len(data)
        try:
            block = inflate.decompress(data, BLOCK_BYTES)
        except zlib.error as error:
            detail = f"{error}. The record is damaged: restore the file, or remove it."
            return b"", start, Failure("damaged", detail)
        size += len(block)
        if size <= max_bytes + MAX_HEADER_BYTES:
            blocks.append(block)
    stop = start + read - len(inflate.unused_data)
    if size > max_bytes + MAX_HEADER_BYTES:
        return b"", stop, _too_long(size, max_bytes)
    return b"".join(blocks), stop, None


def _find_plain(raw: BinaryIO, start: int) -> int | None:
    """Return the position of an uncompressed file's first record at or after `start`."""
    start = max(0, start - 4)
    pattern = b"\r\n\r\n" + VERSION_LINE
    while True:
        raw.seek(start)
        block = raw.read(SEARCH_BYTES)
        place = block.find(pattern)
        if place >= 0:
            return start + place + 4
        if len(block) < SEARCH_BYTES:
            return None
        start += len(block) - len(pattern) + 1


def _read_plain(raw: BinaryIO, start: int, max_bytes: int) -> tuple[bytes, int, Failure | None]:
    """Read the record at `start` in an uncompressed file; return (data, stop, failure)."""
    raw.seek(start)
    head = b""
    while line := raw.readline(MAX_HEADER_BYTES):
        head += line
        if not line.strip() or len(head) > MAX_HEADER_BYTES:
            break
    length = _CONTENT_LENGTH.search(head)
    if not head:
        return b"", start, None
    if not head.startswith(VERSION_LINE) or length is None:
        return b"", start, NOT_A_RECORD
    body = int(length[1])
    stop = start + len(head) + body + 4  # two line ends
    if body > max_bytes:
        return b"", stop, _too_long(body, max_bytes)
    data = raw.read(body)
    if len(data) < body:
        return b"", start, TRUNCATED
    if raw.read(4) not in (b"\r\n\r\n", b""):
        return b"", start, NOT_A_RECORD
    return head + data, stop, None


def _too_long(size: int, max_bytes: int) -> Failure:
    return Failure("too_long", f"a record of {size:,} bytes is longer than {max_bytes:,} bytes.")


def page_of(record: Record, max_bytes: int) -> Page | Failure | None:
    """Return a record's page, which may be marked as skipped, or None if the record contains no
    page.
    """
    from warcio.recordloader import ArcWarcRecordLoader

    stream = BytesIO(_TYPE_LINE.sub(lambda line: line[0].lower(), record.data, count=1))
    undecodable = ""
    try:
        parsed = ArcWarcRecordLoader(verify_http=False, arc2warc=False).parse_record_stream(
            stream, check_digests=True
        )
        headers, http = parsed.rec_headers, parsed.http_headers
        content = parsed.raw_stream.read()
        num_read = stream.tell() - headers.total_len
        missing = max(0, int(headers.get_header("Content-Length") or 0) - num_read)
        is_page = parsed.rec_type in PAGE_RECORDS
        is_truncated = headers.get_header("WARC-Truncated") is not None
        if is_page and http is not None:
            try:
                content = decode_content(content, http.headers, max_bytes, is_truncated)
            except ValueError as error:
                undecodable = str(error)
    except Exception as error:  # warcio's own errors, or other errors if headers are missing
        return Failure("damaged", f"cannot be read as a WARC record ({reason(error)}).")
    if any("block digest failed" in each for each in parsed.digest_checker.problems):
        detail = "differs from its WARC-Block-Digest. Restore the file, or remove it."
        return Failure("damaged", detail)
    rest = stream.read().strip()
    if rest.startswith(VERSION_LINE):
        return ONE_MEMBER
    if rest or missing:
        return Failure("damaged", WRONG_LENGTH.format(missing=missing, rest=len(rest)))
    if not is_page:
        return None
    keys = {
        key: value
        for key, name in (
            ("id", "WARC-Record-ID"),
            ("url", "WARC-Target-URI"),
            ("date", "WARC-Date"),
        )
        if (value := headers.get_header(name))
    }
    sent = (http.get_header("Content-Type") if http else parsed.content_type) or ""
    kind = _media_type(headers.get_header("WARC-Identified-Payload-Type") or sent)
    is_text = parsed.rec_type == "conversion" and kind in ("", "text/plain")
    if http is not None and not http.get_statuscode().startswith("2"):
        return Page(record.start, b"", skipped="http_error")
    if not is_text and kind not in HTML_TYPES and (kind or not _HTML_START.match(content)):
        kind = kind if _MEDIA_TYPE.fullmatch(kind) else "unknown"
        return Page(record.start, b"", skipped=f"not_a_page.{kind}")
    if undecodable:
        return Failure("failed_page", f"its content cannot be decoded ({undecodable}).")
    if len(content) > max_bytes:
        return _too_long(len(content), max_bytes)
    return Page(record.start, content, sent, keys, not is_text)


def _media_type(header: str) -> str:
    """Return the media type from a header value, in lower case and without parameters."""
    return header.partition(";")[0].partition(",")[0].strip(" \t\"'").lower()


def _split(source: Input, limit: int) -> list[Split]:
    return split_anywhere(source, limit) if source.suffix.endswith(".gz") else []


WARC = Format(
    (".warc", ".wet"),
    read_archive,
    read_pages,
    compressions=(".gz",),
    help=".warc or .wet (one per page; also .gz)",
    places="byte",
    packages=(*PACKAGES, "warcio", "brotli", "zstandard"),
    cost=16,
    split=_split,
    reasons={
        "not_a_page": "WARC records whose content is not a page",
        "http_error": "pages with an HTTP status other than 2xx",
    },
)
