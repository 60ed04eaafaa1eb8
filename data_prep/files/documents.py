"""`Chunk`, `Document` and `Problem`, the types that reading produces, and the rules for input.

`data_prep.files.parse` turns chunks into documents and problems.
"""

from dataclasses import dataclass, fields
from typing import Any, NamedTuple


class Position(NamedTuple):
    """A point between two documents in a work unit where reading can resume; JSON-serializable."""

    range_index: int  # index in the unit's ranges
    offset: int  # like Chunk.start


class Chunk(NamedTuple):
    """A part of an input that contains complete documents, or a problem with the input."""

    name: str  # name of the file or hub dataset, for messages
    # Says what `data` contains. "bad": a Problem; "skipped": the reason; "parsed": what a
    # format's `parse` returns; any other: what it takes, with "rows" for numbered rows
    kind: str
    start: int  # where `data` starts: a byte of the (decompressed) file, or a row; from 0
    data: Any  # bytes; for "rows", a list of texts (str or None) or of entire rows (dict)
    input_bytes: int  # bytes read from the stored (compressed) input since the last chunk
    input: int = 0  # index in the list of inputs
    next: Position = Position(0, 0)  # where the next chunk starts
    keys: tuple[tuple[str, str], ...] = ()  # for "text": further keys of the document
    encoding: str = ""  # original encoding of the data, if it was not UTF-8


class Document(NamedTuple):
    """One document and its position in the input."""

    text: str
    input: int  # index in the list of inputs
    start: int  # its row, or byte of its line in the (decompressed) file; 0 for a text file
    record: dict[str, Any] | None = None  # all keys, if InputRules.keep_records


class Problem(NamedTuple):
    """An invalid document in an input, or a part of an input that cannot be read.

    Task records store it as a list, in this order.
    """

    reason: str  # of `formats.describe_reason`
    name: str  # name of the file or hub dataset
    input: int  # index in the list of inputs
    start: int  # like Chunk.start, or the exact position of an invalid byte
    is_row: bool  # whether `start` is a row rather than a byte
    detail: str
    num_documents: int = 1  # number of documents lost, as far as known
    lost_bytes: int = 0  # size of the part of the stored file that could not be read

    @property
    def place(self) -> str:
        """The file's name with the row (counted from 1) or the byte (counted from 0)."""
        return f"{self.name}{f':{self.start + 1}' if self.is_row else f' (byte {self.start:,})'}"


REASONS = {  # of all formats; each may add its own: `formats.describe_reason`
    "no_text_field": "documents without the text field",
    "not_a_string": "documents whose text is not a string",
    "not_utf8": "documents that are not UTF-8",
    "lone_surrogate": "documents with a lone surrogate",
    "too_long": "documents longer than --max_document_bytes",
    "cut": "truncated files",
    "damaged": "damaged files, records or row groups",
    "expands": "files that expand more than --max_expansion times",
    "unreadable": "files that cannot be opened",
    "encoding": "documents or files that are not in the given encoding",
    # Harmless, always skipped:
    "no_bytes": "empty files",
    "empty": "empty documents",
    "null": "documents whose text is null",
    "blank_lines": "blank lines",
}


@dataclass(frozen=True)
class InputRules:
    """How documents are read, and how bad input is handled.

    Fingerprints of inputs contain the names of this class and its fields: renaming them
    invalidates existing stages.
    """

    text_field: str = "text"  # key or column; if it contains dots, also a path into nested objects
    on_bad_input: str = "fail"  # or "skip" to count bad input and continue
    max_bad_fraction: float = 0.01  # maximum fraction of documents and of bytes, with "skip"
    max_document_bytes: int = 1 << 26  # maximum size of a line, a text file, or a row's text
    max_expansion: int = 200  # maximum decompression ratio, beyond the first 64 MiB
    keep_records: bool = False  # whether documents keep all their keys
    encoding: str = "utf-8"  # for files that do not declare an encoding; or "auto"
    code: bool = False  # whether to read each file as source code, as one document
    max_page_seconds: float = 10.0  # maximum CPU time to extract a page's text

    def content(self) -> dict[str, Any]:
        """Return the rules in the form used in fingerprints.

        Rules added by later releases are left out if they have their default values, so that they
        do not invalidate older work.
        """
        default = InputRules()
        added = ("encoding", "code", "max_page_seconds")
        given = {each.name: getattr(self, each.name) for each in fields(self)}
        return {
            name: value
            for name, value in given.items()
            if name not in added or value != getattr(default, name)
        }
