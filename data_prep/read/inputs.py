"""`Input`: one file or hub dataset, its formats, and what every reader of inputs needs.

Independent of how a format is read.
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

TEXT_FORMATS = (".txt", ".md")  # a document each; also compressed: streams.COMPRESSIONS
PAGE_FORMATS = (".html", ".htm", ".xhtml")  # a document each; also compressed
CODE = ".code"  # a document each: any file of a code tree
LINE_FORMATS = (".jsonl", ".ndjson")  # a document per line; also compressed
TABLE_FORMATS = (".csv", ".tsv")  # a document per row; also compressed
ARCHIVE_FORMATS = (".warc", ".wet")  # a document per record; also with .gz
ROW_FORMATS = (".parquet", ".arrow", "hub")  # a document per row, by number
PLAIN_FORMATS = (*TEXT_FORMATS, *LINE_FORMATS, *PAGE_FORMATS, *TABLE_FORMATS)
SUFFIXES = tuple(
    [each + end for each in PLAIN_FORMATS for end in ("", *COMPRESSIONS)]
    + [each + end for each in ARCHIVE_FORMATS for end in ("", ".gz")]
    + [".json" + end for end in COMPRESSIONS]  # JSON lines; see `lines_suffix` of a plain .json
    + [".parquet", ".arrow"]
)
SHOWN_SUFFIXES = (
    ".txt, .md, .html, .csv, .tsv, .jsonl, .ndjson (also .gz, .zst, .bz2, .xz), JSON lines in "
    ".json (.gz, .zst, .bz2, .xz), .warc, .wet (also .gz), .parquet, .arrow"
)
DATASET_CARD = "README.md"  # describes the files beside it
# Of desktops, archives and network disks.
JUNK = {"thumbs.db", "desktop.ini", "__macosx", "@eadir", "$recycle.bin", "lost+found"}
SNIFFED_BYTES = 1 << 20
END = -1  # in place of the start of the next chunk: there is none


def suffix_of(path: str) -> str | None:
    """Return the one of `SUFFIXES` that a path ends with, or None."""
    name = path.lower()
    return next((suffix for suffix in SUFFIXES if name.endswith(suffix)), None)


def _code_suffix(path: str) -> str | None:
    return CODE if language_of(path) is not None else None


def lines_suffix(path: str, text_field: str) -> str | None:
    """Return the suffix of JSON lines for a `.json` file that has them, else None.

    It has two lines with an object each, or a single one with the text, which is a string.
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
    except (ValueError, RecursionError):  # a long document is cut
        is_text = len(first) > SNIFFED_BYTES // 2 and first.startswith(b'{"')
        pattern = rb'"' + re.escape(key) + rb'"\s*:\s*"'
        return LINE_FORMATS[0] if is_text and re.search(pattern, first) else None
    if not isinstance(record, dict):
        return None
    is_text = isinstance(find_text(record, text_field)[1], str)
    return LINE_FORMATS[0] if is_text or second.startswith(b"{") else None


def _sniffed(file: BinaryIO) -> Iterator[bytes]:
    """Yield the first lines of a file, `SNIFFED_BYTES` of them; the last one may be cut."""
    left = SNIFFED_BYTES
    while left > 0 and (line := file.readline(left)):
        left -= len(line)
        yield line


def pointer_failure(name: str, size_bytes: int | None) -> Failure | None:
    """Return why a file is a pointer to one that is not here, None if it is not."""
    if not 0 < (size_bytes or 0) <= MAX_POINTER_BYTES:
        return None
    try:
        with open_stored(name) as file:
            detail = pointer_problem(file.read(MAX_POINTER_BYTES))
    except OSError:
        return None  # named when it is read
    return Failure("unreadable", detail) if detail else None


class FileKinds(NamedTuple):
    """The files that are read, by their names.

    Attributes:
        suffix: returns the suffix of an input, given its path; None if it is not read.
        shown: the names, for messages.
        hidden: what names of files and directories start with that are left out.
        card: name of files that describe those beside them, and are not read.
    """

    suffix: Callable[[str], str | None]
    shown: str
    hidden: tuple[str, ...]
    card: str = ""

    def hides(self, name: str) -> bool:
        """Return whether a file or directory below an --input is left out.

        Spark, Hive and pyarrow hide the same names, but for a partition of a column (`_day=1`).
        """
        is_hidden = name.startswith(self.hidden) and not (name[0] == "_" and "=" in name)
        return is_hidden or name == self.card or name.lower() in JUNK

    def hides_below(self, argument: str, name: str) -> bool:
        """Return whether a file that an --input contains or matches is left out.

        Not if the argument itself names it, as the globs `_*/a.txt` and `*.md` do.
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
    """A dataset of the Hugging Face hub."""

    name: str  # what `datasets.load_dataset` takes
    config: str | None
    split: str
    revision: str | None = None  # the commit that every task reads


@dataclass(frozen=True)
class Input:
    """One file or hub dataset; sent to worker processes, so it holds nothing open."""

    argument: str  # the --input that named it
    name: str  # a path or a hub id
    suffix: str  # one of SUFFIXES, `CODE` or "hub"
    size_bytes: int | None
    modified_ns: int | None = None
    state: tuple[int, int, str] | None = None  # time of change, inode, and the host that saw it
    hub: HubDataset | None = None
    problem: Failure | None = None  # why it cannot be read, where bad input is skipped
    num_rows: int = 0  # documents lost with the file, where known
    of_stage: bool = False  # written by a stage, so the limits for raw input do not apply
    encoding: str = UTF8  # the user's --encoding; pages declare their own
    keys: tuple[tuple[str, str], ...] = ()  # of its document
    version: str = ""  # of a file in a store
    packages: tuple[str, ...] = ()  # that read it, with versions
    text_field: str | None = None  # in place of that of the rules

    def identity(self) -> list[Any]:
        """Return what determines the content, besides name, suffix, size and time."""
        if self.encoding == UTF8 and not (self.keys or self.version or self.packages):
            return []  # so that fingerprints of earlier releases stay valid
        return [self.encoding, self.keys, self.version, self.packages]


def state_of(status: os.stat_result) -> tuple[int, int, str]:
    """Return what changes if a file of the same size and time of modification is another one."""
    return status.st_ctime_ns, status.st_ino, host_name()


def total_bytes(inputs: Iterable[Input]) -> int | None:
    """Return the size of inputs; None if one is of unknown size."""
    sizes = [each.size_bytes for each in inputs]
    return None if None in sizes else sum(size or 0 for size in sizes)


class InputRange(NamedTuple):
    """A part of an input: the documents that start in [start, stop)."""

    input: int  # index in the list of inputs
    start: int = 0  # byte of the (decompressed) JSON lines, row of Parquet or the hub, otherwise 0
    stop: int | None = None  # None: to the end


def problem_chunk(
    source: Input, part: InputRange, start: int, failure: Failure, num_lost: int, lost_bytes: int
) -> Chunk:
    """Return a chunk for `num_lost` documents that cannot be read."""
    is_row = source.suffix in ROW_FORMATS
    name, reason, detail = source.name, failure.reason, failure.detail
    problem = Problem(reason, name, part.input, start, is_row, detail, num_lost, lost_bytes)
    return Chunk(name, "bad", start, problem, 0, part.input)


def stored_in(source: Input) -> Any:
    """Return the path of a local file, or a file in a store, opened."""
    return open_stored(source.name) if is_url(source.name) else source.name


def stream_of(source: Input, start: int, rules: InputRules) -> Stream:
    """Return the content of a file from a byte offset on, as UTF-8."""
    encoding = UTF8 if source.suffix.startswith(PAGE_FORMATS) else source.encoding
    return open_stream(source.name, source.suffix, start, rules.max_expansion, encoding)


def packages_of(suffix: str, encoding: str) -> tuple[str, ...]:
    """Return the optional packages that read a file, with their versions.

    Raises:
        ConfigError: one is not installed.
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
    """Return each name with its version, which decides what is read.

    Raises:
        ConfigError: one is not installed.
    """
    versions = {name: installed_version(name) for name in names}
    for name, version in versions.items():
        if version is None:
            raise ConfigError(
                f"needs {name}, which is not installed. Run: bash launch/setup.sh inputs"
            )
    return tuple(f"{name} {version}" for name, version in versions.items())
