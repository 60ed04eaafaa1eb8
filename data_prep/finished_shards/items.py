"""`InputFile` and `Items`, which every format's reader returns, and functions to build them."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from data_prep.finished_shards.documents import PIECE_TOKENS
from zerolm.common.errors import ConfigError, RecordError
from zerolm.common.files import pointer_problem_of
from zerolm.common.records import read_record

T = TypeVar("T")


class Items(NamedTuple):
    """Consecutive items of a file; each item is a document, unless boundaries are ignored.

    Attributes:
        ids: token ids, (N,) of any integer dtype.
        ends: index after each item's last id, ascending, (D,) int64. The last end is N, and an
            empty item repeats the previous end.
    """

    ids: np.ndarray
    ends: np.ndarray


@dataclass(frozen=True)
class InputFile:
    """A file of token ids whose header has been checked.

    Attributes:
        path: the file that contains the ids; recorded as their origin, and named in messages.
        unit: what a position in the file counts: "document", "sample" or "row".
        size_bytes: total size of this file and of the files that belong to it.
        num_ids: number of ids; None if it is known only after reading.
        read: yields the items; raises a ConfigError for damage that the header did not reveal.
        has_ends: whether `ends` contains the ends of items; if not, only EOS ids mark where
            documents end.
    """

    path: Path
    unit: str
    size_bytes: int
    num_ids: int | None
    read: Callable[[], Iterator[Items]]
    has_ends: bool = True


class ReadOptions(NamedTuple):
    """Options for the readers; each format's reader refuses options that do not apply to it.

    Attributes:
        column: name of the column that contains the ids; None to look for the usual names.
        dtype: integer type of ids that are stored as bytes; None for the type that the format
            defines.
    """

    column: str | None = None
    dtype: str | None = None


def grouped(arrays: Iterable[np.ndarray]) -> Iterator[Items]:
    """Join items, and yield them in groups of about `PIECE_TOKENS` ids."""
    group: list[np.ndarray] = []
    size = 0
    for array in arrays:
        if group and size + len(array) > PIECE_TOKENS:
            yield _join(group)
            group, size = [], 0
        group.append(array)
        size += len(array)
    if group:
        yield _join(group)


def _join(group: list[np.ndarray]) -> Items:
    return Items(np.concatenate(group), np.cumsum([len(array) for array in group]))


def read_index(path: Path, kind: type[T]) -> T:
    """Read a JSON file written by another program, and check it against a `TypedDict`."""
    check_no_pointer(path)
    try:
        content = read_record(path, kind)
    except RecordError as error:
        raise ConfigError(f"{error} Check --from: the file may be in another format.") from None
    if content is None:
        inner = sorted(each.parent for each in path.parent.glob("*/index.json"))
        raise ConfigError(
            f"{path}: no such file. Give the directory that contains it"
            + (f", such as {inner[0]}." if inner else ".")
        )
    return content


def check_no_pointer(path: Path) -> Path:
    """Return the path; raise an error if the file only points to content stored elsewhere."""
    if problem := pointer_problem_of(path):
        raise ConfigError(f"{path}: {problem}")
    return path


def files_of(path: Path, suffix: str) -> list[Path]:
    """Return the file itself, or a directory's files with the given suffix, sorted by name."""
    if not path.is_dir():
        if not path.is_file():
            raise ConfigError(f"{path}: no such file or directory. Check the path.")
        return [check_no_pointer(path)]
    files = sorted(each for each in path.glob(f"*{suffix}") if not each.name.startswith("."))
    if not files:
        raise ConfigError(f"{path}: contains no {suffix} file. Give a file, or another directory.")
    return [check_no_pointer(file) for file in files]


def listed_file(path: Path, size: int | None) -> Path:
    """Check that a file listed in index.json exists and has the listed size; return its path."""
    if not path.is_file():
        raise ConfigError(f"{path}: no such file, but index.json lists it. Restore it.")
    check_no_pointer(path)
    if size is not None and path.stat().st_size != size:
        raise damaged(path, f"has {path.stat().st_size} bytes, but index.json lists {size}")
    return path


def damaged(path: Path, what: str) -> ConfigError:
    """Return an error that reports a damaged input file."""
    return ConfigError(f"{path}: {what}. The file is damaged or truncated: restore it.")


def read_whole(path: Path, compression: str | None) -> np.ndarray:
    """Return the content of a file as (N,) uint8, mapped or decompressed.

    Args:
        compression: None, "zstd", or "zstd" followed by a level.
    """
    if compression is None:
        return np.memmap(path, np.uint8, "r")
    if compression.partition(":")[0] != "zstd":
        raise ConfigError(
            f"{path}: is compressed with {compression}, but only zstd is supported. Decompress it."
        )
    import pyarrow as pa

    try:
        with pa.input_stream(str(path), compression="zstd") as stream:
            return np.frombuffer(stream.read(), np.uint8)
    except (OSError, ValueError) as error:
        raise damaged(path, f"cannot be decompressed ({error})") from None


def offsets_of(path: Path, content: np.ndarray, expected: Any) -> np.ndarray:
    """Read the offsets of a file's items from the beginning of the file: (N + 1,) int64.

    MDS shards and litdata chunks begin the same way: uint32 N, then N + 1 uint32 file offsets.

    Args:
        expected: the value of N that the index lists.
    """
    count = int(content[:4].view("<u4")[0]) if len(content) >= 4 else -1
    if count != expected:
        raise damaged(path, f"contains {count} items, but its index.json lists {expected}")
    if len(content) < 4 * (count + 2):
        raise damaged(path, f"ends after {len(content)} bytes")
    offsets = content[4 : 4 * (count + 2)].view("<u4").astype(np.int64)
    is_ascending = bool((np.diff(offsets) >= 0).all())
    if not is_ascending or offsets[0] < 4 * (count + 2) or offsets[-1] != len(content):
        raise damaged(path, f"has {len(content)} bytes, which do not match its offsets")
    return offsets
