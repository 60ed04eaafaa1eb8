"""Parses chunks of texts and rows into documents, and says what is wrong. Opens no files.

Readers and work units pass on unparsed `Chunk`s. A format's `parse` turns a chunk into `Document`s,
and anything invalid into a `Problem` with its position. `work_units.read_batches` either raises an
error for a problem, or counts and skips it.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from data_prep.files.documents import Chunk, Document, InputRules, Problem

SHOWN_CHARACTERS = 60
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
UTF16 = "it is UTF-16. Read it with --encoding utf-16, or auto."
CONTENTS = {  # files that begin with these bytes are not text or not UTF-8
    b"\xff\xfe": UTF16,
    b"\xfe\xff": UTF16,
    b"\x1f\x8b": "it is compressed with gzip. Rename the file to end in .gz.",
    b"\x28\xb5\x2f\xfd": "it is compressed with Zstandard. Rename the file to end in .zst.",
    b"BZh": "it is compressed with bzip2. Rename the file to end in .bz2.",
    b"\xfd7zXZ\x00": "it is compressed with xz. Rename the file to end in .xz.",
    b"PAR1": "it is Parquet. Rename the file to end in .parquet.",
    b"PK\x03\x04": "it is a zip archive. Unpack it.",
}
PARQUET_TEXT = "not UTF-8, which table text must be. Write the file again, or remove the row."

Parsed = tuple[list[Document], Counter[str], list[Problem]]  # counts of what was skipped


def parse_chunk(
    chunk: Chunk, rules: InputRules, parse: Callable[[Chunk, InputRules], Parsed]
) -> Parsed:
    """Return a chunk's documents in order, counts of what was skipped, and the problems."""
    if chunk.kind == "parsed":
        return chunk.data
    if chunk.kind == "bad":
        return [], Counter(), [chunk.data]
    if chunk.kind == "skipped":
        return [], Counter([chunk.data]), []
    return parse(chunk, rules)


def parse_text(chunk: Chunk, rules: InputRules) -> Parsed:
    """Return the document of a chunk, which is a whole file."""
    return _parse_values(chunk, rules, iter([(0, chunk.data, None)]))


def parse_rows(chunk: Chunk, rules: InputRules) -> Parsed:
    """Return the documents of a chunk of rows: texts (str, UTF-8 or None) or entire rows."""
    return _parse_values(chunk, rules, _row_values(chunk, rules))


def find_text(record: dict[str, Any], field: str) -> tuple[bool, Any]:
    """Return whether a record contains the text field, and the field's value.

    `a.b` is the key "a.b" if the record contains it, otherwise the key "b" of the object stored
    under "a".
    """
    if field in record:
        return True, record[field]
    head, dot, tail = field.partition(".")
    while dot:
        if isinstance(record.get(head), dict):
            found, value = find_text(record[head], tail)
            if found:
                return True, value
        more, dot, tail = tail.partition(".")
        head = f"{head}.{more}"
    return False, None


def replace_text(record: dict[str, Any], field: str, text: str) -> dict[str, Any]:
    """Return a copy of a record with its text replaced; a field with dots may be a path into
    objects.
    """
    if field in record or "." not in field:
        return {**record, field: text}
    first, _, rest = field.partition(".")
    return {**record, first: replace_text(record.get(first, {}), rest, text)}


def _row_values(chunk: Chunk, rules: InputRules) -> Iterator[tuple[int, Any, Any]]:
    for row, value in enumerate(chunk.data, chunk.start):
        if isinstance(value, dict):
            yield row, find_text(value, rules.text_field)[1], value
        else:
            yield row, value, None


def _parse_values(
    chunk: Chunk, rules: InputRules, values: Iterator[tuple[int, Any, Any]]
) -> Parsed:
    """Convert (start, value, record) tuples to documents; a value may be UTF-8 bytes."""
    documents: list[Document] = []
    skipped: Counter[str] = Counter()
    problems: list[Problem] = []
    is_row, input_index = chunk.kind == "rows", chunk.input
    for start, value, record in values:
        if isinstance(value, bytes):
            try:
                value = value.removeprefix(BYTE_ORDER_MARK if not is_row else b"").decode("utf-8")
            except UnicodeDecodeError as error:
                at = start if is_row else error.start + len(value) - len(error.object)
                reason, detail = encoding_problem(chunk, error.object, error.start)
                detail = PARQUET_TEXT if is_row else detail
                problems.append(Problem(reason, chunk.name, input_index, at, is_row, detail))
                continue
        if value is None:
            skipped["null"] += 1
        elif value == "":
            skipped["empty"] += 1
        elif not isinstance(value, str):
            problems.append(not_a_string_problem(chunk, start, value))
        elif len(value) * 4 > rules.max_document_bytes and (
            (size := len(value.encode("utf-8", "surrogatepass"))) > rules.max_document_bytes
        ):
            problems.append(too_long_problem(chunk, start, size, rules.max_document_bytes))
        elif (surrogate := lone_surrogate_of(value)) is not None:
            name = chunk.name
            problems.append(Problem("lone_surrogate", name, input_index, start, is_row, surrogate))
        else:
            if record is None and rules.keep_records:
                record = {rules.text_field: value, **dict(chunk.keys)}
            documents.append(Document(value, input_index, start, record))
    return documents, skipped, problems


def not_a_string_problem(chunk: Chunk, start: int, value: object) -> Problem:
    """Return the problem for a document whose text is of another type."""
    shown = repr(value)[:SHOWN_CHARACTERS]
    detail = f"the text is {shown}, of type {type(value).__name__}, not a string."
    return Problem("not_a_string", chunk.name, chunk.input, start, chunk.kind == "rows", detail)


def too_long_problem(chunk: Chunk, start: int, size: int, limit: int) -> Problem:
    """Return the problem for a document whose size exceeds the limit."""
    detail = (
        f"{size:,} bytes are more than --max_document_bytes {limit:,}. Split the document, or "
        f"raise the limit."
    )
    return Problem("too_long", chunk.name, chunk.input, start, chunk.kind == "rows", detail)


def lone_surrogate_of(text: str) -> str | None:
    """Return why a text cannot be encoded as UTF-8, or None if it can."""
    if text.isascii():
        return None
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        return (
            f"the text has a lone surrogate (U+{ord(text[error.start]):04X}, character "
            f"{error.start}), which is not Unicode text. Correct the document, or remove it."
        )
    return None


def encoding_problem(chunk: Chunk, content: bytes, at: int) -> tuple[str, str]:
    """Return (reason, detail) for the problem that a byte is invalid in the file's encoding."""
    if chunk.encoding:
        return "encoding", f"not {chunk.encoding}. Name its encoding with --encoding, or auto."
    for magic, advice in CONTENTS.items():
        if content.startswith(magic):
            return "not_utf8", f"not UTF-8: {advice}"
    return "not_utf8", (
        f"not UTF-8: byte 0x{content[at]:02x}. Name its encoding with --encoding, for "
        f"example cp1252, or auto to detect it."
    )
