"""Reads CSV and TSV files row by row; reading can resume at the byte position of any row."""

import csv
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from data_prep.files.documents import Chunk, Document, InputRules, Problem
from data_prep.files.encodings import UTF8
from data_prep.files.inputs import END, Input, InputRange, problem_chunk, stream_of
from data_prep.files.lines import read_line_blocks
from data_prep.files.parse import Parsed, encoding_problem, too_long_problem
from data_prep.files.streams import COMPRESSIONS, Failure, Stream
from data_prep.formats.format import Format

DELIMITERS = {".csv": ",;\t|", ".tsv": "\t,;|"}  # in order of preference
BLOCK_BYTES = 1 << 18
TOO_LONG = "\udbff"  # replaces a line that is too long; no byte sequence decodes to this character


class Header(NamedTuple):
    """The first row of a file, which contains the column names."""

    names: list[str]
    delimiter: str
    stop: int  # byte after it


class Row(NamedTuple):
    """The row in bytes [start, stop), or a part of the file that is not valid CSV."""

    start: int
    stop: int
    fields: list[str]
    read_bytes: int  # of the stored file
    problem: str = ""  # why the row is not valid CSV
    failure: Failure | None = None  # why reading ends here


class _Lines:
    """Yields a stream's lines to `csv.reader`; `stop` is the byte after the last yielded line."""

    def __init__(self, stream: Stream, start: int, max_bytes: int):
        self.stream, self.stop, self.max_bytes = stream, start, max_bytes
        self.read_bytes = 0
        self._iterator = self._read(start)

    def __iter__(self) -> Iterator[str]:
        return self._iterator

    def _read(self, start: int) -> Iterator[str]:
        blocks = read_line_blocks(self.stream, start, None, BLOCK_BYTES, self.max_bytes)
        for block in blocks:
            self.read_bytes = block.read_bytes
            if not block.data:
                self.stop = block.stop
                yield TOO_LONG + "\n"
                continue
            for line in block.data.split(b"\n")[: None if block.data[-1:] != b"\n" else -1]:
                at_start = not self.stop
                self.stop = min(self.stop + len(line) + 1, block.stop)
                yield line.decode("utf-8-sig" if at_start else "utf-8", "surrogateescape") + "\n"


def header_of(source: Input, rules: InputRules) -> tuple[Header | None, Failure | None]:
    """Return a file's header, and the reason if its rows cannot be read; both are None if the file
    is empty.

    The first delimiter for which the header contains the text column is used.
    """
    stream = stream_of(source, 0, rules)
    lines = _Lines(stream, 0, rules.max_document_bytes)
    iterator, seen = iter(lines), list[tuple[str, int]]()  # lines, each with the byte after it

    def replay() -> Iterator[str]:
        yield from (line for line, _ in seen)
        for line in iterator:
            seen.append((line, lines.stop))
            yield line

    choices = DELIMITERS[source.suffix[:4]]
    names: list[str] = []
    try:
        for delimiter in (*choices, choices[0]):
            reader = csv.reader(replay(), delimiter=delimiter, strict=True)
            names = next((row for row in reader if "".join(row).strip()), [])
            if rules.text_field in names or not names:
                break
    except csv.Error as error:
        return None, Failure("fields", f"has a header that is not CSV ({error}). Correct it.")
    if not seen and stream.failure is None:  # nothing but compression
        return None, None
    if not names:
        missing = Failure("fields", "has no header, a first row with the names of its columns.")
        return None, stream.failure or missing
    header = Header(names, delimiter, seen[reader.line_num - 1][1])
    if rules.text_field not in names:
        detail = (
            f"no column {rules.text_field!r}; it has {', '.join(names)[:500]}. Choose a column "
            "with --text_field. A file with a different column needs its own command or source."
        )
        return header, Failure("no_text_field", detail)
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        return header, Failure("fields", f"has several columns {twice[0]!r}. Rename all but one.")
    return header, None


def read_table(
    source: Input, part: InputRange, rules: InputRules, chunk_bytes: int
) -> Iterator[tuple[Chunk, int]]:
    """Yield (chunk, start of the next chunk) for a part of a CSV file; see `readers.read_input`."""
    size = source.size_bytes or 0
    header, failure = header_of(source, rules)
    if failure is not None:
        yield problem_chunk(source, part, 0, failure, 1, size), END
        return
    if header is None:
        yield Chunk(source.name, "skipped", 0, "no_bytes", size, part.input), END
        return
    start = max(header.stop, part.start)
    stream = stream_of(source, start - 1, rules)
    is_stored = source.encoding == UTF8 and not source.suffix.endswith(COMPRESSIONS)
    counted = -1 if part.start else 0  # stored bytes that previous chunks have counted
    rows: list[tuple[int, int, list[str] | str]] = []
    first = stop = start
    for row in read_rows(stream, header, start, rules.max_document_bytes):
        if counted < 0:
            counted = start if is_stored else stream.skipped_bytes
        if row.failure is None:
            rows.append((row.start, row.stop, row.problem or row.fields))
            stop = row.stop
        if rows and (row.failure is not None or stop - first >= chunk_bytes):
            read = stop if is_stored else row.read_bytes
            yield _chunk(source, stream, part, header, rows, first, read - counted), stop
            rows, counted, first = [], read, stop
        if row.failure is not None:
            yield problem_chunk(source, part, row.start, row.failure, 1, size - counted), END
            return
    if counted < 0:
        counted = start if is_stored else stream.skipped_bytes
    rest = max(0, size - counted)
    if stream.failure is None:
        yield _chunk(source, stream, part, header, rows, first, rest), END
        return
    if rows:
        yield _chunk(source, stream, part, header, rows, first, 0), stop
    yield problem_chunk(source, part, stop, stream.failure, 1, rest), END


def _chunk(
    source: Input,
    stream: Stream,
    part: InputRange,
    header: Header,
    rows: list[tuple[int, int, list[str] | str]],
    start: int,
    read_bytes: int,
) -> Chunk:
    chunk = Chunk(source.name, "fields", start, (header, rows), read_bytes, part.input)
    return chunk._replace(encoding=stream.encoding)


def read_rows(stream: Stream, header: Header, start: int, max_bytes: int) -> Iterator[Row]:
    """Yield the rows that follow byte `start`, at which a row begins.

    Args:
        stream: the file's content from byte max(0, start - 1).
        max_bytes: maximum size of a field and of a line.
    """
    # Fields slightly over the limit are refused later, row by row.
    csv.field_size_limit(max_bytes + BLOCK_BYTES)
    lines = _Lines(stream, start, max_bytes)
    reader = csv.reader(lines, delimiter=header.delimiter, strict=True)
    while True:
        begin = lines.stop
        try:
            fields = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            if stream.failure is not None:  # the quoted field extends to the end of the file
                return
            if "unexpected end of data" in str(error):
                detail = "the file is not CSV from here on: a quote has no end. Correct the row."
                yield Row(
                    begin, lines.stop, [], lines.read_bytes, failure=Failure("damaged", detail)
                )
                return
            detail = f"the row is not CSV ({error}). Correct it, or remove it."
            yield Row(begin, lines.stop, [], lines.read_bytes, detail)
            continue
        yield Row(begin, lines.stop, fields, lines.read_bytes)


def read_fields(chunk: Chunk, rules: InputRules) -> Parsed:
    """Return the documents of a chunk of rows; see `parse.read_documents`."""
    header, rows = chunk.data
    documents: list[Document] = []
    skipped: Counter[str] = Counter()
    problems: list[Problem] = []

    def add_problem(reason: str, start: int, detail: str) -> None:
        problems.append(Problem(reason, chunk.name, chunk.input, start, False, detail))

    for start, stop, fields in rows:
        if isinstance(fields, str):
            add_problem("fields", start, fields)
            continue
        if not fields:
            skipped["blank_lines"] += 1
            continue
        if TOO_LONG in "".join(fields):
            limit = rules.max_document_bytes
            problems.append(too_long_problem(chunk, start, stop - start, limit))
            continue
        if len(fields) != len(header.names):
            detail = f"the row has {len(fields)} fields, but the header has {len(header.names)}."
            add_problem("fields", start, detail)
            continue
        record = dict(zip(header.names, fields, strict=True))
        text = record[rules.text_field]
        try:
            size = len("".join(fields).encode())
        except UnicodeEncodeError as error:
            byte = bytes([ord(error.object[error.start]) & 0xFF])
            reason, detail = encoding_problem(chunk, byte, 0)
            add_problem(reason, start, detail)
            continue
        if size > rules.max_document_bytes:
            problems.append(too_long_problem(chunk, start, size, rules.max_document_bytes))
        elif not text:
            skipped["empty"] += 1
        else:
            kept = record if rules.keep_records else None
            documents.append(Document(text, chunk.input, start, kept))
    return documents, skipped, problems


def _check(source: Input, text_field: str) -> Input:
    return replace(source, problem=header_of(source, InputRules(text_field))[1])


CSV = Format(
    (".csv", ".tsv"),
    read_table,
    read_fields,
    compressions=COMPRESSIONS,
    help=".csv or .tsv (one per row)",
    check=_check,
    reasons={"fields": "CSV rows that do not fit the header, or are not CSV"},
)
