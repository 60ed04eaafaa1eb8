"""Tasks that find exact copies and candidate near-duplicates by sorting hashes.

`SignatureTask` hashes the documents of a unit. `ExactTask` and `BucketTask` each process one range
of hashes, so with enough ranges any number of documents fits in memory.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data_prep.dedup.arrays import (
    BAND,
    COPY,
    EXACT,
    PAIR,
    UNIT_BITS,
    Units,
    array_path,
    save_arrays,
    structured_array,
)
from data_prep.dedup.minhash import BandLayout, band_hashes
from data_prep.dedup.word_hashes import hash_ngrams, hash_words
from data_prep.stages.documents import Documents, batch_rows

# Each document in a bucket is compared with this many documents immediately before it, and with
# this many at the start of the bucket. In buckets of up to 17 documents, this covers all pairs; for
# 10,000 pages made from one template, it yields at most 160,000 pairs.
NEIGHBOURS = 8


@dataclass(frozen=True)
class SignatureTask:
    """Writes two kinds of hashes of a unit's documents: text hashes and signature band hashes.

    Args:
        exact: "text" to compare texts byte by byte, "words" to compare their words.
        layout: how signatures are divided into bands; None to find only exact copies.
    """

    documents: Documents
    directory: Path
    hashes: Path
    exact: str
    shingle_words: int
    layout: BandLayout | None

    def __call__(self, unit: int) -> dict:
        exact, bands = [np.empty((0, 2), np.uint64)], [np.empty(0, BAND)]
        num_documents = text_bytes = num_short = 0
        for rows in batch_rows(self.documents.read(unit)):
            texts = [row.text for row in rows]
            words, ends = hash_words(texts)
            digests = self._digests(texts, words, ends)
            exact.append(digests)
            text_bytes += sum(len(text.encode()) for text in texts)
            if self.layout is not None:
                shingles, shingle_ends = hash_ngrams(words, ends, self.shingle_words)
                long = np.flatnonzero(np.diff(shingle_ends, prepend=0))
                num_short += len(rows) - len(long)
                if len(long):
                    hashes = band_hashes(shingles, shingle_ends[long], self.layout)
                    text_hashes = np.repeat(digests[long, 0], self.layout.bands)
                    numbers = np.repeat(long + num_documents, self.layout.bands)
                    bands.append(structured_array(BAND, hashes.ravel(), text_hashes, numbers))
            num_documents += len(rows)
        all_exact = np.concatenate(exact)
        entries = structured_array(
            EXACT, all_exact[:, 0], all_exact[:, 1], np.arange(num_documents)
        )
        entries = entries[np.lexsort((entries["low"], entries["hash"]))]
        arrays = {array_path(self.hashes, "exact", unit): entries}
        if self.layout is not None:
            all_bands = np.concatenate(bands)
            order = np.argsort(all_bands["hash"], kind="stable")
            arrays[array_path(self.hashes, "bands", unit)] = all_bands[order]
        counts = {"documents_in": num_documents, "text_bytes_in": text_bytes, "short": num_short}
        return save_arrays(self.directory, arrays, **counts)

    def _digests(self, texts: list[str], words: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """Return a 128-bit hash of each document's text (or words), as (N, 2) uint64."""
        if self.exact == "text":
            contents = [text.encode() for text in texts]
        else:
            contents = [part.tobytes() for part in np.split(words, ends[:-1])]
        digests = [hashlib.blake2b(content, digest_size=16).digest() for content in contents]
        return np.frombuffer(b"".join(digests), "<u8").reshape(-1, 2)


@dataclass(frozen=True)
class ExactTask:
    """Finds new documents that are exact copies, among all documents whose hashes are in one range.

    Of the documents with the same text, the first is kept.
    """

    units: Units
    num_partitions: int

    def __call__(self, partition: int) -> dict:
        (high, low), ids = self.units.read_partition("exact", partition, self.num_partitions)
        order = np.lexsort((ids, low, high))
        high, low, ids = high[order], low[order], ids[order]
        is_copy = np.zeros(len(ids), bool)
        is_copy[1:] = (high[1:] == high[:-1]) & (low[1:] == low[:-1])
        first = ids[np.maximum.accumulate(np.where(is_copy, 0, np.arange(len(ids))))]
        is_copy &= ids >= self.units.num_old << UNIT_BITS
        copies = structured_array(COPY, ids[is_copy], first[is_copy])
        copies = copies[np.argsort(copies["dropped"])]
        members = np.unique(np.concatenate([copies["dropped"], copies["kept"]]))
        return _save_with_members(self.units.work, "copies", partition, copies, members)


@dataclass(frozen=True)
class BucketTask:
    """Finds pairs of documents that share a band, among the bands whose hashes are in one range.
    The later document of each pair is new.
    """

    units: Units
    num_partitions: int

    def __call__(self, partition: int) -> dict:
        (hashes, texts), ids = self.units.read_partition("bands", partition, self.num_partitions)
        pairs = candidate_pairs(hashes, texts, ids)
        pairs = pairs[pairs["two"] >= self.units.num_old << UNIT_BITS]
        members = np.unique(np.concatenate([pairs["one"], pairs["two"]]))
        return _save_with_members(self.units.work, "pairs", partition, pairs, members)


def _save_with_members(
    directory: Path, kind: str, partition: int, array: np.ndarray, members: np.ndarray
) -> dict:
    """Write an array of copies or pairs and the ids of its documents; return the task's record."""
    arrays = {kind: array, f"{kind}-members": members}
    files = {array_path(directory, name, partition): each for name, each in arrays.items()}
    return save_arrays(directory, files, **{kind: len(array)})


def candidate_pairs(hashes: np.ndarray, texts: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Return the pairs of documents in the same bucket: a sorted PAIR array without repetitions, in
    which `one` precedes `two` in input order.

    A bucket contains all documents that share a band, except copies of an earlier document in it.

    Args:
        hashes, texts, ids: hashes of bands, hashes of texts, and document ids; (N,) uint64 each.
    """
    order = np.lexsort((ids, texts, hashes))
    hashes, texts, ids = hashes[order], texts[order], ids[order]
    is_first = np.ones(len(ids), bool)
    is_first[1:] = (hashes[1:] != hashes[:-1]) | (texts[1:] != texts[:-1])
    hashes, ids = hashes[is_first], ids[is_first]
    order = np.lexsort((ids, hashes))
    hashes, ids = hashes[order], ids[order]
    begins = np.ones(len(ids), bool)
    begins[1:] = hashes[1:] != hashes[:-1]
    numbers = np.arange(len(ids))
    start = np.maximum.accumulate(np.where(begins, numbers, 0))  # index of the bucket's first row
    place = numbers - start  # position in the bucket
    pairs = np.empty(0, PAIR)
    for step in range(1, NEIGHBOURS + 1):
        later = np.flatnonzero(place >= step)
        pairs = _add_pairs(pairs, ids[later - step], ids[later])
        hub = step - 1  # one of the first documents in the bucket
        later = np.flatnonzero(place - hub > NEIGHBOURS)
        pairs = _add_pairs(pairs, ids[start[later] + hub], ids[later])
    return pairs


def _add_pairs(pairs: np.ndarray, ones: np.ndarray, twos: np.ndarray) -> np.ndarray:
    if not len(ones):
        return pairs
    both = np.concatenate([pairs, structured_array(PAIR, ones, twos)])
    both = both[np.lexsort((both["two"], both["one"]))]
    return both[np.append(True, both[1:] != both[:-1])]
