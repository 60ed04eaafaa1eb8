"""Figures of token shards: lengths of documents, frequencies of ids, repeated documents.

Shards are measured in pieces of whole documents, by processes that share nothing; memory is
bounded by the size of a piece and by `PARTITION_DOCUMENTS`, not by the data. Knows no command
line, and not how figures are shown.
"""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash

from data_prep.workers import ordered_map
from zerolm.shards import Source

PIECE_TOKENS = 1 << 22  # of one task: 8 or 16 MB of ids
PARTITION_DOCUMENTS = 1 << 22  # compared at once: 16 bytes each, sorted
BINS_AN_OCTAVE = 16  # of the histogram: quantiles are right to 4.4%
NUM_BINS = 48 * BINS_AN_OCTAVE
LONGER_THAN = (512, 1024, 2048, 4096, 8192, 16384, 32768, 131072)
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
SHOWN_REPEATS = 20


class Piece(NamedTuple):
    """Documents [first, last) of one shard."""

    source: int
    shard: int
    first: int
    last: int


@dataclass
class Counts:
    """What pieces of one source come to."""

    ids: np.ndarray  # (V,) int64: how often each id is there
    length_bins: np.ndarray  # (NUM_BINS,) int64: documents by log2 of their length
    token_bins: np.ndarray  # (NUM_BINS,) int64: their tokens
    longer: np.ndarray  # (2, len(LONGER_THAN)) int64: documents above a length, and their tokens
    shortest: int
    longest: int
    longest_document: int

    def add(self, other: "Counts") -> None:
        for name in ("ids", "length_bins", "token_bins", "longer"):
            getattr(self, name).__iadd__(getattr(other, name))
        self.shortest = min(self.shortest, other.shortest)
        if other.longest > self.longest:
            self.longest, self.longest_document = other.longest, other.longest_document


def measure(
    sources: Sequence[Source],
    num_workers: int,
    top: int,
    progress: Any,
) -> list[dict[str, Any]]:
    """Return the figures of each source, JSON-able.

    Args:
        top: how many of the most frequent ids to name.
        progress: `add` is called with tokens, documents.
    """
    totals: dict[int, Counts] = {}
    with tempfile.TemporaryDirectory(prefix="data_prep-stats-") as scratch:
        hashes = [_Hashes(Path(scratch), n, s.num_documents) for n, s in enumerate(sources)]
        found = ordered_map(partial(_measurer, list(sources)), _pieces(sources), num_workers)
        for piece, counts, prints, numbers in found:
            hashes[piece.source].add(prints, numbers)
            if piece.source in totals:
                totals[piece.source].add(counts)
            else:
                totals[piece.source] = counts
            progress.add(int(counts.ids.sum()), len(prints))
        return [
            _figures(source, totals[number], hashes[number].repeats(), top)
            for number, source in enumerate(sources)
        ]


def _pieces(sources: Sequence[Source]) -> Iterator[Piece]:
    for number, source in enumerate(sources):
        for shard in range(len(source.manifest["shards"])):
            ends = source.document_ends(shard).astype(np.int64)
            first = 0
            while first < len(ends):
                start = int(ends[first - 1]) if first else 0
                last = int(np.searchsorted(ends, start + PIECE_TOKENS, side="right"))
                last = max(last, first + 1)
                yield Piece(number, shard, first, last)
                first = last


def _measurer(sources: list[Source]) -> Callable[[Piece], tuple]:
    return partial(_measure_piece, sources)


def _measure_piece(
    sources: list[Source], piece: Piece
) -> tuple[Piece, Counts, np.ndarray, np.ndarray]:
    """Return the counts of a piece, and (D,) uint64 hashes and numbers of its documents."""
    source = sources[piece.source]
    ends = source.document_ends(piece.shard)[: piece.last].astype(np.int64)
    starts = np.concatenate([[0], ends[:-1]])[piece.first :]
    ends = ends[piece.first :]
    ids = source.ids(piece.shard, int(starts[0]), int(ends[-1]))
    lengths = ends - starts
    bins = np.minimum((np.log2(lengths) * BINS_AN_OCTAVE).astype(np.int64), NUM_BINS - 1)
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
    raw, size = memoryview(ids.tobytes()), ids.itemsize
    edges = ((ends - starts[0]) * size).tolist()
    prints = np.fromiter(
        (
            xxhash.xxh3_64_intdigest(raw[start:end])
            for start, end in zip([0, *edges], edges, strict=False)
        ),
        np.uint64,
        len(edges),
    )
    numbers = np.arange(before + piece.first, before + piece.last, dtype=np.uint64)
    return piece, counts, prints, numbers


class _Hashes:
    """Hashes of a source's documents, in files by their first bits, each small enough to sort."""

    def __init__(self, scratch: Path, source: int, num_documents: int):
        self.bits = max(0, (num_documents // PARTITION_DOCUMENTS).bit_length())
        self.paths = [scratch / f"{source}-{part}" for part in range(1 << self.bits)]

    def add(self, prints: np.ndarray, numbers: np.ndarray) -> None:
        pairs = np.stack([prints, numbers], axis=1)
        if not self.bits:
            parts = np.zeros(len(prints), np.int64)
        else:
            parts = (prints >> np.uint64(64 - self.bits)).astype(np.int64)
        for part in np.unique(parts):
            with open(self.paths[part], "ab") as file:
                pairs[parts == part].tofile(file)

    def repeats(self) -> dict[str, Any]:
        """Return how many documents are there again, and the most repeated ones."""
        again, groups, worst = 0, 0, []
        for path in self.paths:
            if not path.exists():
                continue
            pairs = np.fromfile(path, np.uint64).reshape(-1, 2)
            pairs = pairs[np.lexsort((pairs[:, 1], pairs[:, 0]))]
            starts = np.flatnonzero(np.concatenate([[True], np.diff(pairs[:, 0]) != 0]))
            sizes = np.diff(starts, append=len(pairs))
            again += int((sizes - 1).sum())
            groups += int((sizes > 1).sum())
            for index in np.argsort(-sizes, kind="stable")[:SHOWN_REPEATS]:
                if sizes[index] > 1:
                    worst.append((int(sizes[index]), int(pairs[starts[index], 1])))
        worst.sort(key=lambda pair: (-pair[0], pair[1]))
        shown = [{"times": times, "document": first} for times, first in worst[:SHOWN_REPEATS]]
        return {"again": again, "groups": groups, "most_repeated": shown}


def _figures(source: Source, counts: Counts, repeats: dict[str, Any], top: int) -> dict[str, Any]:
    manifest = source.manifest
    tokens, documents = source.num_tokens, source.num_documents
    ranked = np.argsort(-counts.ids, kind="stable")
    used = int((counts.ids > 0).sum())
    frequencies = counts.ids[ranked[:used]]
    edges = 2 ** (np.arange(NUM_BINS + 1) / BINS_AN_OCTAVE)
    cumulative = np.cumsum(counts.length_bins)
    quantiles = {
        f"{share:g}": round(float(edges[np.searchsorted(cumulative, share * documents)]))
        for share in QUANTILES
    }
    filled = np.flatnonzero(counts.length_bins)
    return {
        "shards": str(source.directory),
        "num_tokens": tokens,
        "num_documents": documents,
        "bytes_per_token": manifest["text_bytes"] / tokens if manifest.get("text_bytes") else None,
        "length": {
            "mean": tokens / documents,
            "shortest": counts.shortest,
            "longest": counts.longest,
            "longest_document": counts.longest_document,
            "quantiles": quantiles,
            "longer_than": [
                {"tokens": limit, "documents": int(many), "of_tokens": int(share)}
                for limit, many, share in zip(LONGER_THAN, *counts.longer, strict=True)
            ],
            "histogram": [
                [round(float(edges[n]), 2), int(counts.length_bins[n]), int(counts.token_bins[n])]
                for n in range(filled[0], filled[-1] + 1)
            ],
        },
        "ids": {
            "vocab_size": source.vocab_size,
            "unused": source.vocab_size - used,
            "eos_inside_documents": int(counts.ids[source.eos_id]) - documents,
            "most_frequent": [
                {"id": int(number), "times": int(counts.ids[number])} for number in ranked[:top]
            ],
            "half_of_tokens": int(np.searchsorted(np.cumsum(frequencies), tokens / 2)) + 1,
            "zipf_exponent": _zipf_exponent(frequencies),
            "by_rank": [[int(n) + 1, int(frequencies[n])] for n in _log_spaced(used)],
        },
        "duplicates": {**repeats, "share": repeats["again"] / documents},
    }


def _log_spaced(count: int) -> np.ndarray:
    return np.unique(np.geomspace(1, count, min(count, 200)).astype(np.int64)) - 1


def _zipf_exponent(frequencies: np.ndarray) -> float | None:
    """Return the slope of log frequency over log rank, down, from rank 10 to half of the ids.

    Ranks evenly spaced in their logarithm, so that the many rare ids do not decide it alone.
    """
    if len(frequencies) < 40:
        return None
    ranks = np.unique(np.geomspace(10, len(frequencies) // 2, 100).astype(np.int64))
    slope, _ = np.polyfit(np.log(ranks), np.log(frequencies[ranks - 1]), 1)
    return float(-slope)
