"""`Documents`: token ids with document ends and origins, and how they are read from shards."""

from collections import deque
from collections.abc import Iterator, Sequence
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
    """

    ids: np.ndarray
    ends: np.ndarray
    origins: np.ndarray

    def take(self, numbers: np.ndarray) -> "Documents":
        """Return some of the documents, by their (M,) ascending numbers."""
        lengths = np.diff(self.ends, prepend=0)
        kept = np.zeros(len(lengths), bool)
        kept[numbers] = True
        ids = self.ids[np.repeat(kept, lengths)]
        return Documents(ids, np.cumsum(lengths[numbers]), self.origins[numbers])


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
                f"a shard directory cannot list. Give fewer of them."
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


def read_documents(sources: Sequence[Source], inputs: Inputs) -> Iterator[Documents]:
    """Yield all documents in pieces of about `PIECE_TOKENS`, in order; ids are verified."""
    for number, source in enumerate(sources):
        first = 0
        for shard, entry in enumerate(source.shards):
            ends = source.document_ends(shard).astype(np.int64)
            _check_ends(source, entry, ends)
            yield from _read_shard(
                source, shard, ends, inputs.origins(source, number, shard, first)
            )
            first += len(ends)


def _read_shard(
    source: Source, shard: int, ends: np.ndarray, origins: np.ndarray
) -> Iterator[Documents]:
    bounds = list(piece_bounds(ends))
    edges = [0, *(int(ends[last - 1]) for _, last in bounds)]
    fetches: deque[Any] = deque()  # which keep what has arrived from a store
    for place, (first, last) in enumerate(bounds):
        while place + len(fetches) < min(len(bounds), place + 1 + PIECES_AHEAD):
            ahead = place + len(fetches)
            fetches.append(source.files.prefetch([(shard, edges[ahead], edges[ahead + 1])]))
        ids = source.ids(shard, edges[place], edges[place + 1])
        fetches.popleft()
        own_ends = ends[first:last] - edges[place]
        wrong = np.flatnonzero(ids[own_ends - 1] != source.eos_id)
        if len(wrong):
            path = source.directory / source.shards[shard]["file"]
            raise ShardError(
                f"{path}: document {first + wrong[0]} does not end in id {source.eos_id}, the EOS "
                f"of its manifest. Tokenize again."
            )
        yield Documents(ids, own_ends, origins[first:last])


def _check_ends(source: Source, entry: dict[str, Any], ends: np.ndarray) -> None:
    if ends[-1] != entry["num_tokens"] or ends[0] < 1 or (np.diff(ends) < 1).any():
        raise ShardError(
            f"{source.directory / entry['index']}: document ends do not ascend to "
            f"{entry['num_tokens']}. Tokenize again."
        )
