"""Documents out of what was read: text files, JSON lines, table rows. Pure: touches no file.

`readers` and `units` read `Chunk`s without looking into them; here they become documents, and what
is no document becomes a `Problem` with the place it is at. Whether a problem ends the command or is
counted and left out is for `units.read_batches`, which has the rules.
"""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

SHOWN_CHARACTERS = 60
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
BEYOND_64_BITS = float(1 << 63)


class Position(NamedTuple):
    """A place between two documents of a unit, to go on from; JSON-able."""

    piece: int  # of the unit's pieces
    offset: int  # as Chunk.start


class Chunk(NamedTuple):
    """A part of an input that holds whole documents, or a problem of the input itself."""

    name: str  # of the file or hub data set, for messages
    kind: str  # "text": a document; "lines": JSON lines; "rows": of a table; "bad": a problem
    start: int  # where `data` is: its byte in the (decompressed) file, or its row, from 0
    data: Any  # bytes; of "rows" the texts (str or None), or with other keys the whole rows (dict)
    input_bytes: int  # read from the input since the last chunk, compressed as it is
    input: int = 0  # number of the input in the list of inputs
    next: Position = Position(0, 0)  # where the next chunk begins


class Document(NamedTuple):
    """One document and where it is from."""

    text: str
    input: int  # number of the input in the list of inputs
    start: int  # byte of its line in the (decompressed) file, or its row; 0 for a text file
    record: dict[str, Any] | None = None  # all keys, if they are to be kept

    @property
    def utf8(self) -> bytes:
        """The text as bytes, made anew at each call."""
        return self.text.encode("utf-8")


class Problem(NamedTuple):
    """Something that is not a document, or the part of an input that cannot be read."""

    reason: str  # a key of REASONS
    name: str
    input: int
    start: int  # as Chunk.start, or more exactly the byte that is wrong
    is_row: bool  # whether `start` is a row rather than a byte
    detail: str
    num_documents: int = 1  # that are lost, as far as that is known
    lost_bytes: int = 0  # of the file, as stored, that could not be read


REASONS = {
    "bad_json": "lines that are not JSON",
    "not_an_object": "lines that are JSON, but not an object",
    "no_text_field": "documents without the text field",
    "not_a_string": "documents whose text is not a string",
    "not_utf8": "documents that are not UTF-8",
    "lone_surrogate": "documents with a lone surrogate",
    "too_long": "documents longer than --max_document_bytes",
    "cut": "files that end too early",
    "damaged": "files, or groups of rows, that are damaged",
    "expands": "files that expand more than --max_expansion times",
    "unreadable": "files that cannot be opened",
}
HARMLESS = {
    "empty": "empty documents",
    "null": "documents whose text is null",
    "blank_lines": "blank lines",
}


@dataclass(frozen=True)
class InputRules:
    """How documents are read, and what is done about what is not one."""

    text_field: str = "text"  # a key or column; with dots also a path into objects
    on_bad_input: str = "fail"  # or "skip": count it, and leave it out
    max_bad_fraction: float = 0.01  # of the documents, and of the bytes, under "skip"
    max_document_bytes: int = 1 << 26  # of a line, a text file, or the text of a row
    max_expansion: int = 200  # decompressed by compressed size, beyond the first 64 MiB
    keep_records: bool = False  # whether documents come with all of their keys


def read_documents(
    chunk: Chunk, rules: InputRules
) -> tuple[list[Document], Counter[str], list[Problem]]:
    """Return the documents of a chunk in their order, what was skipped, and what is wrong.

    Skipped as harmless, by the reasons of HARMLESS. Anything else that is not a document is a
    problem. A line is one that Python's `json` accepts: NaN and infinities too.
    """
    if chunk.kind == "bad":
        return [], Counter(), [chunk.data]
    if chunk.kind == "lines":
        return _of_lines(chunk, rules)
    if chunk.kind == "rows":
        return _of_values(chunk, rules, _rows(chunk, rules))
    return _of_values(chunk, rules, iter([(0, chunk.data, None)]))


def _of_lines(
    chunk: Chunk, rules: InputRules
) -> tuple[list[Document], Counter[str], list[Problem]]:
    import orjson

    documents: list[Document] = []
    skipped: Counter[str] = Counter()
    problems: list[Problem] = []
    data, start, number = chunk.data, chunk.start, chunk.input
    if start == 0 and data.startswith(BYTE_ORDER_MARK):
        data, start = data[len(BYTE_ORDER_MARK) :], len(BYTE_ORDER_MARK)
    field, keep, limit = rules.text_field, rules.keep_records, rules.max_document_bytes
    view, find, loads = memoryview(data), data.find, orjson.loads
    begin, size, shift = 0, len(data), start
    while begin < size:
        end = find(b"\n", begin)
        if end < 0:
            end = size
        here, part, begin = begin + shift, view[begin:end], end + 1
        if len(part) > limit:
            problems.append(too_long(chunk, here, len(part), limit))
            continue
        try:
            record = loads(part)
            text = record[field]
        except (ValueError, KeyError, TypeError) as error:
            line = bytes(part)
            found = False
            if type(error) is KeyError:  # a path into objects, or no text at all
                found, text = find_text(record, field)
            if not found:  # the careful way tells what it is
                if not line or line.isspace():
                    skipped["blank_lines"] += 1
                    continue
                record, text, problem = _read_line(chunk, here, line, field)
                if problem is not None:
                    problems.append(problem)
                    continue
        if type(text) is str and text and not keep:
            documents.append(Document(text, number, here))
        elif type(text) is str and text:
            documents.append(Document(text, number, here, _exactly(record, part)))
        elif text is None:
            skipped["null"] += 1
        elif text == "":
            skipped["empty"] += 1
        else:
            problems.append(_not_a_string(chunk, here, text))
    return documents, skipped, problems


def _exactly(record: dict[str, Any], line: memoryview) -> dict[str, Any]:
    """Return a record with the whole numbers that orjson rounds, those beyond 64 bits."""
    for value in record.values():
        if type(value) is float and abs(value) >= BEYOND_64_BITS:
            return json.loads(bytes(line))
    return record


def _read_line(chunk: Chunk, here: int, line: bytes, field: str) -> tuple[Any, Any, Any]:
    """Return (record, text, problem) of a line that the fast way did not take.

    orjson refuses some of what `json` takes: NaN, infinities, lone surrogates, deep nesting. Files
    that Python wrote have them, mostly in other keys than the text, so `json` has the last word.
    """

    def problem(reason: str, detail: str, at: int = 0) -> tuple[None, None, Problem]:
        return None, None, Problem(reason, chunk.name, chunk.input, here + at, False, detail)

    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return problem("not_utf8", not_utf8(error), error.start)
    except (ValueError, RecursionError) as error:
        shown = line[:SHOWN_CHARACTERS].decode("utf-8", "replace")
        return problem(
            "bad_json", f"not valid JSON ({error}): {shown!r}. Correct the line, or remove it."
        )
    if not isinstance(record, dict):
        kind = type(record).__name__
        return problem("not_an_object", f"a JSON {kind}, not an object with a {field!r} key.")
    found, text = find_text(record, field)
    if not found:
        keys = ", ".join(repr(key)[:SHOWN_CHARACTERS] for key in list(record)[:8]) or "no keys"
        return problem(
            "no_text_field", f"no key {field!r}; it has {keys}. Choose one with --text_field."
        )
    if isinstance(text, str) and (detail := _surrogate(text)) is not None:
        return problem("lone_surrogate", detail)
    return record, text, None


def find_text(record: dict[str, Any], field: str) -> tuple[bool, Any]:
    """Return whether a record has the text field, and its value.

    `a.b` is the key of that name, or else the key `b` of the object at `a`.
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


def _rows(chunk: Chunk, rules: InputRules) -> Iterator[tuple[int, Any, Any]]:
    for row, value in enumerate(chunk.data, chunk.start):
        if isinstance(value, dict):
            yield row, find_text(value, rules.text_field)[1], value
        else:
            yield row, value, None


def _of_values(
    chunk: Chunk, rules: InputRules, values: Iterator[tuple[int, Any, Any]]
) -> tuple[list[Document], Counter[str], list[Problem]]:
    """Return the documents among (start, value, record)s, where a value may be bytes of UTF-8."""
    documents: list[Document] = []
    skipped: Counter[str] = Counter()
    problems: list[Problem] = []
    is_row, number = chunk.kind == "rows", chunk.input
    for start, value, record in values:
        if isinstance(value, bytes):
            try:
                value = value.removeprefix(BYTE_ORDER_MARK if not is_row else b"").decode("utf-8")
            except UnicodeDecodeError as error:
                at = start if is_row else error.start
                detail = not_utf8(error)
                problems.append(Problem("not_utf8", chunk.name, number, at, is_row, detail))
                continue
        if value is None:
            skipped["null"] += 1
        elif value == "":
            skipped["empty"] += 1
        elif not isinstance(value, str):
            problems.append(_not_a_string(chunk, start, value))
        elif len(value) * 4 > rules.max_document_bytes and (
            (size := len(value.encode("utf-8", "surrogatepass"))) > rules.max_document_bytes
        ):
            problems.append(too_long(chunk, start, size, rules.max_document_bytes))
        elif (wrong := _surrogate(value)) is not None:
            problems.append(Problem("lone_surrogate", chunk.name, number, start, is_row, wrong))
        else:
            if record is None and rules.keep_records:
                record = {rules.text_field: value}
            documents.append(Document(value, number, start, record))
    return documents, skipped, problems


def _not_a_string(chunk: Chunk, start: int, value: object) -> Problem:
    shown = repr(value)[:SHOWN_CHARACTERS]
    detail = f"the text is {shown}, a {type(value).__name__} and not a string."
    return Problem("not_a_string", chunk.name, chunk.input, start, chunk.kind == "rows", detail)


def too_long(chunk: Chunk, start: int, size: int, limit: int) -> Problem:
    """Return the problem of a document of `size` bytes."""
    detail = (
        f"{size:,} bytes are more than --max_document_bytes {limit:,}. Cut the document up, or "
        f"raise the limit."
    )
    return Problem("too_long", chunk.name, chunk.input, start, chunk.kind == "rows", detail)


def _surrogate(text: str) -> str | None:
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


def not_utf8(error: UnicodeDecodeError) -> str:
    """Return what is wrong with bytes that are not UTF-8."""
    byte = error.object[error.start]
    return (
        f"not UTF-8: byte 0x{byte:02x} ({error.reason}). Convert the file, for example with "
        f"iconv -f latin1 -t utf-8."
    )
