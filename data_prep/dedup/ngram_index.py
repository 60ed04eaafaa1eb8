"""`NgramIndex`: an index of the n-grams in evaluation items, which searches documents for them.

All n-gram hashes are held in memory, sorted. Each hash match is verified word by word, so hash
collisions never drop a document.
"""

import io
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from data_prep.dedup.evaluation_items import Item
from data_prep.dedup.word_hashes import hash_ngrams, hash_words, split_words
from zerolm.common.files import write_atomically

MAX_FILTER_BITS = 26  # hash bits that index the filter, which rejects most of a document's n-grams


class Match(NamedTuple):
    """A contaminated document. The fields are also the keys in notes on dropped documents."""

    document: int  # index in the batch
    item: str  # the item's file, and its line or paragraph
    words: str  # the first n-gram found
    at_word: int  # index of the n-gram's first word in the document
    overlap: float  # fraction of the item text's n-grams that the document contains


@dataclass
class NgramTable:
    """All n-grams of one length, sorted by hash."""

    length: int  # in words
    hashes: np.ndarray  # (N,) uint64
    texts: np.ndarray  # (N,) uint32, index of the text that contains the n-gram
    starts: np.ndarray  # (N,) uint32, index of the n-gram's first word in its text
    filter: np.ndarray = field(init=False, repr=False)  # (2^bits,) bool, indexed by high bits

    def __post_init__(self) -> None:
        bits = min(MAX_FILTER_BITS, max(8, (16 * len(self.hashes)).bit_length()))
        self.shift = np.uint64(64 - bits)
        self.filter = np.zeros(1 << bits, bool)
        self.filter[self.hashes >> self.shift] = True

    def find(self, hashes: np.ndarray) -> np.ndarray:
        """Return the indices of those hashes that occur in the table."""
        places = np.flatnonzero(self.filter[hashes >> self.shift])
        entries = np.searchsorted(self.hashes, hashes[places])
        entries[entries == len(self.hashes)] = 0
        return places[self.hashes[entries] == hashes[places]]


class NgramIndex:
    """The n-grams of all items.

    Args:
        places: file, and line or paragraph, from which each text was read.
        tables: one table per n-gram length, longest first.
        num_short: number of texts that are too short to search for.
    """

    def __init__(
        self, texts: list[str], places: list[str], tables: list[NgramTable], num_short: int
    ):
        self.texts, self.places, self.tables, self.num_short = texts, places, tables, num_short

    def find(self, documents: Sequence[str], min_overlap: float) -> list[Match]:
        """Return one match for each document that contains enough of any item's text.

        Args:
            min_overlap: fraction of a text's distinct n-grams that a document must contain to match
                it; at least one n-gram is always required.
        """
        words, ends = hash_words(documents)
        matches: dict[int, Match] = {}
        for table in self.tables:
            hashes, ngram_ends = hash_ngrams(words, ends, table.length)
            hits = table.find(hashes)
            owners = np.searchsorted(ngram_ends, hits, side="right")
            for document in np.unique(owners).tolist():
                if document in matches:
                    continue
                own_hits = hits[owners == document]
                first = ngram_ends[document - 1] if document else 0
                match = self._verify(
                    table, documents[document], hashes[own_hits], own_hits - first, min_overlap
                )
                if match is not None:
                    matches[document] = match._replace(document=document)
        return [matches[document] for document in sorted(matches)]

    def _verify(
        self,
        table: NgramTable,
        document: str,
        hashes: np.ndarray,
        at_words: np.ndarray,
        min_overlap: float,
    ) -> Match | None:
        """Compare a document's words with the texts that share hashes with the document, most
        hashes first. Return the first match, or None if no text matches.
        """
        hashes, places = np.unique(hashes, return_index=True)
        first_at = dict(zip(hashes.tolist(), at_words[places].tolist(), strict=True))
        low = np.searchsorted(table.hashes, hashes)
        high = np.searchsorted(table.hashes, hashes, side="right")
        entries = np.concatenate([np.arange(*limits) for limits in zip(low, high, strict=True)])
        texts, counts = np.unique(table.texts[entries], return_counts=True)
        words = split_words(document)
        for text in texts[np.argsort(-counts, kind="stable")].tolist():
            text_words = split_words(self.texts[text])
            starts = range(len(text_words) - table.length + 1)
            num_ngrams = len({tuple(text_words[at : at + table.length]) for at in starts})
            equal = []
            for entry in entries[table.texts[entries] == text].tolist():
                start, place = int(table.starts[entry]), first_at[int(table.hashes[entry])]
                ngram = text_words[start : start + table.length]
                if words[place : place + table.length] == ngram:
                    equal.append((place, ngram))
            if equal and len(equal) >= math.ceil(min_overlap * num_ngrams):
                place, ngram = min(equal)
                overlap = len(equal) / num_ngrams
                return Match(0, self.places[text], " ".join(ngram), place, overlap)
        return None

    def save(self, path: Path) -> None:
        """Write the index to one file."""
        names = json.dumps([self.texts, self.places, self.num_short]).encode()
        arrays: dict[str, Any] = {"names": np.frombuffer(names, np.uint8)}
        for table in self.tables:
            arrays[f"{table.length}-hashes"] = table.hashes
            arrays[f"{table.length}-texts"] = table.texts
            arrays[f"{table.length}-starts"] = table.starts
        buffer = io.BytesIO()
        np.savez(buffer, **arrays)
        write_atomically(path, buffer.getbuffer())


def build_index(items: Sequence[Item], length: int, min_words: int) -> NgramIndex:
    """Build an index of all n-grams of `length` words; shorter texts are indexed as one n-gram.

    Args:
        min_words: texts with fewer words are not searched for.
    """
    pairs = [(text, item.place) for item in items for text in item.texts]
    texts, places = [text for text, _ in pairs], [place for _, place in pairs]
    words, ends = hash_words(texts)
    counts = np.diff(ends, prepend=0)
    tables = []
    for size in [length, *range(length - 1, max(min_words, 1) - 1, -1)]:
        chosen = np.flatnonzero(counts >= length if size == length else counts == size)
        if not len(chosen):
            continue
        kept = np.repeat(np.isin(np.arange(len(texts)), chosen), counts)
        hashes, ngram_ends = hash_ngrams(words[kept], np.cumsum(counts[chosen]), size)
        ngram_counts = np.diff(ngram_ends, prepend=0)
        owners = np.repeat(chosen, ngram_counts)
        starts = np.arange(len(hashes)) - np.repeat(ngram_ends - ngram_counts, ngram_counts)
        # An n-gram counts once per text. lexsort is stable, so the first occurrence is kept.
        order = np.lexsort((owners, hashes))
        hashes, owners, starts = hashes[order], owners[order], starts[order]
        new = np.append(True, (hashes[1:] != hashes[:-1]) | (owners[1:] != owners[:-1]))
        owners, starts = owners[new].astype(np.uint32), starts[new].astype(np.uint32)
        tables.append(NgramTable(size, hashes[new], owners, starts))
    return NgramIndex(texts, places, tables, int((counts < min(min_words, length)).sum()))


@lru_cache(maxsize=1)
def load_index(path: Path) -> NgramIndex:
    """Read an index from a file; the index is cached, so each process reads it once."""
    with np.load(path) as arrays:
        texts, places, num_short = json.loads(arrays["names"].tobytes())
        lengths = sorted(
            (int(name[:-7]) for name in arrays if name.endswith("-hashes")), reverse=True
        )
        tables = [
            NgramTable(n, arrays[f"{n}-hashes"], arrays[f"{n}-texts"], arrays[f"{n}-starts"])
            for n in lengths
        ]
    return NgramIndex(texts, places, tables, num_short)
