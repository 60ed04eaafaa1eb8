"""The arrays that deduplication's tasks leave for each other, one file a task.

A document is named by its unit (the task that read it) and its number there, in one integer whose
order is that of the input, whatever the units are. Files are sorted, so that a task which needs a
range of all of them reads just that, and none has to be written for each pair of tasks.
"""

from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from zerolm.files import write_atomically

UNIT_BITS = 32  # documents of a unit, at most 2^32
NUMBER_MASK = np.uint64((1 << UNIT_BITS) - 1)
BAND = np.dtype([("hash", "<u8"), ("text", "<u8"), ("document", "<u4")])
EXACT = np.dtype([("hash", "<u8"), ("low", "<u8"), ("document", "<u4")])
COPY = np.dtype([("dropped", "<u8"), ("kept", "<u8")])
PAIR = np.dtype([("one", "<u8"), ("two", "<u8")])
LINK = np.dtype([("one", "<u8"), ("two", "<u8"), ("similarity", "<f8")])
MEMBER = np.dtype([("document", "<u4"), ("end", "<u8")])
DECISION = np.dtype([("dropped", "<u8"), ("kept", "<u8"), ("similarity", "<f8"), ("exact", "?")])


def array_path(directory: Path, what: str, task: int) -> Path:
    """Return where a task's array is."""
    return directory / what / f"{task:05d}.npy"


def save(path: Path, array: np.ndarray) -> int:
    """Write an array, whole or not at all; return the size of the file in bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, lambda file: np.save(file, array), many_writers=True)
    return path.stat().st_size


def load(path: Path) -> np.ndarray:
    """Open an array; what is not looked at is not read."""
    try:
        return np.load(path, mmap_mode="r")
    except ValueError:  # an empty file cannot be mapped
        return np.load(path)


def find_range(array: np.ndarray, field: str | None, low: int, high: int) -> np.ndarray:
    """Return the entries from `low` to below `high`, of an array that is sorted by the field."""
    column = array[field] if field else array
    return array[bisect_left(column, low) : bisect_left(column, high)]


def in_partition(array: np.ndarray, partition: int, num_partitions: int) -> np.ndarray:
    """Return the entries whose hashes are in one of the equal ranges of all hashes."""
    low, high = ((partition + more << 64) // num_partitions for more in (0, 1))
    return find_range(array, "hash", low, high)


def read_partition(
    paths: Sequence[Path], partition: int, num_partitions: int
) -> tuple[list[np.ndarray], np.ndarray]:
    """Return the columns before the last of all files' entries in a partition, and their ids."""
    parts = [np.array(in_partition(load(path), partition, num_partitions)) for path in paths]
    names = parts[0].dtype.names or ()
    columns = [np.concatenate([part[name] for part in parts]) for name in names[:-1]]
    ids = np.concatenate([to_ids(unit, part["document"]) for unit, part in enumerate(parts)])
    return columns, ids


def to_ids(unit: int, documents: np.ndarray) -> np.ndarray:
    """Return the ids of documents of a unit: (N,) uint64."""
    return documents.astype(np.uint64) + np.uint64(unit << UNIT_BITS)


def of_unit(paths: Sequence[Path], field: str | None, unit: int) -> list[np.ndarray]:
    """Return what sorted files say on the documents of one unit."""
    low, high = unit << UNIT_BITS, (unit + 1) << UNIT_BITS
    return [np.array(find_range(load(path), field, low, high)) for path in paths]


def structured(dtype: np.dtype, *columns: np.ndarray) -> np.ndarray:
    """Return columns as one array of records."""
    array = np.empty(len(columns[0]), dtype)
    for name, column in zip(dtype.names or (), columns, strict=True):
        array[name] = column
    return array


def record_of(directory: Path, sizes: dict[Path, int], **more: int) -> dict:
    """Return the record of a task that wrote these files."""
    return {"files": {str(path.relative_to(directory)): n for path, n in sizes.items()}, **more}
