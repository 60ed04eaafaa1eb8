"""`Documents`: token ids with document ends and origins, and functions to read them from shards."""

from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import xxhash

from zerolm.common.errors import ShardError
from zerolm.shards.origins import POSITION_BITS, list_inputs, pack_origins
from zerolm.shards.reader import Source

PIECE_TOKENS = 1 << 22  # tokens read at a time, unless a document is longer
PIECES_AHEAD = 2  # pieces fetched from a store while another is being read


class Documents(NamedTuple):
    """Consecutive documents.

    Attributes:
        ids: token ids, (N,) of an integer dtype; each document ends with the EOS id.
        ends: index after each document's last id, ascending, (D,) int64; the last end is N.
        origins: (D,) uint64; see `zerolm.shards.origins`.
    """

    ids: np.ndarray
    ends: np.ndarray
    origins: np.ndarray

    def take(self, numbers: np.ndarray) -> "Documents":
        """Return the documents with the given indices, which are ascending: (M,)."""
        lengths = np.diff(self.ends, prepend=0)
        kept = np.zeros(len(lengths), bool)
        kept[numbers] = True
        ids = self.ids[np.repeat(kept, lengths)]
        return Documents(ids, np.cumsum(lengths[numbers]), self.origins[numbers])


def piece_bounds(ends: np.ndarray) -> Iterator[tuple[int, int]]:
    """Group consecutive documents up to `PIECE_TOKENS` ids; yield each group as (first, last)."""
    first = 0
    while first < len(ends):
        start = int(ends[first - 1]) if first else 0
        last = int(np.searchsorted(ends, start + PIECE_TOKENS, side="right"))
        yield first, (last := max(last, first + 1))
        first = last


def hash_documents(ids: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Return the XXH3 hash of each document's ids as (D,) uint64; `ends` contains the document
    ends.
    """
    data = np.ascontiguousarray(ids).view(np.uint8).data
    edges = (ends * ids.itemsize).tolist()
    pairs = zip([0, *edges], edges, strict=False)
    hashes = (xxhash.xxh3_64_intdigest(data[start:end]) for start, end in pairs)
    return np.fromiter(hashes, np.uint64, len(edges))


def listed_inputs(source: Source) -> list[dict[str, Any]]:
    """Return the inputs that origins refer to; if the source has no origins, the source itself."""
    entry = {"name": str(source.directory), "size_bytes": None, "unit": "document"}
    return list_inputs(source) or [entry]


def read_documents(source: Source) -> Iterator[Documents]:
    """Yield all documents in order, in pieces of about `PIECE_TOKENS` ids; the ids are verified."""
    inputs, first = list_inputs(source), 0
    for shard, entry in enumerate(source.shards):
        ends = source.document_ends(shard).astype(np.int64)
        _check_ends(source, entry, ends)
        if inputs is not None:
            origins = np.frombuffer(source.files.read_sidecar(shard, "origins"), "<u8")
            if (origins >> np.uint64(POSITION_BITS)).max(initial=0) >= len(inputs):
                raise ShardError(
                    f"{source.directory / entry['origins']}: names an input that is not listed. "
                    f"Restore it, or tokenize again."
                )
        else:
            origins = pack_origins(0, np.arange(first, first + len(ends)))
        yield from _read_shard(source, shard, ends, origins)
        first += len(ends)


def _read_shard(
    source: Source, shard: int, ends: np.ndarray, origins: np.ndarray
) -> Iterator[Documents]:
    bounds = list(piece_bounds(ends))
    edges = [0, *(int(ends[last - 1]) for _, last in bounds)]
    fetches: deque[Any] = deque()  # kept because they cache fetched content
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
                f"{path}: document {first + wrong[0]} does not end with id {source.eos_id}, the "
                "EOS in its manifest. Tokenize again."
            )
        yield Documents(ids, own_ends, origins[first:last])


def _check_ends(source: Source, entry: dict[str, Any], ends: np.ndarray) -> None:
    if ends[-1] != entry["num_tokens"] or ends[0] < 1 or (np.diff(ends) < 1).any():
        raise ShardError(
            f"{source.directory / entry['index']}: document ends do not ascend to "
            f"{entry['num_tokens']}. Tokenize again."
        )
