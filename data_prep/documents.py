"""Documents out of what was read: text files, JSON lines, table rows. Pure; standard library only.

`sources` reads `Chunk`s in the parent process, without looking into them; the worker processes turn
them into documents here, so that decoding, JSON and Unicode checks cost all cores and not one.
"""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

MAX_PROBLEMS = 10  # of one chunk: enough to see what is wrong with a file
SHOWN_CHARACTERS = 60
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class Chunk(NamedTuple):
    """A part of an input that holds whole documents."""

    name: str  # of the file or hub data set, for messages
    kind: str  # "text": a document; "lines": JSON lines; "rows": values of a table's text column
    first: int  # number of its first line or row, counted from 1
    data: bytes | list  # bytes of "text" and "lines"; str or None each of "rows"
    input_bytes: int  # read from the input since the last chunk, compressed as it is


class Document(NamedTuple):
    """One document, as text and as the UTF-8 bytes of it."""

    text: str
    utf8: bytes


def read_documents(
    chunks: Sequence[Chunk], text_field: str
) -> tuple[list[Document], Counter[str], list[str]]:
    """Return the documents of chunks in their order, what was skipped, and what is wrong.

    Harmless and skipped, by reason: `empty` documents, `null` texts, `blank_lines`. Anything else
    that is not a document is a problem, one line each with the file and the line in it.
    """
    documents: list[Document] = []
    skipped: Counter[str] = Counter()
    problems: list[str] = []
    for chunk in chunks:
        for number, found in _values(chunk, text_field, skipped):
            value, problem = found
            if problem is None and value is None:
                skipped["null"] += 1
            elif problem is None and value == "":
                skipped["empty"] += 1
            elif problem is None:
                value, problem = _as_document(value)
                if problem is None:
                    documents.append(value)
            if problem is not None:
                problems.append(f"{chunk.name}:{number}: {problem}")
                if len(problems) == MAX_PROBLEMS:
                    return documents, skipped, problems
    return documents, skipped, problems


def _values(chunk: Chunk, text_field: str, skipped: Counter[str]) -> Iterator[tuple[int, tuple]]:
    """Yield (line or row number, (value of the text, problem or None))."""
    if chunk.kind == "rows":
        for number, value in enumerate(chunk.data, chunk.first):
            yield number, (value, None)
        return
    assert isinstance(chunk.data, bytes)
    data = chunk.data
    if chunk.first == 1:
        data = data.removeprefix(BYTE_ORDER_MARK)
    if chunk.kind == "text":
        try:
            yield 1, (data.decode("utf-8"), None)
        except UnicodeDecodeError as error:
            yield data.count(b"\n", 0, error.start) + 1, (None, _not_utf8(error))
        return
    for number, line in enumerate(data.split(b"\n"), chunk.first):
        if line and not line.isspace():
            yield number, _value_of_line(line, text_field)
        elif number < chunk.first + data.count(b"\n"):  # not what follows the last newline
            skipped["blank_lines"] += 1


def _value_of_line(line: bytes, text_field: str) -> tuple:
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return None, _not_utf8(error)
    except (ValueError, RecursionError) as error:
        shown = line[:SHOWN_CHARACTERS].decode("utf-8", "replace")
        return None, f"not valid JSON ({error}): {shown!r}. Correct the line, or remove it."
    if not isinstance(record, dict):
        return None, f"a JSON {type(record).__name__}, not an object with a {text_field!r} key."
    if text_field not in record:
        keys = ", ".join(repr(key) for key in list(record)[:8]) or "no keys"
        return None, f"no key {text_field!r}; it has {keys}. Choose one with --text_field."
    return record[text_field], None


def _as_document(value: object) -> tuple:
    if not isinstance(value, str):
        shown = repr(value)[:SHOWN_CHARACTERS]
        return None, f"the text is {shown}, a {type(value).__name__} and not a string."
    try:
        return Document(value, value.encode("utf-8")), None
    except UnicodeEncodeError as error:
        return None, (
            f"the text has a lone surrogate (U+{ord(value[error.start]):04X}, character "
            f"{error.start}), which is not Unicode text. Correct the document, or remove it."
        )


def _not_utf8(error: UnicodeDecodeError) -> str:
    byte = error.object[error.start]
    return (
        f"not UTF-8: byte 0x{byte:02x} ({error.reason}). Convert the file, for example with "
        f"iconv -f latin1 -t utf-8."
    )
