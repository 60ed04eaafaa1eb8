"""Which documents are duplicates: candidates compared by all of their shingles, then a choice.

`MembersTask` reads the documents that are in question once more, `VerifyTask` compares them, and
`DecideTask` chooses. Only documents with a possible duplicate are in memory or on disk here.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data_prep.dedup_files import (
    DECISION,
    LINK,
    MEMBER,
    NUMBER_MASK,
    UNIT_BITS,
    array_path,
    load,
    of_unit,
    record_of,
    save,
    structured,
)
from data_prep.stage_documents import Documents, batches
from data_prep.words import hash_runs, hash_words
from zerolm.files import write_atomically


@dataclass(frozen=True)
class MembersTask:
    """Write names and shingles of the documents of a unit that are in question."""

    documents: Documents
    directory: Path
    num_partitions: int
    shingle_words: int
    near: bool

    def __call__(self, unit: int) -> dict:
        copies = self._asked(unit, "copies-members")
        paired = self._asked(unit, "pairs-members") if self.near else copies[:0]
        asked = np.union1d(copies, paired)
        path = array_path(self.directory, "members", unit)
        names_path, shingles_path = names_of(path), shingles_of(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        members: list[tuple[int, int]] = []
        names: list = []

        def write(file) -> None:
            end = 0
            for numbers, rows in self._rows(unit, asked):
                words, ends = hash_words([row.text for row in rows])
                shingles, ends = hash_runs(words, ends, self.shingle_words)
                wanted = np.isin(numbers, paired)
                for row, number, part, want in zip(
                    rows, numbers, np.split(shingles, ends[:-1]), wanted.tolist(), strict=True
                ):
                    if want:
                        part = np.unique(part)
                        file.write(part.tobytes())
                        end += len(part)
                    members.append((number, end))
                    names.append(row.id)

        write_atomically(shingles_path, write, many_writers=True)
        content = json.dumps(names).encode()
        write_atomically(names_path, lambda file: file.write(content), many_writers=True)
        sizes = {path: save(path, np.array(members, MEMBER))}
        sizes |= {each: each.stat().st_size for each in (names_path, shingles_path)}
        return record_of(self.directory, sizes, members=len(members))

    def _asked(self, unit: int, what: str) -> np.ndarray:
        """Return the numbers of a unit's documents that some partition found."""
        paths = [array_path(self.directory, what, task) for task in range(self.num_partitions)]
        return np.unique(np.concatenate(of_unit(paths, None, unit)) & NUMBER_MASK)

    def _rows(self, unit: int, asked: np.ndarray) -> Iterator[tuple[list[int], list]]:
        if not len(asked):
            return
        wanted = set(asked.tolist())
        numbers: list[int] = []

        def chosen():
            for number, row in enumerate(self.documents.read(unit)):
                if number in wanted:
                    numbers.append(number)
                    yield row

        for rows in batches(chosen()):
            yield numbers[: len(rows)], rows
            del numbers[: len(rows)]


@dataclass(frozen=True)
class VerifyTask:
    """Compute the similarity of the candidate pairs whose first document is in a unit."""

    directory: Path
    num_partitions: int
    threshold: float

    def __call__(self, unit: int) -> dict:
        paths = [array_path(self.directory, "pairs", task) for task in range(self.num_partitions)]
        pairs = np.unique(np.concatenate(of_unit(paths, "one", unit)))
        units = pairs["two"] >> np.uint64(UNIT_BITS)
        links = []
        for other in np.unique(units).tolist():
            mine = Shingles(self.directory, unit)
            theirs = Shingles(self.directory, other)
            for one, two in pairs[units == other].tolist():
                similarity = jaccard(mine.of(one), theirs.of(two), self.threshold)
                if similarity >= self.threshold:
                    links.append((one, two, similarity))
        array = np.array(links, LINK)
        array = array[np.lexsort((array["two"], array["one"]))]
        path = array_path(self.directory, "links", unit)
        return record_of(
            self.directory, {path: save(path, array)}, pairs=len(pairs), links=len(links)
        )


class Shingles:
    """The shingles of those documents of a unit that are in question."""

    def __init__(self, directory: Path, unit: int):
        path = array_path(directory, "members", unit)
        members = np.array(load(path))
        self.documents, self.ends = members["document"], members["end"].astype(np.int64)
        size = int(self.ends[-1]) if len(members) else 0
        self.values = np.memmap(shingles_of(path), "<u8", "r", shape=(size,)) if size else None

    def of(self, document: int) -> np.ndarray:
        """Return a document's different shingles: sorted (S,) uint64."""
        place = int(np.searchsorted(self.documents, document & int(NUMBER_MASK)))
        assert self.values is not None
        return self.values[self.ends[place - 1] if place else 0 : self.ends[place]]


def jaccard(one: np.ndarray, two: np.ndarray, threshold: float = 0.0) -> float:
    """Return the Jaccard index of two sorted arrays of different values.

    Where their sizes alone say that it is below the threshold, 0 is returned.
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
    """Choose what to keep: one task, whose memory is in proportion to the duplicates.

    Documents are taken in the order of the input, and one is dropped when it is similar to one that
    is kept. So each dropped document has its like among the kept ones,
    at the threshold or above, which a cluster of links (A like B, B like C) would not say.
    """

    directory: Path
    num_units: int
    num_partitions: int
    near: bool

    def __call__(self, task: int) -> dict:
        copies = self._all("copies", self.num_partitions)
        links = self._all("links", self.num_units) if self.near else np.empty(0, LINK)
        near = decide(links)
        place = np.searchsorted(near["dropped"], copies["kept"])
        place[place == len(near)] = 0
        moved = np.zeros(len(copies), bool)
        if len(near):
            moved = near["dropped"][place] == copies["kept"]
        exact = structured(
            DECISION, copies["dropped"], copies["kept"], np.ones(len(copies)), ~moved
        )
        if len(near):  # a copy of a document that is dropped as similar to another
            exact["kept"][moved] = near["kept"][place[moved]]
            exact["similarity"][moved] = near["similarity"][place[moved]]
        decisions = np.concatenate([exact, near])
        decisions = decisions[np.argsort(decisions["dropped"])]
        path = array_path(self.directory, "decisions", 0)
        return record_of(self.directory, {path: save(path, decisions)}, dropped=len(decisions))

    def _all(self, what: str, count: int) -> np.ndarray:
        paths = [array_path(self.directory, what, task) for task in range(count)]
        return np.concatenate([np.array(load(path)) for path in paths])


def decide(links: np.ndarray) -> np.ndarray:
    """Return what is dropped in favour of what, sorted: DECISION.

    Args:
        links: LINK, each pair once.
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
    kept_for = np.full(len(ids), -1, np.int64)
    similarity = np.zeros(len(ids))
    for node in range(len(ids)):
        if kept_for[node] >= 0:
            continue
        near = slice(starts[node], starts[node + 1])
        free = kept_for[others[near]] < 0
        dropped = others[near][free]
        kept_for[dropped] = node
        similarity[dropped] = similarities[near][free]
    dropped = np.flatnonzero(kept_for >= 0)
    return structured(
        DECISION, ids[dropped], ids[kept_for[dropped]], similarity[dropped], np.zeros(len(dropped))
    )


def names_of(members: Path) -> Path:
    """Return the file of the ids that documents have in the input."""
    return members.with_suffix(".names.json")


def shingles_of(members: Path) -> Path:
    """Return the file of all shingles: little-endian uint64."""
    return members.with_suffix(".shingles")


def read_names(directory: Path, unit: int, documents: np.ndarray) -> list:
    """Return the ids that some documents in question have in the input."""
    path = array_path(directory, "members", unit)
    names = json.loads(names_of(path).read_bytes())
    places = np.searchsorted(np.array(load(path))["document"], documents & NUMBER_MASK)
    return [names[place] for place in places.tolist()]
