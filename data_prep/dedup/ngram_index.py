"""Which documents hold a run of words of an evaluation item: an index, and looking in it.

All hashes of the items' runs are in memory, sorted, and what they find is compared word by word, so
that no document is lost to two runs with one hash.
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

from data_prep.evaluation_items import Item
from data_prep.words import hash_runs, hash_words, split_words
from zerolm.files import write_atomically

MAX_FILTER_BITS = 26  # of the hash, for the table that most words of a document end at


class Match(NamedTuple):
    """A document that holds a part of an item."""

    document: int  # number in the batch
    item: str  # place of the item
    words: str  # the first run found
    at_word: int  # where it is, in words from the start of the document
    overlap: float  # part of the runs of the item's text that are in the document


@dataclass
class Runs:
    """All runs of one length: sorted by hash."""

    length: int
    hashes: np.ndarray  # (N,) uint64
    texts: np.ndarray  # (N,) uint32, number of the text
    starts: np.ndarray  # (N,) uint32, first word in it
    filter: np.ndarray = field(init=False, repr=False)  # (2^bits,) bool, by the hash's high bits

    def __post_init__(self) -> None:
        bits = min(MAX_FILTER_BITS, max(8, (16 * len(self.hashes)).bit_length()))
        self.shift = np.uint64(64 - bits)
        self.filter = np.zeros(1 << bits, bool)
        self.filter[self.hashes >> self.shift] = True

    def find(self, hashes: np.ndarray) -> np.ndarray:
        """Return the places of those hashes that are among the runs."""
        places = np.flatnonzero(self.filter[hashes >> self.shift])
        found = np.searchsorted(self.hashes, hashes[places])
        found[found == len(self.hashes)] = 0
        return places[self.hashes[found] == hashes[places]]


class Index:
    """What to look for.

    Args:
        texts: of all items.
        places: of each text, its item.
        runs: for each length that occurs, longest first.
        num_short: texts of fewer words than are looked for.
    """

    def __init__(self, texts: list[str], places: list[str], runs: list[Runs], num_short: int):
        self.texts, self.places, self.runs, self.num_short = texts, places, runs, num_short

    def find(self, documents: Sequence[str], min_overlap: float) -> list[Match]:
        """Return a match for each document that holds enough of an item's text.

        Args:
            min_overlap: the part of the text's different runs that has to be in the document; one
                run is always needed.
        """
        words, ends = hash_words(documents)
        matches: dict[int, Match] = {}
        for runs in self.runs:
            hashes, run_ends = hash_runs(words, ends, runs.length)
            found = runs.find(hashes)
            owners = np.searchsorted(run_ends, found, side="right")
            for document in np.unique(owners).tolist():
                if document in matches:
                    continue
                mine = found[owners == document]
                first = run_ends[document - 1] if document else 0
                match = self._check(
                    runs, documents[document], hashes[mine], mine - first, min_overlap
                )
                if match is not None:
                    matches[document] = match._replace(document=document)
        return [matches[document] for document in sorted(matches)]

    def _check(
        self, runs: Runs, document: str, hashes: np.ndarray, at: np.ndarray, min_overlap: float
    ) -> Match | None:
        """Compare words, text by text, those with most hashes in common first."""
        hashes, places = np.unique(hashes, return_index=True)
        first_at = dict(zip(hashes.tolist(), at[places].tolist(), strict=True))
        low = np.searchsorted(runs.hashes, hashes)
        high = np.searchsorted(runs.hashes, hashes, side="right")
        entries = np.concatenate([np.arange(*limits) for limits in zip(low, high, strict=True)])
        texts, counts = np.unique(runs.texts[entries], return_counts=True)
        words = split_words(document)
        for text in texts[np.argsort(-counts, kind="stable")].tolist():
            own = split_words(self.texts[text])
            num_runs = len(
                {tuple(own[s : s + runs.length]) for s in range(len(own) - runs.length + 1)}
            )
            equal = []
            for entry in entries[runs.texts[entries] == text].tolist():
                start, place = int(runs.starts[entry]), first_at[int(runs.hashes[entry])]
                run = own[start : start + runs.length]
                if words[place : place + runs.length] == run:
                    equal.append((place, run))
            if equal and len(equal) >= math.ceil(min_overlap * num_runs):
                place, run = min(equal)
                return Match(0, self.places[text], " ".join(run), place, len(equal) / num_runs)
        return None

    def save(self, path: Path) -> None:
        """Write it to one file."""
        names = json.dumps([self.texts, self.places, self.num_short]).encode()
        arrays: dict[str, Any] = {"names": np.frombuffer(names, np.uint8)}
        for runs in self.runs:
            arrays |= {f"{runs.length}-hashes": runs.hashes, f"{runs.length}-texts": runs.texts}
            arrays[f"{runs.length}-starts"] = runs.starts
        buffer = io.BytesIO()
        np.savez(buffer, **arrays)
        write_atomically(path, lambda file: file.write(buffer.getbuffer()))


def build_index(items: Sequence[Item], length: int, min_words: int) -> Index:
    """Return the index of all runs of `length` words, and of shorter texts as a whole.

    Args:
        min_words: shorter texts are not looked for.
    """
    pairs = [(text, item.place) for item in items for text in item.texts]
    texts, places = [text for text, _ in pairs], [place for _, place in pairs]
    words, ends = hash_words(texts)
    counts = np.diff(ends, prepend=0)
    found = []
    for size in [length, *range(length - 1, max(min_words, 1) - 1, -1)]:
        chosen = np.flatnonzero(counts >= length if size == length else counts == size)
        if not len(chosen):
            continue
        kept = np.repeat(np.isin(np.arange(len(texts)), chosen), counts)
        hashes, run_ends = hash_runs(words[kept], np.cumsum(counts[chosen]), size)
        run_counts = np.diff(run_ends, prepend=0)
        owners = np.repeat(chosen, run_counts)
        starts = np.arange(len(hashes)) - np.repeat(run_ends - run_counts, run_counts)
        # A run that a text has twice counts once. lexsort is stable: the first of them stays.
        order = np.lexsort((owners, hashes))
        hashes, owners, starts = hashes[order], owners[order], starts[order]
        new = np.append(True, (hashes[1:] != hashes[:-1]) | (owners[1:] != owners[:-1]))
        found.append(
            Runs(size, hashes[new], owners[new].astype(np.uint32), starts[new].astype(np.uint32))
        )
    return Index(texts, places, found, int((counts < min(min_words, length)).sum()))


@lru_cache(maxsize=1)
def load_index(path: Path) -> Index:
    """Read an index, once in a process."""
    with np.load(path) as arrays:
        texts, places, num_short = json.loads(arrays["names"].tobytes())
        lengths = sorted(
            (int(name[:-7]) for name in arrays if name.endswith("-hashes")), reverse=True
        )
        runs = [
            Runs(n, arrays[f"{n}-hashes"], arrays[f"{n}-texts"], arrays[f"{n}-starts"])
            for n in lengths
        ]
    return Index(texts, places, runs, num_short)
