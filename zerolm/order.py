"""The order of the training data: arithmetic on the sequence number. Knows numpy, but no files.

Sequence number g (0, 1, 2, ... over the whole run) belongs to one window of one source, and which
one is a pure function of (seed, windows of each source, weights, g). Nothing is stored, nothing is
drawn: a position in the data is one integer, seeking costs nothing, and ranks, micro-batches and
loader workers cannot change the order, since each just asks for the numbers that it needs.

    g  ->  mixing block and slot      block, slot = divmod(g, block size)
       ->  source                     the slots of a block are dealt to the sources by quota and
                                      permuted, with a key of (seed, block)
       ->  n: the source's n-th       samples of earlier blocks + the place among the source's own
       ->  epoch, window              epoch, k = divmod(n, windows of the source); the epoch's
                                      windows are permuted, with a key of (seed, source, epoch)

Quotas are differences of rounded cumulative weights, floor(n W_s) with W_s = w_0 + ... + w_s taken
at both ends of a block, in exact integers: at the end of any block, each source has had its weight
times n to within one sequence, however far the run is. A fixed quota per block would drift.

A permutation of [0, N) is a Feistel network on the smallest power of two, at least 64, that holds
N, whose rounds change the high and the low bits in turn; results outside of [0, N) are sent through
again ("cycle walking") until they fall inside, which keeps it a bijection.

The order is part of what a run is: tests/zerolm/test_order.py has golden values, and any change of
this file that changes one would make runs irreproducible. docs/data_order.md is for users.

Sources: Luby and Rackoff, "How to construct pseudorandom permutations from pseudorandom functions"
(1988), for the network; Black and Rogaway, "Ciphers with arbitrary finite domains" (2002), for
cycle walking; Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (2014), for
splitmix64, the round function.
"""

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from zerolm.errors import ConfigError

# Small, so that a global batch of any usual size is a whole number of blocks and has the weights
# of the run, and so that a source's epochs overlap by no more than its part of one block.
BLOCK_SEQUENCES = 64
MAX_SEQUENCES = 1 << 62
MIN_SHARE = Fraction(1, 1 << 20)  # keeps a mixing block, and so the cost of counts(), bounded
# Four rounds suffice in theory on large domains. On tiny ones places are uneven by 20% with fewer
# rounds or bits than these, and by less than what 100,000 keys can show with them, for every size.
NUM_ROUNDS = 6
MIN_DOMAIN_BITS = 6

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIER_1 = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = np.uint64(0x94D049BB133111EB)
_ROUND_CONSTANT = 0xD1B54A32D192ED03
_MASK_64 = (1 << 64) - 1
_DEAL_SLOTS, _SHUFFLE_WINDOWS = 1, 2  # what a key is for


def num_windows(num_tokens: int, seq_len: int) -> int:
    """Return how many windows a source of `num_tokens` ids has.

    A window is `seq_len` + 1 ids; the next one starts `seq_len` further, on the last id of this
    one, so that each id but the very first is a target exactly once. The up to `seq_len` - 1 ids
    after the last whole window are not used.
    """
    return max(0, (num_tokens - 1) // seq_len)


class Placement(NamedTuple):
    """Where sequences come from: (N,) int64 each."""

    source: np.ndarray
    window: np.ndarray
    epoch: np.ndarray


class Order:
    """The order over some sources, for one seed.

    Args:
        num_windows: windows of each source, at least 1 each.
        weights: share of the sequences that each source gives, in any unit. They are taken as the
            decimal numbers that they print as, exactly.
        seed: any integer; equal modulo 2^64 is equal.
        block: least number of sequences in a mixing block. It is doubled until the weights give
            each source at least two sequences a block, so that rounding leaves it at least one.

    Raises:
        ConfigError: a weight that is not a positive number, or gives a source less than 2^-20 of
            the sequences; every one is listed.
    """

    def __init__(
        self,
        num_windows: Sequence[int],
        weights: Sequence[float],
        seed: int,
        block: int = BLOCK_SEQUENCES,
    ):
        assert len(num_windows) == len(weights) > 0, "one weight a source, and at least one source"
        assert all(0 < count < MAX_SEQUENCES for count in num_windows), "a source without windows"
        shares = exact_shares(weights)
        self.num_windows = np.array(num_windows, np.int64)
        self.block = block
        while self.block * min(shares) < 2:
            self.block *= 2
        # Cumulative weights as integers over one denominator; the last one equals it.
        self._denominator = math.lcm(*(share.denominator for share in shares))
        parts = [share.numerator * (self._denominator // share.denominator) for share in shares]
        self._cumulative = np.cumsum(np.array(parts, object))
        self._bits = np.array([_domain_bits(int(count)) for count in num_windows], np.uint64)
        self._slot_bits = np.uint64(_domain_bits(self.block))
        seed_key = _key(np.uint64(0), np.uint64(seed & _MASK_64))
        self._slots_key = _key(seed_key, np.uint64(_DEAL_SLOTS))
        windows_key = _key(seed_key, np.uint64(_SHUFFLE_WINDOWS))
        self._source_keys = _key(windows_key, np.arange(len(shares), dtype=np.uint64))

    def __call__(self, sequence_ids: np.ndarray) -> Placement:
        """Place sequences.

        Args:
            sequence_ids: (N,) int64 in [0, 2^62), in any order.
        """
        ids = np.asarray(sequence_ids, np.int64)
        assert ids.size == 0 or (ids.min() >= 0 and ids.max() < MAX_SEQUENCES), "sequence id"
        source, sample = self._deal(ids)
        size = self.num_windows[source]
        epoch, index = np.divmod(sample, size)
        key = _key(self._source_keys[source], epoch.astype(np.uint64))
        window = permute(index.astype(np.uint64), size.astype(np.uint64), self._bits[source], key)
        return Placement(source, window.astype(np.int64), epoch)

    def counts(self, num_sequences: int) -> np.ndarray:
        """Return how many of the first `num_sequences` sequences each source gives, (S,) int64.

        Costs nothing at the end of a mixing block, inside one a look at its first sequences.
        """
        number, rest = divmod(int(num_sequences), self.block)
        before = self._given(np.array([number]))[0]
        ids = np.arange(num_sequences - rest, num_sequences, dtype=np.int64)
        return before + np.bincount(self._deal(ids)[0], minlength=len(before))

    def _deal(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the source of each sequence and its number among that source's samples."""
        num_sources = len(self.num_windows)
        if num_sources == 1:  # without dealing, sequence ids [0, windows) are exactly one epoch
            return np.zeros_like(ids), ids
        number, slot = np.divmod(ids, self.block)
        blocks, row = np.unique(number, return_inverse=True)
        given, first = self._quotas(blocks)
        key = _key(self._slots_key, blocks.astype(np.uint64))[row]
        place = permute(slot.astype(np.uint64), np.uint64(self.block), self._slot_bits, key)
        # The rows of `first`, laid end to end, ascend; so one search finds every source.
        edges = (first + np.arange(len(blocks))[:, None] * self.block).ravel()
        place = place.astype(np.int64)
        found = np.searchsorted(edges, row * self.block + place, side="right") - 1
        return found - row * num_sources, given.ravel()[found] + place - first.ravel()[found]

    def _quotas(self, blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (B, S) int64 twice: samples given before each block, and each source's first
        place in the block."""
        given = self._given(blocks)
        quotas = self._given(blocks + 1) - given
        assert (quotas > 0).all(), "a source is starved"
        return given, np.cumsum(quotas, axis=1) - quotas

    def _given(self, blocks: np.ndarray) -> np.ndarray:
        """Return each source's samples in the first so many blocks, (B, S) int64."""
        # Arrays of Python integers, which are exact: the products exceed 64 bits early.
        ends = (blocks.astype(object) * self.block)[:, None] * self._cumulative // self._denominator
        return np.diff(ends, axis=1, prepend=0).astype(np.int64)


def exact_shares(weights: Sequence[float]) -> list[Fraction]:
    """Return weights as exact shares of 1.

    Raises:
        ConfigError: see `Order`.
    """
    problems = []
    for number, weight in enumerate(weights):
        if not (math.isfinite(weight) and weight > 0):
            problems.append(
                f"--data: weight {weight} of source {number} is not a number above 0. "
                f"Correct it, or leave the source out."
            )
    if problems:
        raise ConfigError(problems)
    # A float's shortest decimal form is what the user wrote: 0.7 means 7/10, not 0x1.666...p-1.
    exact = [Fraction(repr(float(weight))) for weight in weights]
    total = sum(exact)
    shares = [weight / total for weight in exact]
    problems = [
        f"--data: weight {weights[number]} of source {number} gives it {float(share):.1e} of the "
        f"sequences; the least is 2^-20 (9.5e-07). Raise it, or leave the source out."
        for number, share in enumerate(shares)
        if share < MIN_SHARE
    ]
    if problems:
        raise ConfigError(problems)
    return shares


def permute(index: np.ndarray, size: np.ndarray, bits: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Permute indices: for each (size, key) a bijection of [0, size).

    Args:
        index: (N,) uint64, below `size`.
        size: uint64, (N,) or one for all.
        bits: uint64, likewise: those of the network's domain, see `_domain_bits`.
        key: (N,) uint64.

    Returns:
        (N,) uint64.
    """
    low_bits = bits >> np.uint64(1)
    low_mask = (np.uint64(1) << low_bits) - np.uint64(1)
    high_mask = (np.uint64(1) << (bits - low_bits)) - np.uint64(1)
    result = _feistel(index, low_bits, low_mask, high_mask, key)
    outside = np.flatnonzero(result >= size)
    if not outside.size:
        return result
    size, low_bits, low_mask, high_mask, key = np.broadcast_arrays(
        size, low_bits, low_mask, high_mask, key
    )
    while outside.size:  # cycle walking: at most half of the values go on, if size is above 32
        walked = _feistel(
            result[outside],
            low_bits[outside],
            low_mask[outside],
            high_mask[outside],
            key[outside],
        )
        result[outside] = walked
        outside = outside[walked >= size[outside]]
    return result


def _feistel(
    values: np.ndarray,
    low_bits: np.ndarray,
    low_mask: np.ndarray,
    high_mask: np.ndarray,
    key: np.ndarray,
) -> np.ndarray:
    low, high = values & low_mask, values >> low_bits
    for number in range(NUM_ROUNDS):
        round_key = key + np.uint64(number * _ROUND_CONSTANT & _MASK_64)
        if number % 2 == 0:
            high ^= _mix(low ^ round_key) & high_mask
        else:
            low ^= _mix(high ^ round_key) & low_mask
    return (high << low_bits) | low


def _mix(values: np.ndarray) -> np.ndarray:
    """The next output of splitmix64 from each state, (N,) uint64, modulo 2^64."""
    mixed = np.atleast_1d(values) + _GOLDEN  # arrays wrap around in silence, scalars would warn
    mixed ^= mixed >> np.uint64(30)
    mixed *= _MULTIPLIER_1
    mixed ^= mixed >> np.uint64(27)
    mixed *= _MULTIPLIER_2
    mixed ^= mixed >> np.uint64(31)
    return mixed


def _key(key: np.ndarray, part: np.ndarray) -> np.ndarray:
    """Derive a key from a key and a number; the two are broadcast. (N,) uint64."""
    return _mix(key ^ _mix(part))


def _domain_bits(size: int) -> int:
    return max(MIN_DOMAIN_BITS, (size - 1).bit_length()) if size > 1 else 0
