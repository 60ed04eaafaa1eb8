"""Tasks that compute the exact similarity of candidate pairs, and decide which documents to drop.

`VerifyTask` compares the shingles written by `members.py`, and `DecideTask` uses the results to
decide which documents to drop.
"""

from dataclasses import dataclass

import numpy as np

from data_prep.dedup.arrays import (
    DECISION,
    LINK,
    NUMBER_MASK,
    Units,
    array_path,
    by_unit,
    load_array,
    rows_of_unit,
    save_arrays,
    structured_array,
)
from data_prep.dedup.members import Shingles


@dataclass(frozen=True)
class VerifyTask:
    """Computes the similarity of the candidate pairs whose first document is in a unit.

    Pairs that contain a document dropped by an earlier stage are ignored, because only kept
    documents cause other documents to be dropped.
    """

    units: Units
    num_partitions: int
    threshold: float

    def __call__(self, unit: int) -> dict:
        work = self.units.work
        paths = [array_path(work, "pairs", task) for task in range(self.num_partitions)]
        pairs = np.unique(np.concatenate(rows_of_unit(paths, "one", unit)))
        links = []
        if len(pairs):
            first = Shingles(self.units.path("members", unit))
            pairs = pairs[np.isin(pairs["one"] & NUMBER_MASK, first.documents)]
        for second_unit, places in by_unit(pairs["two"]):
            second = Shingles(self.units.path("members", second_unit))
            for one, two in pairs[places].tolist():
                similarity = jaccard(first.of(one), second.of(two), self.threshold)
                if similarity >= self.threshold:
                    links.append((one, two, similarity))
        array = np.array(links, LINK)
        array = array[np.lexsort((array["two"], array["one"]))]
        arrays = {array_path(work, "links", unit): array}
        return save_arrays(work, arrays, pairs=len(pairs), links=len(links))


def jaccard(one: np.ndarray, two: np.ndarray, threshold: float = 0.0) -> float:
    """Return the Jaccard index of two sorted arrays of distinct values.

    Returns 0 if the sizes of the arrays alone show that the index is below the threshold.
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
    """Decides which documents to drop. This is a single task, whose memory use grows with the
    number of duplicates.

    It visits documents in input order and drops each document that is similar to one already kept.
    Therefore, each dropped document's similarity to a kept document is at least the threshold,
    which transitive clustering (A near B, B near C) would not guarantee.
    """

    units: Units
    num_partitions: int
    near: bool

    def __call__(self, task: int) -> dict:
        copies = self._load_all("copies", self.num_partitions)
        links = self._load_all("links", self.units.total) if self.near else np.empty(0, LINK)
        near = decide(links)
        place = np.searchsorted(near["dropped"], copies["kept"])
        place[place == len(near)] = 0
        # These are copies of a document that is itself dropped as a near-duplicate.
        is_near_too = np.zeros(len(copies), bool)
        if len(near):
            is_near_too = near["dropped"][place] == copies["kept"]
        exact = structured_array(
            DECISION, copies["dropped"], copies["kept"], np.ones(len(copies)), ~is_near_too
        )
        if len(near):
            exact["kept"][is_near_too] = near["kept"][place[is_near_too]]
            exact["similarity"][is_near_too] = near["similarity"][place[is_near_too]]
        self._mark_near_in_old_units(exact)
        decisions = np.concatenate([exact, near])
        decisions = decisions[np.argsort(decisions["dropped"])]
        arrays = {array_path(self.units.work, "decisions", 0): decisions}
        return save_arrays(self.units.work, arrays, dropped=len(decisions))

    def _mark_near_in_old_units(self, copies: np.ndarray) -> None:
        """Mark copies of documents that an earlier stage dropped as near-duplicates.

        `kept` remains the id of the dropped document; `find_names` looks up the document kept
        instead.

        Args:
            copies: a DECISION array, which is modified in place.
        """
        for unit, places in by_unit(copies["kept"]):
            if unit >= self.units.num_old:
                return
            dropped = np.array(load_array(self.units.path("dropped", unit)))
            numbers = copies["kept"][places] & NUMBER_MASK
            found = np.isin(numbers, dropped["document"])
            rows = np.searchsorted(dropped["document"], numbers[found])
            copies["exact"][places[found]] = False
            copies["similarity"][places[found]] = dropped["similarity"][rows]

    def _load_all(self, kind: str, count: int) -> np.ndarray:
        paths = [array_path(self.units.work, kind, task) for task in range(count)]
        return np.concatenate([np.array(load_array(path)) for path in paths])


def decide(links: np.ndarray) -> np.ndarray:
    """Decide which documents to drop, and which kept document each of them duplicates.

    Args:
        links: a LINK array that contains each pair of similar documents once.
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
    kept_for = np.full(len(ids), -1, np.int64)  # index of the document kept instead
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
