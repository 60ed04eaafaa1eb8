"""Shuffles documents on disk: each gets a pseudorandom key, and they are sorted by it.

The key depends on the seed and on the number of the document, so the order does not depend on
shards or memory. Ids are read once, in order, and appended to buckets of about `BUCKET_BYTES`, by
the high bits of the key. A bucket is then sorted in memory: about three times `BUCKET_BYTES`, or
three times a document that is longer. The buckets need as much disk space again as the output.
"""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np

from data_prep.shards.documents import Chosen, Documents, Selection, piece_bounds
from zerolm.data.permutation import MASK_64, derive_key

BUCKET_BYTES = 1 << 27
BIN_BITS = 16  # of the key: bins are grouped to buckets
ROW = np.dtype([("key", "<u8"), ("origin", "<u8"), ("length", "<i8")])


def shuffle_keys(seed: int, chosen: Chosen) -> np.ndarray:
    """Return the keys of the chosen documents, (M,) uint64, all different."""
    numbers = (chosen.numbers + chosen.first).astype(np.uint64)
    return derive_key(np.array([seed & MASK_64], np.uint64), numbers)


class Shuffle:
    """The order of chosen documents under a seed.

    Args:
        choose: yields the chosen documents, the same at each call.
        selection: its limits apply to the shuffled documents.
    """

    def __init__(
        self,
        choose: Callable[[], Iterable[Chosen]],
        selection: Selection,
        seed: int,
        dtype: np.dtype,
    ):
        self.choose, self.selection, self.seed, self.dtype = choose, selection, seed, dtype
        documents, tokens = np.zeros((2, 1 << BIN_BITS), np.int64)
        for chosen in choose():
            bins = _bins(shuffle_keys(seed, chosen))
            documents += np.bincount(bins, minlength=len(documents))
            tokens += np.bincount(bins, chosen.lengths, len(tokens)).astype(np.int64)
        # The first bin in which a limit is reached is the last one that is needed.
        needed = len(documents)
        for counts, limit in (
            (documents, selection.max_documents),
            (tokens, selection.max_tokens),
        ):
            if limit is not None:
                needed = min(needed, int(np.searchsorted(np.cumsum(counts), limit)) + 1)
        self.num_documents = int(documents[:needed].sum())
        self.num_tokens = int(tokens[:needed].sum())
        sizes = tokens[:needed] * dtype.itemsize
        self._bucket_of_bin = np.cumsum(sizes) // BUCKET_BYTES
        self._needed = needed

    def documents(self, scratch: Path, on_read: Callable[[int], object]) -> Iterator[Documents]:
        """Yield the documents in their new order.

        Args:
            scratch: an empty directory for the buckets.
            on_read: called with the number of ids that were read, while buckets are filled.
        """
        self._fill(scratch, on_read)
        documents = tokens = 0
        for bucket in np.unique(self._bucket_of_bin).tolist():
            path = scratch / f"{bucket}.rows"
            if not path.exists():
                continue
            rows = np.fromfile(path, ROW)
            ids = np.fromfile(path.with_suffix(".ids"), self.dtype)
            order = np.argsort(rows["key"])
            lengths = rows["length"][order]
            order = order[: self.selection.within_limits(lengths, documents, tokens)]
            unsorted = Documents(ids, np.cumsum(rows["length"]), rows["origin"])
            ends = np.cumsum(rows["length"][order])
            for first, last in piece_bounds(ends):
                yield unsorted.take(order[first:last])
            documents += len(order)
            tokens += int(ends[-1]) if len(ends) else 0
            path.unlink()
            path.with_suffix(".ids").unlink()

    def _fill(self, scratch: Path, on_read: Callable[[int], object]) -> None:
        """Append each document to its bucket."""
        for chosen in self.choose():
            keys = shuffle_keys(self.seed, chosen)
            needed = _bins(keys) < self._needed
            chosen = chosen._replace(numbers=chosen.numbers[needed])
            if not len(chosen.numbers):
                continue
            for piece in chosen.read(keys[needed]):
                assert piece.keys is not None
                buckets = self._bucket_of_bin[_bins(piece.keys)]
                lengths = np.diff(piece.ends, prepend=0)
                for bucket in np.unique(buckets).tolist():
                    numbers = np.flatnonzero(buckets == bucket)
                    rows = np.empty(len(numbers), ROW)
                    rows["key"], rows["length"] = piece.keys[numbers], lengths[numbers]
                    rows["origin"] = piece.origins[numbers]
                    _append(scratch / f"{bucket}.rows", rows)
                    _append(scratch / f"{bucket}.ids", piece.take(numbers).ids)
                on_read(len(piece.ids))


def _bins(keys: np.ndarray) -> np.ndarray:
    return (keys >> np.uint64(64 - BIN_BITS)).astype(np.int64)


def _append(path: Path, values: np.ndarray) -> None:
    with open(path, "ab") as file:
        file.write(np.ascontiguousarray(values).view(np.uint8).data)
