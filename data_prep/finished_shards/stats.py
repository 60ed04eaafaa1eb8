"""Measures token shards: document lengths, token frequencies, and duplicate documents.

Worker processes measure pieces of complete documents. Memory depends on the longest document
and on `PARTITION_DOCUMENTS`, not on the size of the data. Must not depend on the command line.
"""

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from data_prep.finished_shards.documents import hash_documents, piece_bounds
from data_prep.tasks.workers import ordered_map
from zerolm.shards.reader import Source

PARTITION_DOCUMENTS = 1 << 22  # sorted in memory at a time, at 16 bytes each
BINS_PER_OCTAVE = 16  # histogram bins per doubling of the length: quantiles are accurate to 4.4%
NUM_BINS = 48 * BINS_PER_OCTAVE
LONGER_THAN = (512, 1024, 2048, 4096, 8192, 16384, 32768, 131072)
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
MAX_SHOWN_REPEATS = 20


class Piece(NamedTuple):
    """The documents of one shard whose indices are in [first, last)."""

    source: int
    shard: int
    first: int
    last: int


@dataclass
class Counts:
    """Counts over one or more pieces of a source; lengths are in tokens."""

    ids: np.ndarray  # (V,) int64: number of occurrences of each id
    length_bins: np.ndarray  # (NUM_BINS,) int64: number of documents, by log2 of the length
    token_bins: np.ndarray  # (NUM_BINS,) int64: number of tokens in these documents
    longer: np.ndarray  # (2, len(LONGER_THAN)) int64: documents longer than that, their tokens
    shortest: int
    longest: int
    longest_document: int  # its number

    def add(self, other: "Counts") -> None:
        """Add the counts of other pieces."""
        for name in ("ids", "length_bins", "token_bins", "longer"):
            total = getattr(self, name)
            total += getattr(other, name)  # in place
        self.shortest = min(self.shortest, other.shortest)
        if other.longest > self.longest:
            self.longest, self.longest_document = other.longest, other.longest_document


def measure_shards(
    sources: Sequence[Source],
    num_workers: int,
    top: int,
    progress: Any,
) -> list[dict[str, Any]]:
    """Measure sources, and return the statistics of each as a JSON object.

    Args:
        top: number of the most frequent ids to list.
        progress: its `add` is called with the numbers of tokens and documents in each piece.
    """
    totals: dict[int, Counts] = {}
    with tempfile.TemporaryDirectory(prefix="data_prep-stats-") as scratch:
        hashes = [_Hashes(Path(scratch), n, s.num_documents) for n, s in enumerate(sources)]
        measurer = partial(partial, _measure_piece, list(sources))
        results = ordered_map(measurer, _pieces(sources), num_workers)
        for piece, counts, digests, numbers in results:
            hashes[piece.source].add(digests, numbers)
            if piece.source in totals:
                totals[piece.source].add(counts)
            else:
                totals[piece.source] = counts
            progress.add(int(counts.ids.sum()), len(digests))
        return [
            _statistics(source, totals[number], hashes[number].duplicates(), top)
            for number, source in enumerate(sources)
        ]


def _pieces(sources: Sequence[Source]) -> Iterator[Piece]:
    for number, source in enumerate(sources):
        for shard in range(len(source.manifest["shards"])):
            ends = source.document_ends(shard).astype(np.int64)
            for first, last in piece_bounds(ends):
                yield Piece(number, shard, first, last)


def _measure_piece(
    sources: list[Source], piece: Piece
) -> tuple[Piece, Counts, np.ndarray, np.ndarray]:
    """Measure a piece; return its counts and its documents' hashes and indices: (D,) uint64."""
    source = sources[piece.source]
    ends = source.document_ends(piece.shard)[: piece.last].astype(np.int64)
    starts = np.concatenate([[0], ends[:-1]])[piece.first :]
    ends = ends[piece.first :]
    ids = source.ids(piece.shard, int(starts[0]), int(ends[-1]))
    lengths = ends - starts
    bins = np.minimum((np.log2(lengths) * BINS_PER_OCTAVE).astype(np.int64), NUM_BINS - 1)
    above = lengths[:, None] > np.array(LONGER_THAN)
    before = sum(each["num_documents"] for each in source.manifest["shards"][: piece.shard])
    longest = int(lengths.argmax())
    counts = Counts(
        np.bincount(ids, minlength=source.vocab_size),
        np.bincount(bins, minlength=NUM_BINS),
        np.bincount(bins, lengths, minlength=NUM_BINS).astype(np.int64),
        np.stack([above.sum(0), (above * lengths[:, None]).sum(0)]),
        int(lengths.min()),
        int(lengths[longest]),
        before + piece.first + longest,
    )
    digests = hash_documents(ids, ends - starts[0])
    numbers = np.arange(before + piece.first, before + piece.last, dtype=np.uint64)
    return piece, counts, digests, numbers


class _Hashes:
    """The hashes of a source's documents, divided by their high bits into files that each fit in
    memory.
    """

    def __init__(self, scratch: Path, source: int, num_documents: int):
        self.bits = max(0, (num_documents // PARTITION_DOCUMENTS).bit_length())
        self.paths = [scratch / f"{source}-{part}" for part in range(1 << self.bits)]

    def add(self, digests: np.ndarray, numbers: np.ndarray) -> None:
        """Add documents, given their hashes and indices, each (D,) uint64."""
        pairs = np.stack([digests, numbers], axis=1)
        if not self.bits:
            parts = np.zeros(len(digests), np.int64)
        else:
            parts = (digests >> np.uint64(64 - self.bits)).astype(np.int64)
        for part in np.unique(parts):
            with open(self.paths[part], "ab") as file:
                file.write(pairs[parts == part].tobytes())

    def duplicates(self) -> dict[str, Any]:
        """Return how many documents are copies of an earlier document, and the most frequent
        documents.
        """
        num_copies, num_groups, most_repeated = 0, 0, []
        for path in self.paths:
            if not path.exists():
                continue
            pairs = np.fromfile(path, np.uint64).reshape(-1, 2)
            pairs = pairs[np.lexsort((pairs[:, 1], pairs[:, 0]))]
            starts = np.flatnonzero(np.concatenate([[True], np.diff(pairs[:, 0]) != 0]))
            sizes = np.diff(starts, append=len(pairs))
            num_copies += int((sizes - 1).sum())
            num_groups += int((sizes > 1).sum())
            for index in np.argsort(-sizes, kind="stable")[:MAX_SHOWN_REPEATS]:
                if sizes[index] > 1:
                    most_repeated.append((int(sizes[index]), int(pairs[starts[index], 1])))
        most_repeated.sort(key=lambda pair: (-pair[0], pair[1]))
        shown = [
            {"times": times, "document": first}
            for times, first in most_repeated[:MAX_SHOWN_REPEATS]
        ]
        return {"again": num_copies, "groups": num_groups, "most_repeated": shown}


def _statistics(
    source: Source, counts: Counts, duplicates: dict[str, Any], top: int
) -> dict[str, Any]:
    tokens, documents = source.num_tokens, source.num_documents
    text_bytes = source.manifest.get("text_bytes")
    return {
        "shards": str(source.directory),
        "num_tokens": tokens,
        "num_documents": documents,
        "bytes_per_token": text_bytes / tokens if text_bytes else None,
        "length": _length_statistics(counts, tokens, documents),
        "ids": _id_statistics(source, counts, top),
        "duplicates": {**duplicates, "share": duplicates["again"] / documents},
    }


def _length_statistics(counts: Counts, tokens: int, documents: int) -> dict[str, Any]:
    edges = 2 ** (np.arange(NUM_BINS + 1) / BINS_PER_OCTAVE)
    cumulative = np.cumsum(counts.length_bins)
    filled = np.flatnonzero(counts.length_bins)
    return {
        "mean": tokens / documents,
        "shortest": counts.shortest,
        "longest": counts.longest,
        "longest_document": counts.longest_document,
        "quantiles": {
            f"{share:g}": round(float(edges[np.searchsorted(cumulative, share * documents)]))
            for share in QUANTILES
        },
        "longer_than": [
            {"tokens": limit, "documents": int(num_documents), "of_tokens": int(num_tokens)}
            for limit, num_documents, num_tokens in zip(LONGER_THAN, *counts.longer, strict=True)
        ],
        "histogram": [
            [round(float(edges[n]), 2), int(counts.length_bins[n]), int(counts.token_bins[n])]
            for n in range(filled[0], filled[-1] + 1)
        ],
    }


def _id_statistics(source: Source, counts: Counts, top: int) -> dict[str, Any]:
    ranked = np.argsort(-counts.ids, kind="stable")
    used = int((counts.ids > 0).sum())
    so_far = np.cumsum(counts.ids[ranked])
    return {
        "vocab_size": source.vocab_size,
        "unused": source.vocab_size - used,
        "eos_inside_documents": int(counts.ids[source.eos_id]) - source.num_documents,
        "most_frequent": [
            {"id": int(number), "times": int(counts.ids[number])} for number in ranked[:top]
        ],
        "half_of_tokens": int(np.searchsorted(so_far, source.num_tokens / 2)) + 1,
    }
