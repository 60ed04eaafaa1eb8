"""MinHash signatures cut into bands: documents with a band in common may be near-duplicates. Pure.

The similarity of two documents is the Jaccard index of their sets of shingles. A signature has one
number for each of some random orders of all shingles; two signatures agree in one place with a
probability that is the similarity (Broder, 1997). A band is some `rows` of them, and two documents
become a candidate pair when all rows of any band agree: with probability 1 - (1 - s^rows)^bands
(Leskovec, Rajaraman, Ullman, Mining of Massive Datasets, section 3.4).
"""

import math
from typing import NamedTuple

import numpy as np

from data_prep.words import mix
from zerolm.errors import ConfigError

SEED = 2026  # of the orders; signatures with another one cannot be compared
MAX_PERMUTATIONS = 128
MISSED_AT_THRESHOLD = 0.001  # of the pairs that are as similar as the threshold; fewer above it


class Bands(NamedTuple):
    """How a signature is cut."""

    bands: int
    rows: int

    def candidate_probability(self, similarity: float) -> float:
        """Return how probable it is that two documents have a band in common."""
        return 1 - (1 - similarity**self.rows) ** self.bands


def choose_bands(threshold: float, permutations: int = MAX_PERMUTATIONS) -> Bands:
    """Return the bands with most rows that find all but one in 1,000 pairs at the threshold.

    More rows give fewer candidates that are not similar, and need more permutations, which cost
    time and space. Candidates are verified, so that only what is missed here cannot be repaired.
    """
    best = None
    for rows in range(1, permutations + 1):
        missed = 1 - threshold**rows  # by one band
        bands = math.ceil(math.log(MISSED_AT_THRESHOLD) / math.log(missed)) if missed else 1
        if bands * rows > permutations:
            break
        best = Bands(bands, rows)
    return best or Bands(permutations, 1)


def band_hashes(shingles: np.ndarray, ends: np.ndarray, bands: Bands) -> np.ndarray:
    """Return the hash of each band of each document; of different bands they are different.

    Args:
        shingles: (S,) uint64, hashes of the shingles of all documents, in any order.
        ends: (D,) int64, where each document ends among them; none is without shingles.

    Returns:
        (D, bands) uint64.
    """
    count = bands.bands * bands.rows
    offsets = np.append(0, ends).astype(np.uint64)
    matrix = load_rensa().RMinHash.digest_matrix_from_flat_token_hashes(
        np.ascontiguousarray(shingles), offsets, count, SEED
    )
    digests = np.array(matrix.to_rows(), np.uint64).reshape(len(ends), bands.bands, bands.rows)
    numbers = mix(np.arange(1, count + bands.bands + 1, dtype=np.uint64))
    factors = numbers[:count].reshape(bands.bands, bands.rows) | np.uint64(1)
    return mix((digests * factors).sum(axis=2, dtype=np.uint64) + numbers[count:])


def load_rensa():
    """Import rensa, whose MinHash is the fastest we found (benchmarks/results/dedup.md).

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import rensa
    except ImportError as error:
        raise ConfigError(
            "dedup: near-duplicates need the package rensa, which is not installed. Run: "
            "pip install 'zerolm[dedup]', or give --near off."
        ) from error
    return rensa
