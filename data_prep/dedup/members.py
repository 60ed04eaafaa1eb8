"""Ids and shingles of documents, used to compare candidates and to name the kept documents.

`MembersTask` reads a stage's candidates and exact copies a second time, so that only documents with
possible duplicates take up disk space. Signatures that a stage keeps (`signatures.py`) store the
ids and shingles of every kept document.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from data_prep.dedup.arrays import (
    MEMBER,
    NUMBER_MASK,
    Units,
    array_path,
    by_unit,
    load_array,
    rows_of_unit,
    save_array,
    task_record,
)
from data_prep.dedup.word_hashes import hash_ngrams, hash_words
from data_prep.stages.documents import DocumentRow, Documents, chosen_batches
from zerolm.common.files import write_atomically


@dataclass(frozen=True)
class MembersTask:
    """Writes the ids of a new unit's possible duplicates, and the shingles of candidates."""

    documents: Documents
    units: Units
    num_partitions: int
    shingle_words: int
    near: bool

    def __call__(self, task: int) -> dict:
        copies = self._members(task, "copies-members")
        paired = self._members(task, "pairs-members") if self.near else copies[:0]
        path = array_path(self.units.work, "members", task)
        members = np.union1d(copies, paired)
        sizes = write_members(self.documents, task, path, members, paired, self.shingle_words)
        return task_record(self.units.work, sizes, members=len(members))

    def _members(self, task: int, kind: str) -> np.ndarray:
        """Return the sorted indices of the documents in a unit that occur in any copy or pair."""
        paths = [array_path(self.units.work, kind, each) for each in range(self.num_partitions)]
        found = rows_of_unit(paths, None, self.units.num_old + task)
        return np.unique(np.concatenate(found) & NUMBER_MASK)


def write_members(
    documents: Documents,
    task: int,
    path: Path,
    members: np.ndarray,
    paired: np.ndarray,
    shingle_words: int,
) -> dict[Path, int]:
    """Write the ids of some of a task's documents, and the shingles of those that are in `paired`.

    Args:
        path: where to write the array; two more files are written next to it.
        members: sorted indices, within the task, of the documents to write.

    Returns:
        The size in bytes of each file written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    entries: list[tuple[int, int]] = []
    names: list[Any] = []

    def write_shingles(file: BinaryIO) -> None:
        end = 0
        chosen = set(members.tolist())
        for numbers, rows in chosen_batches(documents, task, chosen) if chosen else ():
            names.extend(row.id for row in rows)
            is_paired = np.isin(numbers, paired).tolist()
            for number, part, has_pair in zip(
                numbers, _shingles(rows, shingle_words), is_paired, strict=True
            ):
                if has_pair:
                    part = np.unique(part)
                    file.write(part.tobytes())
                    end += len(part)
                entries.append((number, end))

    write_atomically(shingles_path(path), write_shingles, many_writers=True)
    write_atomically(names_path(path), json.dumps(names).encode(), many_writers=True)
    sizes = {path: save_array(path, np.array(entries, MEMBER))}
    return sizes | {each: each.stat().st_size for each in (names_path(path), shingles_path(path))}


def _shingles(rows: list[DocumentRow], shingle_words: int) -> list[np.ndarray]:
    words, ends = hash_words([row.text for row in rows])
    shingles, ends = hash_ngrams(words, ends, shingle_words)
    return np.split(shingles, ends[:-1])


def names_path(path: Path) -> Path:
    """Return the path of the file that lists the input ids of an array's documents."""
    return path.with_suffix(".names.json")


def shingles_path(members: Path) -> Path:
    """Return the path of the file that contains the members' shingles as little-endian uint64."""
    return members.with_suffix(".shingles")


class Shingles:
    """The shingles of documents in a unit; documents that are not candidates may be missing."""

    def __init__(self, path: Path):
        members = np.array(load_array(path))
        self.documents, self.ends = members["document"], members["end"].astype(np.int64)
        size = int(self.ends[-1]) if len(members) else 0
        self.values = np.memmap(shingles_path(path), "<u8", "r", shape=(size,)) if size else None

    def of(self, document: int) -> np.ndarray:
        """Return a document's distinct shingles, sorted, as (S,) uint64."""
        place = int(np.searchsorted(self.documents, document & int(NUMBER_MASK)))
        assert self.values is not None
        return self.values[self.ends[place - 1] if place else 0 : self.ends[place]]


def find_names(
    units: Units, stores: Sequence[str], kept: np.ndarray
) -> list[tuple[Any, str | None]]:
    """Return the input id of each kept document and the name of the signatures that contain it. The
    name is None for a new document. A document that an earlier stage dropped is replaced by the
    document that was kept instead.

    Args:
        stores: names of the signatures in `units.old`.
    """
    owners = [
        name for name, (_, count) in zip(stores, units.old, strict=True) for _ in range(count)
    ]
    found: list[tuple[Any, str | None]] = [(None, None)] * len(kept)
    for unit, places in by_unit(kept):
        numbers = kept[places] & NUMBER_MASK
        owner = owners[unit] if unit < units.num_old else None
        for kind in ("members",) if owner is None else ("members", "dropped"):
            path = units.path(kind, unit)
            documents = np.array(load_array(path))["document"]
            is_listed = np.isin(numbers, documents)
            if not is_listed.any():
                continue
            names = json.loads(names_path(path).read_bytes())
            rows = np.searchsorted(documents, numbers[is_listed])
            for place, row in zip(places[is_listed].tolist(), rows.tolist(), strict=True):
                name = names[row]
                found[place] = (name, owner) if kind == "members" else (name[0], name[1] or owner)
    return found
