"""Which documents may be duplicates: signatures of all of them, sorted, and compared by ranges.

`SignatureTask` reads a unit of documents. `ExactTask` and `BucketTask` take a range of all hashes,
so that what they hold is bounded by how many ranges there are, however many documents.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data_prep.dedup_files import (
    BAND,
    COPY,
    EXACT,
    PAIR,
    array_path,
    read_partition,
    record_of,
    save,
    structured,
)
from data_prep.minhash import Bands, band_hashes
from data_prep.stage_documents import Documents, batches
from data_prep.words import hash_runs, hash_words

NEIGHBOURS = 8  # of a bucket's documents: each is compared with as many before it, and as many
# of the first ones. All pairs of up to 17; a bucket of 10,000 pages of one template costs no more
# than 160,000 comparisons.


@dataclass(frozen=True)
class SignatureTask:
    """Write the hashes of a unit's documents: of their texts, and of the bands of signatures.

    Args:
        exact: "text" to compare texts byte by byte, "words" to compare their words.
        bands: None to look for exact copies only.
    """

    documents: Documents
    directory: Path
    exact: str
    shingle_words: int
    bands: Bands | None

    def __call__(self, unit: int) -> dict:
        exact, bands = [np.empty((0, 2), np.uint64)], []
        num_documents = text_bytes = num_short = 0
        for rows in batches(self.documents.read(unit)):
            texts = [row.text for row in rows]
            words, ends = hash_words(texts)
            digests = self._digests(texts, words, ends)
            exact.append(digests)
            text_bytes += sum(len(text.encode()) for text in texts)
            if self.bands is not None:
                shingles, ends = hash_runs(words, ends, self.shingle_words)
                long = np.flatnonzero(np.diff(ends, prepend=0))
                num_short += len(rows) - len(long)
                if len(long):
                    hashes = band_hashes(shingles, ends[long], self.bands)
                    first_words = np.repeat(digests[long, 0], hashes.shape[1])
                    documents = np.repeat(long + num_documents, hashes.shape[1])
                    bands.append(structured(BAND, hashes.ravel(), first_words, documents))
            num_documents += len(rows)
        all_exact = np.concatenate(exact)
        entries = structured(EXACT, all_exact[:, 0], all_exact[:, 1], np.arange(num_documents))
        entries = entries[np.lexsort((entries["low"], entries["hash"]))]
        sizes = {array_path(self.directory, "exact", unit): entries}
        if self.bands is not None:
            found = np.concatenate(bands) if bands else np.empty(0, BAND)
            sizes[array_path(self.directory, "bands", unit)] = found[
                np.argsort(found["hash"], kind="stable")
            ]
        return record_of(
            self.directory,
            {path: save(path, array) for path, array in sizes.items()},
            documents_in=num_documents,
            text_bytes_in=text_bytes,
            short=num_short,
        )

    def _digests(self, texts: list[str], words: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """Return 128 bits of each document that are equal where texts, or their words, are."""
        if self.exact == "text":
            contents = [text.encode() for text in texts]
        else:
            contents = [part.tobytes() for part in np.split(words, ends[:-1])]
        digests = [hashlib.blake2b(content, digest_size=16).digest() for content in contents]
        return np.frombuffer(b"".join(digests), "<u8").reshape(-1, 2)


@dataclass(frozen=True)
class ExactTask:
    """Find the copies among the documents whose hashes are in one range; the first is the model."""

    directory: Path
    num_units: int
    num_partitions: int

    def __call__(self, partition: int) -> dict:
        paths = [array_path(self.directory, "exact", unit) for unit in range(self.num_units)]
        (high, low), ids = read_partition(paths, partition, self.num_partitions)
        order = np.lexsort((ids, low, high))
        high, low, ids = high[order], low[order], ids[order]
        same = np.zeros(len(ids), bool)
        same[1:] = (high[1:] == high[:-1]) & (low[1:] == low[:-1])
        first = ids[np.maximum.accumulate(np.where(same, 0, np.arange(len(ids))))]
        copies = structured(COPY, ids[same], first[same])
        copies = copies[np.argsort(copies["dropped"])]
        members = np.unique(np.concatenate([copies["dropped"], copies["kept"]]))
        copies_path = array_path(self.directory, "copies", partition)
        members_path = array_path(self.directory, "copies-members", partition)
        sizes = {copies_path: save(copies_path, copies), members_path: save(members_path, members)}
        return record_of(self.directory, sizes, copies=len(copies))


@dataclass(frozen=True)
class BucketTask:
    """Find the pairs of documents that have a band in common, for the bands in one range."""

    directory: Path
    num_units: int
    num_partitions: int

    def __call__(self, partition: int) -> dict:
        paths = [array_path(self.directory, "bands", unit) for unit in range(self.num_units)]
        (hashes, texts), ids = read_partition(paths, partition, self.num_partitions)
        pairs = candidate_pairs(hashes, texts, ids)
        members = np.unique(np.concatenate([pairs["one"], pairs["two"]]))
        pairs_path = array_path(self.directory, "pairs", partition)
        members_path = array_path(self.directory, "pairs-members", partition)
        sizes = {pairs_path: save(pairs_path, pairs), members_path: save(members_path, members)}
        return record_of(self.directory, sizes, pairs=len(pairs))


def candidate_pairs(hashes: np.ndarray, texts: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Return the different pairs of documents in a bucket, sorted: PAIR, `one` before `two`.

    A bucket is all documents with the same band. Of those with the same text only the first counts.

    Args:
        hashes, texts, ids: (N,) uint64, for each band of a document.
    """
    order = np.lexsort((ids, texts, hashes))
    hashes, texts, ids = hashes[order], texts[order], ids[order]
    first = np.ones(len(ids), bool)
    first[1:] = (hashes[1:] != hashes[:-1]) | (texts[1:] != texts[:-1])
    hashes, ids = hashes[first], ids[first]
    order = np.lexsort((ids, hashes))
    hashes, ids = hashes[order], ids[order]
    numbers = np.arange(len(ids))
    begins = np.ones(len(ids), bool)
    begins[1:] = hashes[1:] != hashes[:-1]
    start = np.maximum.accumulate(np.where(begins, numbers, 0))
    place = numbers - start
    found = np.empty(0, PAIR)
    for step in range(1, NEIGHBOURS + 1):
        later = np.flatnonzero(place >= step)
        found = _unite(found, ids[later - step], ids[later])
        hub = step - 1
        later = np.flatnonzero(place - hub > NEIGHBOURS)
        found = _unite(found, ids[start[later] + hub], ids[later])
    return found


def _unite(found: np.ndarray, ones: np.ndarray, twos: np.ndarray) -> np.ndarray:
    if not len(ones):
        return found
    both = np.concatenate([found, structured(PAIR, ones, twos)])
    both = both[np.lexsort((both["two"], both["one"]))]
    return both[np.append(True, both[1:] != both[:-1])]
