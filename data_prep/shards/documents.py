"""`Documents`: token ids with document ends and origins, and how they are read from shards.

A selection of documents is made from document ends and origins alone, before any id is read.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import numpy as np
import orjson
import xxhash

from zerolm.common.errors import ConfigError, ShardError
from zerolm.shards.origins import MAX_INPUTS, POSITION_BITS, list_inputs, pack_origins
from zerolm.shards.reader import Source

PIECE_TOKENS = 1 << 22  # read at a time, unless a document is longer
PIECES_AHEAD = 2  # that are fetched from a store while one is read


class Documents(NamedTuple):
    """Consecutive documents.

    Attributes:
        ids: (N,) of an integer dtype; each document ends in the EOS id.
        ends: (D,) int64, ascending, the last one N.
        origins: (D,) uint64; see `zerolm.shards.origins`.
        keys: (D,) uint64, by which a shuffle sorts; None without a shuffle.
    """

    ids: np.ndarray
    ends: np.ndarray
    origins: np.ndarray
    keys: np.ndarray | None = None

    def take(self, numbers: np.ndarray) -> "Documents":
        """Return some of the documents, by their (M,) numbers, in that order."""
        lengths = np.diff(self.ends, prepend=0)
        ids = _gather(self.ids, self.ends - lengths, self.ends, numbers)
        return Documents(ids, np.cumsum(lengths[numbers]), self.origins[numbers])


def _gather(
    ids: np.ndarray, starts: np.ndarray, ends: np.ndarray, numbers: np.ndarray
) -> np.ndarray:
    """Return the ids of these documents, one after the other; neighbours are copied together."""
    if not len(numbers):
        return ids[:0]
    breaks = np.flatnonzero(np.diff(numbers) != 1)
    first = starts[numbers[np.concatenate([[0], breaks + 1])]].tolist()
    last = ends[numbers[np.append(breaks, len(numbers) - 1)]].tolist()
    if len(first) == 1:
        return ids[first[0] : last[0]]
    return np.concatenate([ids[one:two] for one, two in zip(first, last, strict=True)])


def piece_bounds(ends: np.ndarray) -> Iterator[tuple[int, int]]:
    """Yield (first, last) of consecutive documents with at most `PIECE_TOKENS` ids together."""
    first = 0
    while first < len(ends):
        start = int(ends[first - 1]) if first else 0
        last = int(np.searchsorted(ends, start + PIECE_TOKENS, side="right"))
        yield first, (last := max(last, first + 1))
        first = last


def hash_documents(ids: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Return the XXH3 of the ids of each document, (D,) uint64; it ends at `ends` in `ids`."""
    data = np.ascontiguousarray(ids).view(np.uint8).data
    edges = (ends * ids.itemsize).tolist()
    pairs = zip([0, *edges], edges, strict=False)
    hashes = (xxhash.xxh3_64_intdigest(data[start:end]) for start, end in pairs)
    return np.fromiter(hashes, np.uint64, len(edges))


@dataclass(frozen=True)
class Selection:
    """Which documents of the sources are written.

    Attributes:
        files: a pattern with * and ? for the file that a document was read from.
        min_length, max_length: tokens of a document, including its EOS.
        keep, drop: numbers of documents, ascending, counted from 0 over all sources.
        max_documents, max_tokens: where to stop, after all other choices and after the shuffle.
    """

    files: str | None = None
    min_length: int | None = None
    max_length: int | None = None
    keep: np.ndarray | None = None
    drop: np.ndarray | None = None
    max_documents: int | None = None
    max_tokens: int | None = None

    def record(self) -> dict[str, Any]:
        """Return what was chosen, for the manifest; the lists of documents by their size."""
        given = {key: value for key, value in vars(self).items() if value is not None}
        return {
            key: len(value) if isinstance(value, np.ndarray) else value
            for key, value in given.items()
        }

    def within_limits(self, lengths: np.ndarray, documents: int, tokens: int) -> int:
        """Return how many of the next documents fit after `documents` and `tokens`."""
        count = len(lengths)
        if self.max_documents is not None:
            count = min(count, self.max_documents - documents)
        if self.max_tokens is not None:
            room = self.max_tokens - tokens
            count = min(count, int(np.searchsorted(np.cumsum(lengths), room, side="right")))
        return max(count, 0)


class Inputs:
    """The input files that the origins of all sources refer to, as one list.

    The documents of a source without origins refer to the source itself.
    """

    def __init__(self, sources: Sequence[Source]):
        self.entries: list[dict[str, Any]] = []
        self._numbers: list[np.ndarray | int] = []  # new ones of each source's inputs
        places: dict[bytes, int] = {}

        def place(entry: dict[str, Any]) -> int:
            number = places.setdefault(orjson.dumps(entry), len(self.entries))
            if number == len(self.entries):
                self.entries.append(entry)
            return number

        for source in sources:
            listed = list_inputs(source)
            if listed is None:
                entry = {"name": str(source.directory), "size_bytes": None, "unit": "document"}
                self._numbers.append(place(entry))
            else:
                self._numbers.append(np.array([place(entry) for entry in listed], np.uint64))
        if len(self.entries) > MAX_INPUTS:
            raise ConfigError(
                f"SHARDS: have {len(self.entries):,} input files, more than {MAX_INPUTS:,}, which "
                f"a shard directory cannot list. Merge fewer of them."
            )

    def origins(self, source: Source, number: int, shard: int, first: int) -> np.ndarray:
        """Return the origins of a shard's documents in the new list, (D,) uint64.

        Args:
            number: number of the source.
            first: number of the shard's first document in the source.
        """
        mapped = self._numbers[number]
        if isinstance(mapped, int):
            count = source.shards[shard]["num_documents"]
            return pack_origins(mapped, np.arange(first, first + count))
        old = np.frombuffer(source.files.read_sidecar(shard, "origins"), "<u8")
        positions = old & np.uint64((1 << POSITION_BITS) - 1)
        return pack_origins(mapped[old >> np.uint64(POSITION_BITS)], positions)


class Chosen(NamedTuple):
    """The chosen documents of one shard.

    Attributes:
        ends: (D,) int64: the ends of all documents of the shard.
        origins: (D,) uint64, likewise.
        numbers: (M,) ascending: those that are chosen.
        first: number of the shard's first document, over all sources.
    """

    source: Source
    shard: int
    ends: np.ndarray
    origins: np.ndarray
    numbers: np.ndarray
    first: int

    @property
    def lengths(self) -> np.ndarray:
        """The lengths of the chosen documents in tokens."""
        return np.diff(self.ends, prepend=0)[self.numbers]

    def read(self, keys: np.ndarray | None = None) -> Iterator[Documents]:
        """Read the chosen documents; ids are verified.

        Args:
            keys: (M,) shuffle keys of the chosen documents.
        """
        starts = self.ends - np.diff(self.ends, prepend=0)
        new_ends = np.cumsum(self.lengths)
        bounds = list(piece_bounds(new_ends))
        ranges = [self._ranges(starts, self.numbers[one:two]) for one, two in bounds]
        fetches: deque[Any] = deque()  # which keep what has arrived from a store
        for place, (one, two) in enumerate(bounds):
            while place + len(fetches) < min(len(bounds), place + 1 + PIECES_AHEAD):
                fetches.append(self.source.files.prefetch(ranges[place + len(fetches)]))
            numbers, (_, low, high) = self.numbers[one:two], ranges[place][0]
            if len(ranges[place]) == 1:
                ids = self.source.ids(self.shard, low, high)
                ids = _gather(ids, starts - low, self.ends - low, numbers)
            else:
                ids = np.concatenate([self.source.ids(*each) for each in ranges[place]])
            fetches.popleft()
            ends = new_ends[one:two] - (new_ends[one - 1] if one else 0)
            wrong = np.flatnonzero(ids[ends - 1] != self.source.eos_id)
            if len(wrong):
                path = self.source.directory / self.source.shards[self.shard]["file"]
                raise ShardError(
                    f"{path}: document {numbers[wrong[0]]} does not end in id "
                    f"{self.source.eos_id}, the EOS of its manifest. Tokenize again."
                )
            chosen_keys = None if keys is None else keys[one:two]
            yield Documents(ids, ends, self.origins[numbers], chosen_keys)

    def _ranges(self, starts: np.ndarray, numbers: np.ndarray) -> list[tuple[int, int, int]]:
        """Return (shard, first id, end) to read: one range, unless documents are far apart."""
        low, high = int(starts[numbers[0]]), int(self.ends[numbers[-1]])
        if high - low <= 2 * PIECE_TOKENS:
            return [(self.shard, low, high)]
        pairs = zip(starts[numbers].tolist(), self.ends[numbers].tolist(), strict=True)
        return [(self.shard, start, end) for start, end in pairs]


def choose(
    sources: Sequence[Source], inputs: Inputs, selection: Selection, with_limits: bool
) -> Iterator[Chosen]:
    """Yield the chosen documents of each shard of each source, without reading ids.

    Args:
        with_limits: stop at `max_documents` and `max_tokens`.
    """
    allowed = None
    if selection.files is not None:
        names = [entry["name"] for entry in inputs.entries]
        allowed = np.array([fnmatchcase(name, selection.files) for name in names], bool)
    first = documents = tokens = 0
    for number, source in enumerate(sources):
        first_of_source = first
        for shard, entry in enumerate(source.shards):
            ends = source.document_ends(shard).astype(np.int64)
            _check_ends(source, entry, ends)
            origins = inputs.origins(source, number, shard, first - first_of_source)
            lengths = np.diff(ends, prepend=0)
            mask = np.ones(len(ends), bool)
            if allowed is not None:
                mask &= allowed[origins >> np.uint64(POSITION_BITS)]
            if selection.min_length is not None:
                mask &= lengths >= selection.min_length
            if selection.max_length is not None:
                mask &= lengths <= selection.max_length
            if selection.keep is not None:
                mask &= _listed(selection.keep, first, len(ends))
            if selection.drop is not None:
                mask &= ~_listed(selection.drop, first, len(ends))
            numbers = np.flatnonzero(mask)
            if with_limits:
                count = selection.within_limits(lengths[numbers], documents, tokens)
                is_last = count < len(numbers)
                numbers = numbers[:count]
                documents, tokens = documents + count, tokens + int(lengths[numbers].sum())
            if len(numbers):
                yield Chosen(source, shard, ends, origins, numbers, first)
            if with_limits and is_last:
                return
            first += len(ends)


def _listed(numbers: np.ndarray, first: int, count: int) -> np.ndarray:
    """Return (count,) bool: whether each document from `first` on is in the ascending list."""
    low, high = np.searchsorted(numbers, [first, first + count])
    mask = np.zeros(count, bool)
    mask[numbers[low:high] - first] = True
    return mask


def _check_ends(source: Source, entry: dict[str, Any], ends: np.ndarray) -> None:
    if ends[-1] != entry["num_tokens"] or ends[0] < 1 or (np.diff(ends) < 1).any():
        raise ShardError(
            f"{source.directory / entry['index']}: document ends do not ascend to "
            f"{entry['num_tokens']}. Tokenize again."
        )
