"""`Format`, all that the rest of data preparation knows of a format of input files."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Literal

from data_prep.files.documents import Chunk, InputRules
from data_prep.files.inputs import Input, InputRange
from data_prep.files.parse import Parsed
from zerolm.common.errors import ConfigError
from zerolm.common.provenance import installed_version

Reader = Callable[[Input, InputRange, InputRules, int], Iterator[tuple[Chunk, int]]]
Parser = Callable[[Chunk, InputRules], Parsed]
Split = tuple[int, int, int]  # start, stop and stored bytes of a part of a file


@dataclass(frozen=True, eq=False)
class Format:
    """A format of input files: an object in a module of its own, listed in `formats.FORMATS`.

    Attributes:
        endings: ends of file names, in lower case.
        read: yields (chunk, start of the next chunk, or END) for a part of a file. Chunks have
            about the given number of bytes, and reading can begin at each start. What cannot be
            read becomes a problem with its position, never an exception: `input_bytes` of all
            chunks and `lost_bytes` of all problems add up to the size of the file.
        parse: returns the documents of a chunk, counts of what was skipped, and problems.
        compressions: endings that may follow, such as `.gz`; `files.streams` decompresses them.
        shown: the endings that messages name, if not all.
        help: the entry in --help; by default the endings.
        places: how messages show a position: by the line of a text, the number of a row, the byte
            at which a record starts, or only by the file, if that is one document.
        packages: optional packages that are needed to read a file.
        cost: how many times longer than plain text of the same size a file takes to read.
        check: returns a file with its `problem` set if it has no text column.
        split: divides a file that is larger than a number of bytes into parts of about that size
            which can be read separately; no parts if it cannot be divided.
        reasons: descriptions of the format's own reasons for bad and skipped input.
    """

    endings: tuple[str, ...]
    read: Reader
    parse: Parser
    compressions: tuple[str, ...] = ()
    shown: tuple[str, ...] = ()
    help: str = ""
    places: Literal["line", "row", "byte", "file"] = "line"
    packages: tuple[str, ...] = ()
    cost: int = 1
    check: Callable[[Input, str], Input] = lambda source, text_field: source
    split: Callable[[Input, int], list[Split]] = lambda source, limit: []
    reasons: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def suffixes(self) -> tuple[str, ...]:
        """The endings, also compressed."""
        return tuple(each + end for each in self.endings for end in ("", *self.compressions))

    @property
    def is_text(self) -> bool:
        """Whether --encoding applies: records and rows declare their own."""
        return self.places in ("line", "file")


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


def split_anywhere(source: Input, limit: int) -> list[Split]:
    """Return equal parts of a file whose reader can begin at any byte."""
    size = source.size_bytes or 0
    count = -(-size // limit)
    limits = [size * part // count for part in range(count + 1)]
    return [(start, stop, stop - start) for start, stop in pairwise(limits)]
