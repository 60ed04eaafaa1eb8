"""Tasks that compute the exact similarity of candidate pairs, and decide which documents to drop.

`MembersTask` rereads the candidates and exact copies, `VerifyTask` compares the pairs, and
`DecideTask` decides. Only documents with a possible duplicate take memory or disk space here.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from data_prep.dedup.arrays import (
    DECISION,
    LINK,
    MEMBER,
    NUMBER_MASK,
    UNIT_BITS,
    array_path,
    load_array,
    rows_of_unit,
    save_array,
    structured_array,
    task_record,
)
from data_prep.dedup.word_hashes import hash_ngrams, hash_words
from data_prep.stages.documents import DocumentRow, Documents, batch_rows
from zerolm.common.files import write_atomically


@dataclass(frozen=True)
class MembersTask:
    """Writes the ids of a unit's possible duplicates, and the shingles of candidates."""

    documents: Documents
    directory: Path
    num_partitions: int
    shingle_words: int
    near: bool

    def __call__(self, unit: int) -> dict:
        copies = self._members(unit, "copies-members")
        paired = self._members(unit, "pairs-members") if self.near else copies[:0]
        path = array_path(self.directory, "members", unit)
        names_path, shingles_path = _names_path(path), _shingles_path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        members: list[tuple[int, int]] = []
        names: list[Any] = []

        def write_shingles(file: BinaryIO) -> None:
            end = 0
            for numbers, rows in self._batches(unit, np.union1d(copies, paired)):
                words, ends = hash_words([row.text for row in rows])
                shingles, ends = hash_ngrams(words, ends, self.shingle_words)
                parts = np.split(shingles, ends[:-1])
                is_paired = np.isin(numbers, paired).tolist()
                for row, number, part, has_pair in zip(
                    rows, numbers, parts, is_paired, strict=True
                ):
                    if has_pair:
                        part = np.unique(part)
                        file.write(part.tobytes())
                        end += len(part)
                    members.append((number, end))
                    names.append(row.id)

        write_atomically(shingles_path, write_shingles, many_writers=True)
        content = json.dumps(names).encode()
        write_atomically(names_path, content, many_writers=True)
        sizes = {path: save_array(path, np.array(members, MEMBER))}
        sizes |= {each: each.stat().st_size for each in (names_path, shingles_path)}
        return task_record(self.directory, sizes, members=len(members))

    def _members(self, unit: int, kind: str) -> np.ndarray:
        """Return the numbers of a unit's documents that are in a copy or pair, sorted."""
        paths = [array_path(self.directory, kind, task) for task in range(self.num_partitions)]
        return np.unique(np.concatenate(rows_of_unit(paths, None, unit)) & NUMBER_MASK)

    def _batches(
        self, unit: int, members: np.ndarray
    ) -> Iterator[tuple[list[int], list[DocumentRow]]]:
        """Yield the numbers and the documents of the members, in batches."""
        if not len(members):
            return
        member_numbers = set(members.tolist())
        numbers: list[int] = []

        def member_rows() -> Iterator[DocumentRow]:
            for number, row in enumerate(self.documents.read(unit)):
                if number in member_numbers:
                    numbers.append(number)
                    yield row

        for rows in batch_rows(member_rows()):
            yield numbers[: len(rows)], rows
            del numbers[: len(rows)]


def _names_path(members: Path) -> Path:
    """Return the path of the members' ids, as they are in the input."""
    return members.with_suffix(".names.json")


def _shingles_path(members: Path) -> Path:
    """Return the path of the members' shingles: little-endian uint64."""
    return members.with_suffix(".shingles")


def read_names(directory: Path, unit: int, documents: np.ndarray) -> list[Any]:
    """Return the ids of members of a unit, as they are in the input."""
    path = array_path(directory, "members", unit)
    names = json.loads(_names_path(path).read_bytes())
    places = np.searchsorted(np.array(load_array(path))["document"], documents & NUMBER_MASK)
    return [names[place] for place in places.tolist()]


@dataclass(frozen=True)
class VerifyTask:
    """Computes the similarity of the candidate pairs whose first document is in a unit."""

    directory: Path
    num_partitions: int
    threshold: float

    def __call__(self, unit: int) -> dict:
        paths = [array_path(self.directory, "pairs", task) for task in range(self.num_partitions)]
        pairs = np.unique(np.concatenate(rows_of_unit(paths, "one", unit)))
        second_units = pairs["two"] >> np.uint64(UNIT_BITS)
        links = []
        for second_unit in np.unique(second_units).tolist():
            first = Shingles(self.directory, unit)
            second = Shingles(self.directory, second_unit)
            for one, two in pairs[second_units == second_unit].tolist():
                similarity = jaccard(first.of(one), second.of(two), self.threshold)
                if similarity >= self.threshold:
                    links.append((one, two, similarity))
        array = np.array(links, LINK)
        array = array[np.lexsort((array["two"], array["one"]))]
        path = array_path(self.directory, "links", unit)
        return task_record(
            self.directory, {path: save_array(path, array)}, pairs=len(pairs), links=len(links)
        )


class Shingles:
    """The shingles of a unit's documents that are in candidate pairs."""

    def __init__(self, directory: Path, unit: int):
        path = array_path(directory, "members", unit)
        members = np.array(load_array(path))
        self.documents, self.ends = members["document"], members["end"].astype(np.int64)
        size = int(self.ends[-1]) if len(members) else 0
        self.values = np.memmap(_shingles_path(path), "<u8", "r", shape=(size,)) if size else None

    def of(self, document: int) -> np.ndarray:
        """Return a document's distinct shingles: sorted (S,) uint64."""
        place = int(np.searchsorted(self.documents, document & int(NUMBER_MASK)))
        assert self.values is not None
        return self.values[self.ends[place - 1] if place else 0 : self.ends[place]]


def jaccard(one: np.ndarray, two: np.ndarray, threshold: float = 0.0) -> float:
    """Return the Jaccard index of two sorted arrays of distinct values.

    Returns 0 if their sizes alone show that it is below the threshold.
    """
    small, large = sorted((one, two), key=len)
    if len(small) < threshold * len(large):
        return 0.0
    places = np.searchsorted(large, small)
    places[places == len(large)] = 0
    common = int((large[places] == small).sum())
    return common / (len(small) + len(large) - common)


@dataclass(frozen=True)
class DecideTask:
    """Decides which documents to drop, in one task with memory proportional to the duplicates.

    It visits documents in input order and drops each that is similar to one already kept. So each
    dropped document has a similarity of at least the threshold to a kept one. Transitive clustering
    (A near B, B near C) would not guarantee that.
    """

    directory: Path
    num_units: int
    num_partitions: int
    near: bool

    def __call__(self, task: int) -> dict:
        copies = self._load_all("copies", self.num_partitions)
        links = self._load_all("links", self.num_units) if self.near else np.empty(0, LINK)
        near = decide(links)
        place = np.searchsorted(near["dropped"], copies["kept"])
        place[place == len(near)] = 0
        # Copies of a document that is itself dropped as a near-duplicate.
        is_near_too = np.zeros(len(copies), bool)
        if len(near):
            is_near_too = near["dropped"][place] == copies["kept"]
        exact = structured_array(
            DECISION, copies["dropped"], copies["kept"], np.ones(len(copies)), ~is_near_too
        )
        if len(near):
            exact["kept"][is_near_too] = near["kept"][place[is_near_too]]
            exact["similarity"][is_near_too] = near["similarity"][place[is_near_too]]
        decisions = np.concatenate([exact, near])
        decisions = decisions[np.argsort(decisions["dropped"])]
        path = array_path(self.directory, "decisions", 0)
        sizes = {path: save_array(path, decisions)}
        return task_record(self.directory, sizes, dropped=len(decisions))

    def _load_all(self, kind: str, count: int) -> np.ndarray:
        paths = [array_path(self.directory, kind, task) for task in range(count)]
        return np.concatenate([np.array(load_array(path)) for path in paths])


def decide(links: np.ndarray) -> np.ndarray:
    """Return which documents are dropped, and for which kept ones: DECISION, sorted by `dropped`.

    Args:
        links: LINK, each similar pair once.
    """
    ids = np.unique(np.concatenate([links["one"], links["two"]]))
    if not len(ids):
        return np.empty(0, DECISION)
    ends = np.concatenate([np.searchsorted(ids, links[name]) for name in ("one", "two")])
    others = np.concatenate([np.searchsorted(ids, links[name]) for name in ("two", "one")])
    similarities = np.concatenate([links["similarity"]] * 2)
    by_end = np.lexsort((others, ends))
    starts = np.searchsorted(ends[by_end], np.arange(len(ids) + 1)).tolist()
    others, similarities = others[by_end], similarities[by_end]
    kept_for = np.full(len(ids), -1, np.int64)  # the kept document that each is dropped for
    similarity = np.zeros(len(ids))
    for node in range(len(ids)):
        if kept_for[node] >= 0:
            continue
        neighbours = slice(starts[node], starts[node + 1])
        undecided = kept_for[others[neighbours]] < 0
        dropped = others[neighbours][undecided]
        kept_for[dropped] = node
        similarity[dropped] = similarities[neighbours][undecided]
    dropped = np.flatnonzero(kept_for >= 0)
    return structured_array(
        DECISION, ids[dropped], ids[kept_for[dropped]], similarity[dropped], np.zeros(len(dropped))
    )
