"""`Input`, one file or hub dataset; the formats of inputs; and functions that all readers use.

Independent of how each format is read.
"""

import codecs
import glob
import io
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import lru_cache
from typing import Any, BinaryIO, NamedTuple

from data_prep.read.documents import Chunk, InputRules, Problem
from data_prep.read.encodings import AUTO, UTF8, open_stream
from data_prep.read.parse import find_text
from data_prep.read.remote import open_stored
from data_prep.read.source_code import language_of
from data_prep.read.streams import COMPRESSIONS, Failure, Stream
from zerolm.common.errors import ConfigError
from zerolm.common.files import MAX_POINTER_BYTES, host_name, pointer_problem
from zerolm.common.provenance import installed_version
from zerolm.common.records import open_regular
from zerolm.common.url import is_url

TEXT_FORMATS = (".txt", ".md")  # a document per file; also compressed: streams.COMPRESSIONS
PAGE_FORMATS = (".html", ".htm", ".xhtml")  # a document per file; also compressed
CODE = ".code"  # a document per file: any file of a code tree
LINE_FORMATS = (".jsonl", ".ndjson")  # a document per line; also compressed
TABLE_FORMATS = (".csv", ".tsv")  # a document per row; also compressed
ARCHIVE_FORMATS = (".warc", ".wet")  # a document per record; also with .gz
ROW_FORMATS = (".parquet", ".arrow", "hub")  # a document per row, addressed by number
PLAIN_FORMATS = (*TEXT_FORMATS, *LINE_FORMATS, *PAGE_FORMATS, *TABLE_FORMATS)
SUFFIXES = tuple(
    [each + end for each in PLAIN_FORMATS for end in ("", *COMPRESSIONS)]
    + [each + end for each in ARCHIVE_FORMATS for end in ("", ".gz")]
    + [".json" + end for end in COMPRESSIONS]  # JSON lines; for plain .json see `lines_suffix`
    + [".parquet", ".arrow"]
)
SHOWN_SUFFIXES = (
    ".txt, .md, .html, .csv, .tsv, .jsonl, .ndjson (also .gz, .zst, .bz2, .xz), JSON lines in "
    ".json (.gz, .zst, .bz2, .xz), .warc, .wet (also .gz), .parquet, .arrow"
)
DATASET_CARD = "README.md"  # describes the files next to it
# Files created by desktops, archives and network disks.
JUNK = {"thumbs.db", "desktop.ini", "__macosx", "@eadir", "$recycle.bin", "lost+found"}
SNIFFED_BYTES = 1 << 20
END = -1  # used as the start of the next chunk if there is none


def suffix_of(path: str) -> str | None:
    """Return the entry of `SUFFIXES` that a path ends with, or None."""
    name = path.lower()
    return next((suffix for suffix in SUFFIXES if name.endswith(suffix)), None)


def _code_suffix(path: str) -> str | None:
    return CODE if language_of(path) is not None else None


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
        return LINE_FORMATS[0] if is_text and re.search(pattern, first) else None
    if not isinstance(record, dict):
        return None
    is_text = isinstance(find_text(record, text_field)[1], str)
    return LINE_FORMATS[0] if is_text or second.startswith(b"{") else None


def _sniffed(file: BinaryIO) -> Iterator[bytes]:
    """Yield the lines in the first `SNIFFED_BYTES` of a file; the last line may be truncated."""
    left = SNIFFED_BYTES
    while left > 0 and (line := file.readline(left)):
        left -= len(line)
        yield line


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


class FileKinds(NamedTuple):
    """Rules that determine from a file's name whether the file is read.

    Attributes:
        suffix: function from a file's path to the suffix of the input; None if the file is not
            read.
        shown: description of the names that are read, for messages.
        hidden: name prefixes of files and directories that are left out.
        card: name of files that describe the other files in their directory, and are not read.
    """

    suffix: Callable[[str], str | None]
    shown: str
    hidden: tuple[str, ...]
    card: str = ""

    def hides(self, name: str) -> bool:
        """Return whether a file or directory below an --input is left out because of its name.

        Spark, Hive and pyarrow hide the same names, except column partitions (`_day=1`).
        """
        is_hidden = name.startswith(self.hidden) and not (name[0] == "_" and "=" in name)
        return is_hidden or name == self.card or name.lower() in JUNK

    def hides_below(self, argument: str, name: str) -> bool:
        """Return whether a file that an --input contains or matches is left out.

        A file is kept if the argument itself contains its name, as in the globs `_*/a.txt` and
        `*.md`.
        """
        path = argument if is_url(argument) else os.path.normpath(argument)  # without `//`, `./`
        name = name if is_url(name) else os.path.normpath(name)
        top, patterns = path.rstrip("/").split("/"), list[str]()
        while top and glob.has_magic("/".join(top)):
            patterns.append(top.pop())
        return name != path and any(
            self.hides(part)
            and not (patterns and part == self.card)
            and not any(each[:1] == part[:1] and fnmatch(part, each) for each in patterns)
            for part in name.split("/")[len(top) :]
        )


DATA_FILES = FileKinds(
    suffix_of,
    f"{SHOWN_SUFFIXES}. Convert or rename them, or read source code with --code.",
    (".", "_", "~$"),
    DATASET_CARD,
)
CODE_FILES = FileKinds(
    _code_suffix, "the names of text files that identify knows (.py, .c, Makefile, ...).", (".",)
)


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
    suffix: str  # one of SUFFIXES, `CODE` or "hub"
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
    source: Input, part: InputRange, start: int, failure: Failure, num_lost: int, lost_bytes: int
) -> Chunk:
    """Return a chunk that reports `num_lost` documents as unreadable."""
    is_row = source.suffix in ROW_FORMATS
    name, reason, detail = source.name, failure.reason, failure.detail
    problem = Problem(reason, name, part.input, start, is_row, detail, num_lost, lost_bytes)
    return Chunk(name, "bad", start, problem, 0, part.input)


def stored_in(source: Input) -> Any:
    """Return the path of a local file, or an open file for a URL."""
    return open_stored(source.name) if is_url(source.name) else source.name


def stream_of(source: Input, start: int, rules: InputRules) -> Stream:
    """Open a file's content as UTF-8, beginning at a byte offset."""
    encoding = UTF8 if source.suffix.startswith(PAGE_FORMATS) else source.encoding
    return open_stream(source.name, source.suffix, start, rules.max_expansion, encoding)


def packages_of(suffix: str, encoding: str) -> tuple[str, ...]:
    """Return the optional packages needed to read a file, with their versions.

    Raises:
        ConfigError: a package is not installed.
    """
    names: tuple[str, ...] = ()
    if suffix.startswith((*PAGE_FORMATS, *ARCHIVE_FORMATS)):
        names = ("trafilatura", "lxml", "w3lib", "chardet")
        names += ("warcio", "brotli", "zstandard") if suffix.startswith(ARCHIVE_FORMATS) else ()
    elif suffix == CODE:
        names = ("identify",)
    elif encoding == AUTO and suffix not in ROW_FORMATS:
        names = ("chardet",)
    return package_versions(names)


@lru_cache(maxsize=64)
def package_versions(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the packages with their versions, which affect the documents.

    Raises:
        ConfigError: a package is not installed.
    """
    versions = {name: installed_version(name) for name in names}
    for name, version in versions.items():
        if version is None:
            raise ConfigError(
                f"needs {name}, which is not installed. Run: bash launch/setup.sh inputs"
            )
    return tuple(f"{name} {version}" for name, version in versions.items())
