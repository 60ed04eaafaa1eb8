"""Assigns the sequences of a blend to sources: exact shares, mixing blocks and their quotas. Pure.

`Order` explains the arithmetic. This determines the order of the data, which must never change.
"""

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import accumulate

import numpy as np

from zerolm.common.errors import ConfigError
from zerolm.data.permutation import derive_key, domain_bits, permute

# Small, so that any usual global batch is a multiple of a block and has the run's weights, and so
# that a source's epochs overlap by no more than its share of one block.
BLOCK_SEQUENCES = 64
MAX_SEQUENCES = 1 << 62
MIN_SHARE = Fraction(1, 1 << 20)  # limits the size of a block, and so the cost of `Order.counts`

# Of `StageMixer._bounds` with 64 bits: a remainder is below 2^63, the error of an estimate below 1.
MAX_DENOMINATOR, MAX_DISTANCE = 1 << 61, 1 << 31


class StageMixer:
    """Assigns a blend's sequences to sources, in mixing blocks.

    Args:
        shares: exact share of each source; 0 for sources that the blend does not use.
        block: minimum size of a mixing block.
        key: distinguishes blends in the permutation of slots.
        before: number of sequences from each source in earlier blends, (S,) int64.
        start: sequence number at which the blend starts.
        stop: sequence number at which the blend ends; by default it never ends.

    Attributes:
        at_end: number of sequences from each source up to the end of the blend, (S,) int64.
    """

    def __init__(
        self,
        shares: Sequence[Fraction],
        block: int,
        key: np.ndarray,
        before: np.ndarray,
        start: int,
        stop: int = MAX_SEQUENCES,
    ):
        self.start, self._before, self._key = start, before, key
        self.block = block_size(shares, block)
        self._length = stop - start if stop < MAX_SEQUENCES else 2 * MAX_SEQUENCES
        # Cumulative weights as integers over a common denominator, from 0 to the denominator.
        self._denominator = math.lcm(*(share.denominator for share in shares))
        parts = [share.numerator * (self._denominator // share.denominator) for share in shares]
        self._levels = np.array([0, *accumulate(parts)], object)
        in_block = self.block * self._levels
        self._block_quotients = (in_block // self._denominator).astype(np.int64)
        self._is_small = self._denominator <= MAX_DENOMINATOR
        rests = in_block % self._denominator
        self._block_rests = rests.astype(np.int64) if self._is_small else rests
        num_blocks = -(-self._length // self.block)
        self._last = num_blocks - 1
        last_size = self._length - self._last * self.block
        self._sizes = np.array([self.block, last_size], np.uint64)
        self._bits = np.array([domain_bits(self.block), domain_bits(last_size)], np.uint64)
        self.at_end = before
        if stop < MAX_SEQUENCES:
            self.at_end = before + np.array(counts_at_end(shares, self._length, block), np.int64)

    def __call__(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the source of each sequence, and its number among that source's sequences."""
        number, slot = np.divmod(ids - self.start, self.block)
        key = derive_key(self._key, number.astype(np.uint64))
        in_last = number == self._last
        has_last = bool(in_last.any())
        kind = in_last.astype(np.intp) if has_last else 0  # a single size for all is faster
        place = permute(slot.astype(np.uint64), self._sizes[kind], self._bits[kind], key)
        place = place.astype(np.int64)
        source, sample = self._find(number, place)
        if has_last:
            source[in_last], sample[in_last] = self._find_in_last(place[in_last])
        return source, sample

    def _find(self, number: np.ndarray, place: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Find the source and sample index for places in complete blocks, by bisection.

        The source is the last one that starts at or before a place, because among sources that
        start at the same place, only the last one has a quota.
        """
        bounds = self._bounds(number)
        num_sources = len(self._before)
        source, below, first = (np.zeros_like(place) for _ in range(3))
        for step in range((num_sources - 1).bit_length() - 1, -1, -1):
            candidate = np.minimum(source + (1 << step), num_sources - 1)
            candidate_below, candidate_first = bounds(candidate)
            later = candidate_first <= place
            source = np.where(later, candidate, source)
            below = np.where(later, candidate_below, below)
            first = np.where(later, candidate_first, first)
        before = self._before[source] + bounds(source + 1)[0] - below
        return source, before + place - first

    def _bounds(self, number: np.ndarray) -> Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]:
        """Return a function that computes the lower bounds of sources in the blocks `number`.

        The function maps sources to two bounds each, (N,) int64: the number of sequences from all
        lower-numbered sources before the block, and the place in the block where the source starts.
        Both are exact. They are computed in 64 bits relative to the first block if the denominator
        and the distances between blocks are small enough, and otherwise with Python integers.
        """
        base = int(number.min()) if number.size else 0
        distance = number - base
        if not self._is_small or (number.size and int(distance.max()) >= MAX_DISTANCE):
            lengths = number.astype(object) * self.block

            def in_large(source: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
                levels = self._levels[source]
                below = lengths * levels // self._denominator
                after = (lengths + self.block) * levels // self._denominator
                return below.astype(np.int64), (after - below).astype(np.int64)

            return in_large
        denominator, up_to_base = self._denominator, base * self.block * self._levels
        base_quotients = (up_to_base // denominator).astype(np.int64)
        base_rests = (up_to_base % denominator).astype(np.int64)
        base_parts, block_parts = base_rests / denominator, self._block_rests / denominator

        def in_small(source: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            # floor((rest of the base + distance * rest of a block) / denominator): an estimate that
            # is off by at most one, and is corrected by its remainder.
            block_rest = self._block_rests[source]
            estimate = (base_parts[source] + distance * block_parts[source]).astype(np.int64)
            remainder = base_rests[source] + distance * block_rest - estimate * denominator
            off = (remainder >= denominator).astype(np.int64) - (remainder < 0)
            remainder -= off * denominator
            block_quotient = self._block_quotients[source]
            below = base_quotients[source] + distance * block_quotient + estimate + off
            return below, block_quotient + (remainder + block_rest >= denominator)

        return in_small

    def _find_in_last(self, place: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Like `_find`, but for places in the last block, whose quotas add up to `at_end`."""
        before = self.counts_after(np.array([self._last]))[0]
        quotas = self.at_end - before
        first = np.cumsum(quotas) - quotas
        source = np.searchsorted(first, place, side="right") - 1
        return source, before[source] + place - first[source]

    def counts_after(self, blocks: np.ndarray) -> np.ndarray:
        """Count the sequences from each source before the start of each given block: (B, S)."""
        # Uses arrays of Python integers, since the products soon exceed 64 bits.
        lengths = np.minimum(blocks.astype(object) * self.block, self._length)
        ends = lengths[:, None] * self._levels // self._denominator
        counts = self._before + np.diff(ends, axis=1).astype(np.int64)
        counts[blocks > self._last] = self.at_end
        return counts


def counts_at_end(
    shares: Sequence[Fraction], length: int, block: int = BLOCK_SEQUENCES
) -> list[int]:
    """Return the number of sequences from each source in a complete blend.

    These are the differences of floor(`length` * cumulative share). If a source would get a
    negative number of sequences in the last, shorter block, it gets none there, and the sources
    furthest above their share get one fewer.

    Args:
        length: number of sequences in the blend.
        block: minimum size of a mixing block, as in `Order`.
    """
    block = block_size(shares, block)
    before = _floors(shares, (length - 1) // block * block if length else 0)
    counts = [max(pair) for pair in zip(before, _floors(shares, length), strict=True)]
    while sum(counts) > length:
        above = {
            number: counts[number] - length * share
            for number, share in enumerate(shares)
            if counts[number] > before[number]
        }
        counts[max(above, key=above.__getitem__)] -= 1
    return counts


def _floors(shares: Sequence[Fraction], length: int) -> list[int]:
    """Return the differences of floor(`length` * cumulative share)."""
    ends = [int(length * level) for level in accumulate(shares)]
    return [end - begin for begin, end in zip([0, *ends], ends, strict=False)]


def block_size(shares: Sequence[Fraction], block: int = BLOCK_SEQUENCES) -> int:
    """Return the size of a mixing block for these shares, see `Order`."""
    while block * min(share for share in shares if share) < 2:
        block *= 2
    return block


def exact_shares(
    weights: Sequence[float], where: str = "--data", *, allow_zero: bool
) -> list[Fraction]:
    """Normalize weights to exact shares that add up to 1.

    Args:
        where: the flag that sets the weights, for messages.
        allow_zero: whether to accept 0, unless all weights are 0.

    Raises:
        ConfigError: a weight is invalid.
    """
    problems = []
    for number, weight in enumerate(weights):
        if not (math.isfinite(weight) and (weight > 0 or (allow_zero and weight == 0))):
            problems.append(
                f"{where}: weight {weight} of source {number} is not a number above 0. Correct it, "
                "or remove the source."
            )
    if problems:
        raise ConfigError(problems)
    if not any(weights):
        raise ConfigError(f"{where}: every weight is 0. Give at least one source a weight.")
    # The shortest decimal form of a float is the number that the user wrote: 0.7 means 7/10, not
    # 0x1.666...p-1.
    exact = [Fraction(repr(float(weight))) for weight in weights]
    total = sum(exact)
    shares = [weight / total for weight in exact]
    problems = [
        f"{where}: weight {weights[number]} of source {number} gives it {float(share):.1e} of the "
        "sequences; the minimum is 2^-20 (9.5e-07). Raise it, or remove the source."
        for number, share in enumerate(shares)
        if 0 < share < MIN_SHARE
    ]
    if problems:
        raise ConfigError(problems)
    return shares
