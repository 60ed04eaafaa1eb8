"""Tasks that find repeated lines, paragraphs and substrings, by sorting hashes.

A place is the number of a line or paragraph, or the position of a character where a window of
`min_characters` starts. Among equal places, the first in input order is kept. Hashing every window
would take 24 bytes per character. Therefore `AnchorTask` first hashes only a few k-grams of each
document, its anchors, chosen by winnowing (Schleimer, Wilkerson, Aiken, 2003): in each window, the
k-gram with the smallest hash. Equal windows have equal anchors, so a window can be repeated only
if its anchor occurs at least twice. `WindowTask` hashes only such windows.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data_prep.dedup.arrays import (
    NUMBER_MASK,
    array_path,
    find_range,
    load_array,
    rows_of_unit,
    save_array,
    save_arrays,
    structured_array,
    task_record,
    to_ids,
)
from data_prep.dedup.word_hashes import SECOND_BASE, hash_ngrams, hash_spans, hash_words, mix
from data_prep.stages.documents import Documents, batch_rows, chosen_batches
from data_prep.stages.line_ends import split_lines, split_paragraphs

PLACE = np.dtype([("hash", "<u8"), ("low", "<u8"), ("position", "<u4"), ("document", "<u4")])
ANCHOR = np.dtype([("hash", "<u8"), ("position", "<u4"), ("document", "<u4")])
FOUND = np.dtype([("document", "<u8"), ("position", "<u4")])
RUN_ENTRIES = 1 << 22  # number of entries sorted at a time: 100 MB
SPLITS = {"lines": split_lines, "paragraphs": split_paragraphs}


class Run(NamedTuple):
    """A sorted file with entries from one unit."""

    unit: int
    path: Path


class RunWriter:
    """Writes the entries of a unit as sorted files that each fit in memory."""

    def __init__(self, directory: Path, kind: str, unit: int, dtype: np.dtype):
        self.directory, self.kind, self.unit = directory, f"{kind}/{unit:05d}", unit
        self.dtype = dtype
        self.pending: list[np.ndarray] = []
        self.num_pending = self.num_entries = 0
        self.sizes: dict[Path, int] = {}

    def add(self, *columns: np.ndarray) -> None:
        """Add entries: (N,) each."""
        self.pending.append(structured_array(self.dtype, *columns))
        self.num_pending += len(columns[0])
        if self.num_pending >= RUN_ENTRIES:
            self._flush()

    def close(self) -> dict:
        """Write the remaining entries, and return the record of the task."""
        self._flush()
        paths = [path.relative_to(self.directory).as_posix() for path in self.sizes]
        return task_record(self.directory, self.sizes, entries=self.num_entries) | {"runs": paths}

    def _flush(self) -> None:
        if not self.num_pending:
            return
        entries = np.concatenate(self.pending)
        entries = entries[np.argsort(entries["hash"], kind="stable")]
        path = array_path(self.directory, self.kind, len(self.sizes))
        self.sizes[path] = save_array(path, entries)
        self.num_entries += len(entries)
        self.pending, self.num_pending = [], 0


def _read_range(
    runs: Sequence[Run], dtype: np.dtype, partition: int, num_partitions: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the entries in one of `num_partitions` hash ranges, and their document ids."""
    low, high = ((number << 64) // num_partitions for number in (partition, partition + 1))
    parts, ids = [np.empty(0, dtype)], [np.empty(0, np.uint64)]
    for unit, path in runs:
        part = np.array(find_range(load_array(path), "hash", low, high))
        parts.append(part)
        ids.append(to_ids(unit, part["document"]))
    return np.concatenate(parts), np.concatenate(ids)


@dataclass(frozen=True)
class PieceTask:
    """Writes a hash of the words of each line or paragraph of at least `min_words` words."""

    documents: Documents
    directory: Path
    unit: str
    min_words: int

    def __call__(self, task: int) -> dict:
        writer = RunWriter(self.directory, "places", task, PLACE)
        first = 0
        for rows in batch_rows(self.documents.read(task)):
            split = [split_pieces(row.text, self.unit)[::2] for row in rows]
            counts = np.fromiter(map(len, split), np.int64, len(split))
            words, ends = hash_words([piece for pieces in split for piece in pieces])
            long = np.flatnonzero(np.diff(ends, prepend=0) >= self.min_words)
            numbers = np.repeat(np.arange(first, first + len(rows)), counts)
            positions = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
            hashes = hash_spans(words, ends)[long], hash_spans(words, ends, SECOND_BASE)[long]
            writer.add(*hashes, positions[long], numbers[long])
            first += len(rows)
        return writer.close()


def split_pieces(text: str, unit: str) -> list[str]:
    """Split a text into lines or paragraphs, alternating with the separators between them."""
    return SPLITS[unit](text)


def _characters(
    documents: Documents, task: int, numbers: np.ndarray | None = None
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Yield batches: document numbers, the hashes of all characters, and where each document ends.

    Args:
        numbers: sorted numbers of the documents to read; None reads all.
    """
    chosen = None if numbers is None else set(numbers.tolist())
    for places, rows in chosen_batches(documents, task, chosen):
        ends = np.cumsum(np.fromiter((len(row.text) for row in rows), np.int64, len(rows)))
        text = "".join(row.text for row in rows).encode("utf-32-le", "surrogatepass")
        codes = np.frombuffer(text, "<u4").astype(np.uint64)
        yield np.array(places), mix(codes + np.uint64(1)), ends


@dataclass(frozen=True)
class AnchorTask:
    """Writes the anchors of a unit's documents: about 4 per `min_characters`."""

    documents: Documents
    directory: Path
    min_characters: int

    def __call__(self, task: int) -> dict:
        writer = RunWriter(self.directory, "anchors", task, ANCHOR)
        length = anchor_length(self.min_characters)
        width = self.min_characters - length + 1
        for numbers, values, ends in _characters(self.documents, task):
            grams, gram_ends = hash_ngrams(values, ends, length)
            start = 0
            for number, end in zip(numbers.tolist(), gram_ends.tolist(), strict=True):
                positions = choose_anchors(grams[start:end], width)
                hashes = grams[start:end][positions]
                writer.add(hashes, positions, np.full(len(positions), number))
                start = end
        return writer.close()


def anchor_length(min_characters: int) -> int:
    """Return the length of the k-grams in windows of `min_characters`."""
    return max(1, min_characters // 2)


def choose_anchors(hashes: np.ndarray, width: int) -> np.ndarray:
    """Return the indices of the minima of all windows of `width` hashes, with ties: (A,) int64."""
    if len(hashes) < width:
        return np.empty(0, np.int64)
    smallest = _sliding(np.minimum, hashes, width)
    edge = np.zeros(width - 1, np.uint64)
    # A hash is the minimum of some window if it equals the largest minimum of the windows around
    # it.
    return np.flatnonzero(
        _sliding(np.maximum, np.concatenate([edge, smallest, edge]), width) == hashes
    )


def _sliding(ufunc: np.ufunc, values: np.ndarray, width: int) -> np.ndarray:
    """Return the minimum or maximum of each window of `width` values: (N - width + 1,)."""
    span = 1
    while span * 2 <= width:
        values = ufunc(values[:-span], values[span:])
        span *= 2
    rest = width - span
    return ufunc(values[:-rest], values[rest:]) if rest else values


@dataclass(frozen=True)
class RepeatedAnchorTask:
    """Finds the anchors that occur more than once, in one hash range."""

    runs: tuple[Run, ...]
    directory: Path
    num_partitions: int

    def __call__(self, partition: int) -> dict:
        entries, ids = _read_range(self.runs, ANCHOR, partition, self.num_partitions)
        _, group, counts = np.unique(entries["hash"], return_inverse=True, return_counts=True)
        repeated = counts[group] > 1
        found = structured_array(FOUND, ids[repeated], entries["position"][repeated])
        return _save_found(self.directory, "repeated-anchors", partition, found)


@dataclass(frozen=True)
class WindowTask:
    """Writes hashes of the windows with an anchor that occurs more than once."""

    documents: Documents
    directory: Path
    min_characters: int
    num_partitions: int

    def __call__(self, task: int) -> dict:
        writer = RunWriter(self.directory, "places", task, PLACE)
        length = self.min_characters
        reach = length - anchor_length(length)  # from the start of a window to its last k-gram
        anchors = found_in_unit(self.directory, "repeated-anchors", self.num_partitions, task)
        documents = anchors["document"] & NUMBER_MASK
        for numbers, values, ends in _characters(self.documents, task, np.unique(documents)):
            high, window_ends = hash_ngrams(values, ends, length)
            low, _ = hash_ngrams(values, ends, length, SECOND_BASE)
            start = 0
            for number, end in zip(numbers.tolist(), window_ends.tolist(), strict=True):
                rows = slice(*np.searchsorted(documents, [number, number + 1]))
                positions = anchors["position"][rows].astype(np.int64)
                edges = np.zeros(end - start + 1, np.int64)
                np.add.at(edges, np.clip(positions - reach, 0, end - start), 1)
                np.add.at(edges, np.clip(positions + 1, 0, end - start), -1)
                chosen = np.flatnonzero(np.cumsum(edges[:-1]))
                place = start + chosen
                writer.add(high[place], low[place], chosen, np.full(len(chosen), number))
                start = end
        return writer.close()


@dataclass(frozen=True)
class RepeatTask:
    """Finds the places that repeat an earlier place, in one hash range.

    Args:
        distance: minimum distance at which a place repeats an earlier place in the same document.
    """

    runs: tuple[Run, ...]
    directory: Path
    num_partitions: int
    distance: int

    def __call__(self, partition: int) -> dict:
        entries, ids = _read_range(self.runs, PLACE, partition, self.num_partitions)
        order = np.lexsort((entries["position"], ids, entries["low"], entries["hash"]))
        entries, ids = entries[order], ids[order]
        is_first = np.ones(len(entries), bool)
        is_first[1:] = (entries["hash"][1:] != entries["hash"][:-1]) | (
            entries["low"][1:] != entries["low"][:-1]
        )
        first = np.maximum.accumulate(np.where(is_first, np.arange(len(entries)), 0))
        positions = entries["position"].astype(np.int64)
        is_far = (ids != ids[first]) | (positions - positions[first] >= self.distance)
        repeats = ~is_first & is_far
        found = structured_array(FOUND, ids[repeats], positions[repeats])
        return _save_found(self.directory, "repeats", partition, found)


def _save_found(directory: Path, kind: str, partition: int, found: np.ndarray) -> dict:
    found = found[np.lexsort((found["position"], found["document"]))]
    arrays = {array_path(directory, kind, partition): found}
    return save_arrays(directory, arrays, found=len(found))


def found_in_unit(directory: Path, kind: str, num_partitions: int, unit: int) -> np.ndarray:
    """Return the places that were found in a unit's documents: FOUND, sorted."""
    paths = [array_path(directory, kind, partition) for partition in range(num_partitions)]
    found = np.concatenate(rows_of_unit(paths, "document", unit))
    return found[np.lexsort((found["position"], found["document"]))]


def runs_of(directory: Path, records: Sequence[dict]) -> tuple[Run, ...]:
    """Return the sorted files that a phase's tasks have written."""
    return tuple(
        Run(unit, directory / name)
        for unit, record in enumerate(records)
        for name in record["runs"]
    )
