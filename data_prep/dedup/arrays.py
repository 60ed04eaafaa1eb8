"""Arrays that the dedup tasks exchange, each stored as one sorted file per task.

A document id is an integer: the high bits contain the index of the document's work unit, and the
low bits its index within that unit. Ids sort in input order, however the input is divided into
units. Because the files are sorted, each task reads only its range of every file, so no separate
file is needed for each pair of tasks.
"""

import os
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from zerolm.common.files import write_atomically

# Peak memory per entry while sorting a hash range: 101 bytes, measured with 2 million entries as
# the growth of the resident set in BucketTask (2026-11-21), plus a reserve for copies.
BYTES_PER_ENTRY = 120
UNIT_BITS = 32  # a unit contains at most 2^32 documents
NUMBER_MASK = np.uint64((1 << UNIT_BITS) - 1)
BAND = np.dtype([("hash", "<u8"), ("text", "<u8"), ("document", "<u4")])
EXACT = np.dtype([("hash", "<u8"), ("low", "<u8"), ("document", "<u4")])
COPY = np.dtype([("dropped", "<u8"), ("kept", "<u8")])
PAIR = np.dtype([("one", "<u8"), ("two", "<u8")])
LINK = np.dtype([("one", "<u8"), ("two", "<u8"), ("similarity", "<f8")])
MEMBER = np.dtype([("document", "<u4"), ("end", "<u8")])
DECISION = np.dtype([("dropped", "<u8"), ("kept", "<u8"), ("similarity", "<f8"), ("exact", "?")])
DROPPED = np.dtype([("document", "<u4"), ("similarity", "<f8")])


@dataclass(frozen=True)
class Units:
    """The work units of a stage, preceded by the units of the signatures that its documents are
    compared with.

    Args:
        old: directories that contain `exact`, `bands`, `members` and `dropped`, each with its
            number of units.
        work: directory for the arrays of the new units.
        hashes: directory for the new units' `exact` and `bands`, which may be kept as signatures.
    """

    old: tuple[tuple[Path, int], ...]
    work: Path
    hashes: Path
    num_new: int

    @property
    def num_old(self) -> int:
        """The number of old units, which is also the index of the first new unit."""
        return sum(count for _, count in self.old)

    @property
    def total(self) -> int:
        """The total number of units."""
        return self.num_old + self.num_new

    def path(self, kind: str, unit: int) -> Path:
        """Return the path of a unit's array; `kind` is the name of the array."""
        for directory, count in self.old:
            if unit < count:
                return array_path(directory, kind, unit)
            unit -= count
        return array_path(self.hashes if kind in ("exact", "bands") else self.work, kind, unit)

    def decisions(self, task: int) -> np.ndarray:
        """Return the decisions about a new unit's dropped documents: a sorted DECISION array."""
        path = array_path(self.work, "decisions", 0)
        return rows_of_unit([path], "dropped", self.num_old + task)[0]

    def read_partition(
        self, kind: str, partition: int, num_partitions: int
    ) -> tuple[list[np.ndarray], np.ndarray]:
        """Read the entries whose hashes are in one of `num_partitions` equal ranges.

        An entry from an old unit is returned only if its hash also occurs in a new unit, because
        only such entries affect new documents.

        Args:
            kind: name of the arrays, which are sorted by the field `hash` and have `document` as
                their last field.

        Returns:
            All columns except the last, and the document ids; each has shape (N,).
        """
        low, high = ((number << 64) // num_partitions for number in (partition, partition + 1))
        units = range(self.num_old, self.total)
        parts = [self._entries(kind, unit, low, high) for unit in units]
        ids = [to_ids(unit, part["document"]) for unit, part in zip(units, parts, strict=True)]
        wanted = np.unique(np.concatenate([part["hash"] for part in parts]))
        for unit in range(self.num_old):
            part = self._entries(kind, unit, low, high)
            part = part[np.isin(part["hash"], wanted)]
            parts.append(part)
            ids.append(to_ids(unit, part["document"]))
        names = parts[0].dtype.names or ()
        return [np.concatenate([part[name] for part in parts]) for name in names[:-1]], (
            np.concatenate(ids)
        )

    def _entries(self, kind: str, unit: int, low: int, high: int) -> np.ndarray:
        return np.array(find_range(load_array(self.path(kind, unit)), "hash", low, high))


def num_partitions(num_entries: int, memory_bytes: int) -> int:
    """Return the number of hash ranges with which each range can be sorted in memory."""
    return max(1, -(-num_entries * BYTES_PER_ENTRY // memory_bytes))


def array_path(directory: Path, kind: str, task: int) -> Path:
    """Return the path of a task's array; `kind` is the name of the array."""
    return directory / kind / f"{task:05d}.npy"


def save_array(path: Path, array: np.ndarray) -> int:
    """Write an array atomically, and return the file size in bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # If numpy is passed a real file, it writes to the file directly, and on a full disk its error
    # says only "4 items requested".
    write_atomically(
        path, lambda file: np.save(SimpleNamespace(write=file.write), array), many_writers=True
    )
    return path.stat().st_size


def load_array(path: Path) -> np.ndarray:
    """Open an array, memory-mapped."""
    try:
        return np.load(path, mmap_mode="r")
    except ValueError:  # an empty array cannot be mapped
        return np.load(path)


def find_range(array: np.ndarray, field: str | None, low: int, high: int) -> np.ndarray:
    """Return the entries whose `field` is in [low, high), from an array sorted by that field."""
    column = array[field] if field else array
    return array[bisect_left(column, low) : bisect_left(column, high)]


def to_ids(unit: int, numbers: np.ndarray) -> np.ndarray:
    """Convert document indices within a unit to document ids: (N,) uint64."""
    return numbers.astype(np.uint64) + np.uint64(unit << UNIT_BITS)


def by_unit(ids: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Yield each unit in order with the positions of its documents in `ids`, as (N,) int64."""
    units = ids >> np.uint64(UNIT_BITS)
    for unit in np.unique(units).tolist():
        yield unit, np.flatnonzero(units == unit)


def rows_of_unit(paths: Sequence[Path], field: str | None, unit: int) -> list[np.ndarray]:
    """Return, from each sorted file, the rows whose `field` is the id of a document in the unit."""
    low, high = unit << UNIT_BITS, (unit + 1) << UNIT_BITS
    return [np.array(find_range(load_array(path), field, low, high)) for path in paths]


def structured_array(dtype: np.dtype, *columns: np.ndarray) -> np.ndarray:
    """Combine columns into one structured array."""
    array = np.empty(len(columns[0]), dtype)
    for name, column in zip(dtype.names or (), columns, strict=True):
        array[name] = column
    return array


def task_record(directory: Path, sizes: dict[Path, int], **more: int) -> dict:
    """Return the record of a task, given the sizes in bytes of the files that it wrote."""
    return {"files": {os.path.relpath(path, directory): n for path, n in sizes.items()}, **more}


def save_arrays(directory: Path, arrays: dict[Path, np.ndarray], **more: int) -> dict:
    """Write a task's arrays atomically, and return the task's record."""
    sizes = {path: save_array(path, array) for path, array in arrays.items()}
    return task_record(directory, sizes, **more)
