"""`Input`, one file or hub dataset, and functions that all readers use.

Independent of how each format is read.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from data_prep.files.documents import Chunk, InputRules, Problem
from data_prep.files.encodings import UTF8, open_stream
from data_prep.files.remote import open_stored
from data_prep.files.streams import Failure, Stream
from zerolm.common.files import MAX_POINTER_BYTES, host_name, pointer_problem
from zerolm.common.url import is_url

END = -1  # used as the start of the next chunk if there is none


def pointer_failure(name: str, size_bytes: int | None) -> Failure | None:
    """Return the problem with a file that only points to a file stored elsewhere, else None."""
    if not 0 < (size_bytes or 0) <= MAX_POINTER_BYTES:
        return None
    try:
        with open_stored(name) as file:
            detail = pointer_problem(file.read(MAX_POINTER_BYTES))
    except OSError:
        return None  # reported when the file is read
    return Failure("unreadable", detail) if detail else None


@dataclass(frozen=True)
class HubDataset:
    """A dataset on the Hugging Face hub."""

    name: str  # as passed to `datasets.load_dataset`
    config: str | None
    split: str
    revision: str | None = None  # the commit from which every task reads


@dataclass(frozen=True)
class Input:
    """One file or hub dataset; contains no open files, because it is sent to worker processes."""

    argument: str  # the value of --input that named it
    name: str  # a path or a hub id
    suffix: str  # of its format, with that of its compression
    size_bytes: int | None
    modified_ns: int | None = None
    state: tuple[int, int, str] | None = None  # change time, inode, and the host that queried them
    hub: HubDataset | None = None
    problem: Failure | None = None  # why the file cannot be read, if bad input is skipped
    num_rows: int = 0  # documents lost with the file, if known
    of_stage: bool = False  # written by a stage; the limits for raw input do not apply
    encoding: str = UTF8  # the user's --encoding; pages declare their own encoding
    keys: tuple[tuple[str, str], ...] = ()  # further keys for its document
    version: str = ""  # version of a file in a store
    packages: tuple[str, ...] = ()  # packages used to read it, with their versions
    text_field: str | None = None  # overrides the text field of the rules

    def identity(self) -> list[Any]:
        """Return what determines the content, besides the input's name, suffix, size and time."""
        if self.encoding == UTF8 and not (self.keys or self.version or self.packages):
            return []  # keeps fingerprints of earlier releases valid
        return [self.encoding, self.keys, self.version, self.packages]


def state_of(status: os.stat_result) -> tuple[int, int, str]:
    """Return values that change if a file is replaced by one with the same size and mtime."""
    return status.st_ctime_ns, status.st_ino, host_name()


def total_bytes(inputs: Iterable[Input]) -> int | None:
    """Return the total size of the inputs; None if any size is unknown."""
    sizes = [each.size_bytes for each in inputs]
    return None if None in sizes else sum(size or 0 for size in sizes)


class InputRange(NamedTuple):
    """A part of an input: all documents that start in [start, stop)."""

    input: int  # index in the list of inputs
    start: int = 0  # byte of (decompressed) JSON lines; row in Parquet or on the hub; otherwise 0
    stop: int | None = None  # None: to the end


def problem_chunk(
    source: Input,
    part: InputRange,
    start: int,
    failure: Failure,
    num_lost: int,
    lost_bytes: int,
    is_row: bool = False,
) -> Chunk:
    """Return a chunk that reports `num_lost` documents as unreadable."""
    name, reason, detail = source.name, failure.reason, failure.detail
    problem = Problem(reason, name, part.input, start, is_row, detail, num_lost, lost_bytes)
    return Chunk(name, "bad", start, problem, 0, part.input)


def stored_in(source: Input) -> Any:
    """Return the path of a local file, or an open file for a URL."""
    return open_stored(source.name) if is_url(source.name) else source.name


def stream_of(source: Input, start: int, rules: InputRules) -> Stream:
    """Open a file's content as UTF-8, beginning at a byte offset."""
    return open_stream(source.name, source.suffix, start, rules.max_expansion, source.encoding)
