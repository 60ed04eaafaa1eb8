"""MinHash signatures divided into bands: documents with a common band may be near-duplicates.

The similarity of two documents is the Jaccard index of their sets of shingles. A signature
contains the minimum of the shingles under each of several random permutations; two signatures
agree at each position with a probability equal to the similarity (Broder, 1997). A band consists
of `rows` positions. Two documents are a candidate pair if they agree in all rows of any band,
which has probability 1 - (1 - s^rows)^bands at similarity s (Leskovec, Rajaraman, Ullman, Mining
of Massive Datasets, section 3.4).
"""

import math
from typing import Any, NamedTuple

import numpy as np

from data_prep.dedup.word_hashes import mix
from zerolm.common.errors import ConfigError

SEED = 2026  # seed of the permutations; signatures with different seeds cannot be compared
MAX_PERMUTATIONS = 128
MISSED_AT_THRESHOLD = 0.001  # allowed for pairs whose similarity equals the threshold


class BandLayout(NamedTuple):
    """The number of bands in a signature, and the number of rows in each band."""

    bands: int
    rows: int


def choose_bands(threshold: float, permutations: int = MAX_PERMUTATIONS) -> BandLayout:
    """Return the layout with the most rows per band that misses at most 1 in 1,000 pairs whose
    similarity equals the threshold.

    More rows give fewer false candidates, but need more permutations, which cost time and space.
    Candidates are verified later, but a pair that is missed here is never found.
    """
    best = None
    for rows in range(1, permutations + 1):
        missed_by_band = 1 - threshold**rows
        bands = 1
        if missed_by_band:
            bands = math.ceil(math.log(MISSED_AT_THRESHOLD) / math.log(missed_by_band))
        if bands * rows > permutations:
            break
        best = BandLayout(bands, rows)
    return best or BandLayout(permutations, 1)


def band_hashes(shingles: np.ndarray, ends: np.ndarray, layout: BandLayout) -> np.ndarray:
    """Hash each band of each document, so that equal values in different bands hash differently.

    Args:
        shingles: hashes of all documents' shingles, (S,) uint64.
        ends: index at which each document's shingles end, (D,) int64; every document has at least
            one shingle.

    Returns:
        (D, bands) uint64.
    """
    count = layout.bands * layout.rows
    offsets = np.append(0, ends).astype(np.uint64)
    matrix = load_rensa().RMinHash.digest_matrix_from_flat_token_hashes(
        np.ascontiguousarray(shingles), offsets, count, SEED
    )
    digests = np.array(matrix.to_rows(), np.uint64).reshape(len(ends), layout.bands, layout.rows)
    numbers = mix(np.arange(1, count + layout.bands + 1, dtype=np.uint64))
    factors = numbers[:count].reshape(layout.bands, layout.rows) | np.uint64(1)
    return mix((digests * factors).sum(axis=2, dtype=np.uint64) + numbers[count:])


def load_rensa() -> Any:
    """Import rensa, the fastest MinHash library that we measured (benchmarks/results/dedup.md)."""
    try:
        import rensa
    except ImportError as error:
        raise ConfigError(
            "dedup: near-duplicates need the package rensa, which is not installed. Run: "
            "bash launch/setup.sh dedup, or give --near off."
        ) from error
    return rensa
