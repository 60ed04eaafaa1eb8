"""Reads JSON lines, each of which is a document; reading can begin at any byte."""

import codecs
import io
import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, BinaryIO

from data_prep.files.documents import Chunk, Document, InputRules, Problem
from data_prep.files.encodings import UTF8
from data_prep.files.inputs import END, Input, InputRange, problem_chunk, stream_of
from data_prep.files.lines import read_line_blocks, read_plain_line_blocks
from data_prep.files.parse import (
    BYTE_ORDER_MARK,
    SHOWN_CHARACTERS,
    Parsed,
    encoding_problem,
    find_text,
    lone_surrogate_of,
    not_a_string_problem,
    too_long_problem,
)
from data_prep.files.streams import COMPRESSIONS
from data_prep.formats.format import Format, Split, split_anywhere
from zerolm.common.records import open_regular
from zerolm.common.url import is_url

JSON_HINT = "Convert a JSON array to JSON lines with: jq -c '.[]' a.json > a.jsonl"
BEYOND_64_BITS = float(1 << 63)
SNIFFED_BYTES = 1 << 20


def lines_suffix(path: str, text_field: str) -> str | None:
    """Return the suffix for JSON lines if a `.json` file contains JSON lines, else None.

    Such a file starts with two lines that are objects, or its first line is an object whose text
    is a string.
    """
    key = text_field.rpartition(".")[2].encode()
    try:
        with open_regular(path) or io.BytesIO() as file:
            lines = (line.removeprefix(codecs.BOM_UTF8).strip() for line in _sniffed(file))
            first, second = next(filter(None, lines), b""), next(filter(None, lines), b"")
    except OSError:
        return None
    try:
        record = json.loads(first)
    except (ValueError, RecursionError):  # a long document, which the sample truncates
        is_text = len(first) > SNIFFED_BYTES // 2 and first.startswith(b'{"')
        pattern = rb'"' + re.escape(key) + rb'"\s*:\s*"'
        return JSON_LINES.endings[0] if is_text and re.search(pattern, first) else None
    if not isinstance(record, dict):
        return None
    is_text = isinstance(find_text(record, text_field)[1], str)
    return JSON_LINES.endings[0] if is_text or second.startswith(b"{") else None


def _sniffed(file: BinaryIO) -> Iterator[bytes]:
    """Yield the lines in the first `SNIFFED_BYTES` of a file; the last line may be truncated."""
    left = SNIFFED_BYTES
    while left > 0 and (line := file.readline(left)):
        left -= len(line)
        yield line


def _read(
    source: Input, part: InputRange, rules: InputRules, chunk_bytes: int
) -> Iterator[tuple[Chunk, int]]:
    stream = stream_of(source, max(0, part.start - 1), rules)
    limit = rules.max_document_bytes
    is_compressed = source.encoding != UTF8 or source.suffix.endswith(COMPRESSIONS)
    counted, next_start = None, part.start  # `counted`: stored bytes in earlier chunks
    is_plain = not is_compressed and not is_url(source.name)
    blocks = read_plain_line_blocks if is_plain else read_line_blocks
    for block in blocks(stream, part.start, part.stop, chunk_bytes, limit):
        if counted is None:
            counted = stream.skipped_bytes if is_compressed else block.start
        read = block.read_bytes if is_compressed else block.stop
        chunk = Chunk(source.name, "lines", block.start, block.data, read - counted, part.input)
        chunk = chunk._replace(encoding=stream.encoding)
        if not block.data:
            problem = too_long_problem(chunk, block.start, block.stop - block.start, limit)
            chunk = chunk._replace(kind="bad", data=problem)
        counted, next_start = read, block.stop
        yield chunk, next_start
    if stream.failure is not None:
        lost = max(0, (source.size_bytes or 0) - (counted or 0))
        yield problem_chunk(source, part, next_start, stream.failure, 1, lost), END


def parse_lines(chunk: Chunk, rules: InputRules) -> Parsed:
    """Return the documents of a chunk of lines, each valid if Python's `json` accepts it."""
    import orjson

    documents: list[Document] = []
    skipped: Counter[str] = Counter()
    problems: list[Problem] = []
    data, offset, input_index = chunk.data, chunk.start, chunk.input
    if offset == 0 and data.startswith(BYTE_ORDER_MARK):
        data, offset = data[len(BYTE_ORDER_MARK) :], len(BYTE_ORDER_MARK)
    field, keep, limit = rules.text_field, rules.keep_records, rules.max_document_bytes
    view, find, loads = memoryview(data), data.find, orjson.loads
    start, size = 0, len(data)
    while start < size:
        end = find(b"\n", start)
        if end < 0:
            end = size
        place, part, start = start + offset, view[start:end], end + 1
        if len(part) > limit:
            problems.append(too_long_problem(chunk, place, len(part), limit))
            continue
        try:
            record = loads(part)
            text = record[field]
        except (ValueError, KeyError, TypeError) as error:
            found = False
            if type(error) is KeyError:  # the text field is missing, or is a path into objects
                found, text = find_text(record, field)
            if not found:
                line = bytes(part)
                if not line or line.isspace():
                    skipped["blank_lines"] += 1
                    continue
                record, text, problem = _parse_unusual_line(chunk, place, line, field)
                if problem is not None:
                    problems.append(problem)
                    continue
        if type(text) is str and text and not keep:
            documents.append(Document(text, input_index, place))
        elif type(text) is str and text:
            documents.append(Document(text, input_index, place, _exact_integers(record, part)))
        elif text is None:
            skipped["null"] += 1
        elif text == "":
            skipped["empty"] += 1
        else:
            problems.append(not_a_string_problem(chunk, place, text))
    return documents, skipped, problems


def _exact_integers(record: dict[str, Any], line: memoryview) -> dict[str, Any]:
    """Parse a line again if orjson may have converted integers beyond 64 bits to floats."""
    for value in record.values():
        if type(value) is float and abs(value) >= BEYOND_64_BITS:
            return json.loads(bytes(line))
    return record


def _parse_unusual_line(chunk: Chunk, place: int, line: bytes, field: str) -> tuple[Any, Any, Any]:
    """Parse a line that orjson refuses or that lacks the text field; return (record, text,
    problem).

    orjson refuses some lines that `json` accepts: NaN, infinities, lone surrogates, deep nesting.
    Files written by Python contain such values, mostly in keys other than the text, so any line
    that `json` accepts is valid.
    """

    def problem(reason: str, detail: str, at: int = 0) -> tuple[None, None, Problem]:
        return None, None, Problem(reason, chunk.name, chunk.input, place + at, False, detail)

    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return problem(*encoding_problem(chunk, line, error.start), error.start)
    except (ValueError, RecursionError) as error:
        shown = line[:SHOWN_CHARACTERS].decode("utf-8", "replace")
        fix = JSON_HINT if not place and line[:1] == b"[" else "Correct the line, or remove it."
        return problem("bad_json", f"not valid JSON ({error}): {shown!r}. {fix}")
    if not isinstance(record, dict):
        kind = type(record).__name__
        hint = f" {JSON_HINT}" if kind == "list" else ""
        return problem("not_an_object", f"a JSON {kind}, not an object with a {field!r} key.{hint}")
    found, text = find_text(record, field)
    if not found:
        keys = ", ".join(repr(key)[:SHOWN_CHARACTERS] for key in list(record)[:8]) or "no keys"
        return problem(
            "no_text_field", f"no key {field!r}; it has {keys}. Choose one with --text_field."
        )
    if isinstance(text, str) and (detail := lone_surrogate_of(text)) is not None:
        return problem("lone_surrogate", detail)
    return record, text, None


def _split(source: Input, limit: int) -> list[Split]:
    is_stored = source.encoding == UTF8 and not source.suffix.endswith(COMPRESSIONS)
    return split_anywhere(source, limit) if is_stored else []


JSON_LINES = Format(
    (".jsonl", ".ndjson"),
    _read,
    parse_lines,
    compressions=COMPRESSIONS,
    help=".jsonl or .ndjson (one per line)",
    split=_split,
    reasons={
        "bad_json": "lines that are not JSON",
        "not_an_object": "lines that are JSON, but not an object",
    },
)
JSON = replace(  # an uncompressed .json file is read if `lines_suffix` recognises it
    JSON_LINES,
    endings=tuple(f".json{end}" for end in COMPRESSIONS),
    compressions=(),
    shown=(f"JSON lines in .json ({', '.join(COMPRESSIONS)})",),
    help="all of these, and .json, also with .gz, .zst, .bz2 or .xz",
)
