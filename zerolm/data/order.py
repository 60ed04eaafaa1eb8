"""The order of the training data, as arithmetic on the sequence number. Uses numpy only, no files.

Sequence number g (0, 1, 2, ... over the entire run) belongs to one window of one source, given by a
pure function of (seed, windows of each source, stages of weights, g). Nothing is stored and nothing
is drawn at random: a position in the data is one integer, seeking is free, and ranks, micro-batches
and loader workers cannot change the order, because each computes only the numbers that it needs.

    g  ->  stage, place in it         a stage starts at a sequence number and has weights; most runs
                                      have one stage
       ->  mixing block, slot         block, slot = divmod(place, block size of the stage); a block
                                      also ends where the next stage starts
       ->  source                     each source has a quota of the block's slots; the slots are
                                      permuted with a key of (seed, stage, block)
       ->  n: the source's n-th       its sequences in earlier stages and blocks, plus the rank of
           sequence                   this slot among its slots of the block
       ->  epoch, window              epoch, k = divmod(n, windows of the source); the windows of an
                                      epoch are permuted with a key of (seed, source, epoch)

Quotas are differences of rounded cumulative weights: floor(n W_s) with W_s = w_0 + ... + w_s, taken
at both ends of a block in exact integers, where n counts from the start of the stage. So at the end
of any block, each source has had its weight times n to within one sequence, however long the run
is; a fixed quota per block would drift. At the end of a stage it is within two: the last block may
be so short that a rounded difference is -1 (`counts_at_end`). The epochs of a source continue
across stages.

`zerolm.data.permutation` has the permutation. The order is part of the identity of a run: a change
in the golden values of tests/zerolm/data/test_order.py would make existing runs irreproducible.
docs/data_order.md is the user's guide; `zerolm.data.mixture` makes stages from the settings.
"""

import math
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from zerolm.common.errors import ConfigError
from zerolm.data.permutation import MASK_64, derive_key, domain_bits, permute

# Small, so that any usual global batch is a multiple of a block and has the weights of the run, and
# so that the epochs of a source overlap by no more than its part of one block.
BLOCK_SEQUENCES = 64
MAX_SEQUENCES = 1 << 62
MIN_SHARE = Fraction(1, 1 << 20)  # bounds the size of a mixing block, and so the cost of counts()

_SLOTS_KEY, _WINDOWS_KEY, _STAGE_KEY = 1, 2, 3  # purposes of keys


def num_windows(num_tokens: int, seq_len: int) -> int:
    """Return the number of windows of a source with `num_tokens` ids.

    A window is `seq_len` + 1 ids. The next window starts `seq_len` ids later, at the last id of
    this one, so each id except the first is a target exactly once. At most `seq_len` - 1 ids after
    the last full window are not used.
    """
    return max(0, (num_tokens - 1) // seq_len)


class Placement(NamedTuple):
    """Where sequences come from; (N,) int64 each."""

    source: np.ndarray
    window: np.ndarray
    epoch: np.ndarray


class Stage(NamedTuple):
    """The weights of the sources from a sequence number up to the next stage.

    Attributes:
        start: sequence number.
        weights: of each source, in any unit; 0: the source is not used.
    """

    start: int
    weights: tuple[float, ...]


class Order:
    """The order of the sequences of some sources, for one seed.

    Args:
        num_windows: windows of each source, at least 1.
        weights: share of the sequences of each source in the first stage, in any unit. Weights are
            taken exactly as the decimal numbers that they print as. 0 is for a source of later
            stages.
        seed: any integer; taken modulo 2^64.
        block: minimum number of sequences in a mixing block. It is doubled until each source has at
            least two sequences a block by weight, so that rounding leaves it at least one.
        stages: later stages, in ascending order of their start.

    Raises:
        ConfigError: a weight is not a positive number, or gives a source less than 2^-20 of the
            sequences; all are listed.
    """

    def __init__(
        self,
        num_windows: Sequence[int],
        weights: Sequence[float],
        seed: int,
        block: int = BLOCK_SEQUENCES,
        stages: Sequence[Stage] = (),
    ):
        assert all(0 < count < MAX_SEQUENCES for count in num_windows), "a source without windows"
        self.num_windows = np.array(num_windows, np.int64)
        self._bits = np.array([domain_bits(int(count)) for count in num_windows], np.uint64)
        seed_key = derive_key(np.uint64(0), np.uint64(seed & MASK_64))
        windows_key = derive_key(seed_key, np.uint64(_WINDOWS_KEY))
        self._source_keys = derive_key(windows_key, np.arange(len(weights), dtype=np.uint64))
        all_stages = [Stage(0, tuple(weights)), *stages]
        self.starts = np.array([stage.start for stage in all_stages], np.int64)
        assert (np.diff(self.starts) > 0).all(), "stages ascend"
        self._mixers: list[_StageMixer] = []
        before = np.zeros(len(num_windows), np.int64)
        for number, stage in enumerate(all_stages):
            assert len(num_windows) == len(stage.weights) > 0, "one weight a source"
            if number == 0:
                key = derive_key(seed_key, np.uint64(_SLOTS_KEY))
            else:
                key = derive_key(seed_key, np.uint64(_STAGE_KEY))
                key = derive_key(key, np.uint64(stage.start))
            where = f"--data_stage at sequence {stage.start}" if number else "--data"
            shares = exact_shares(stage.weights, where, allow_zero=bool(stages))
            bounds = self.starts[number : number + 2].tolist()
            self._mixers.append(_StageMixer(shares, block, key, before, *bounds))
            before = self._mixers[-1].at_end
        self.block = self._mixers[0].block

    def __call__(self, sequence_ids: np.ndarray) -> Placement:
        """Return where sequences come from.

        Args:
            sequence_ids: (N,) int64 in [0, 2^62), in any order.
        """
        ids = np.asarray(sequence_ids, np.int64)
        assert ids.size == 0 or (ids.min() >= 0 and ids.max() < MAX_SEQUENCES), "sequence id"
        source, sample = self._mix(ids)
        size = self.num_windows[source]
        epoch, index = np.divmod(sample, size)
        key = derive_key(self._source_keys[source], epoch.astype(np.uint64))
        window = permute(index.astype(np.uint64), size.astype(np.uint64), self._bits[source], key)
        return Placement(source, window.astype(np.int64), epoch)

    def counts(self, num_sequences: int) -> np.ndarray:
        """Return how many of the first `num_sequences` sequences each source has, (S,) int64.

        Cheap at the end of a mixing block; inside one, it also places the block's first sequences.
        """
        mixer = self._mixers[self.stage_of(num_sequences)]
        blocks, rest = divmod(int(num_sequences) - mixer.start, mixer.block)
        before = mixer.counts_after(np.array([blocks]))[0]
        ids = np.arange(num_sequences - rest, num_sequences, dtype=np.int64)
        return before + np.bincount(self._mix(ids)[0], minlength=len(before))

    def stage_of(self, sequence_id: int) -> int:
        """Return the number of the stage that a sequence belongs to, from 0."""
        return int(np.searchsorted(self.starts, sequence_id, side="right")) - 1

    def _mix(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the source of each sequence, and its number among that source's sequences."""
        if len(self.num_windows) == 1:  # no mixing: ids [0, windows) are exactly one epoch
            return np.zeros_like(ids), ids
        if len(self._mixers) == 1:
            return self._mixers[0](ids)
        source, sample = np.empty_like(ids), np.empty_like(ids)
        stage = np.searchsorted(self.starts, ids, side="right") - 1
        for number in np.unique(stage):
            mine = stage == number
            source[mine], sample[mine] = self._mixers[number](ids[mine])
        return source, sample


class _StageMixer:
    """Assigns the sequences of one stage to the sources, in mixing blocks.

    Args:
        shares: exact share of each source; 0 for those that the stage does not use.
        block: minimum size of a mixing block.
        key: of the stage.
        before: sequences of each source in earlier stages, (S,) int64.
        start: sequence number at which the stage starts.
        stop: sequence number at which it ends; by default never.

    Attributes:
        at_end: sequences of each source up to the end of the stage, (S,) int64.
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
        # Cumulative weights as integers over one denominator; the last one equals it.
        self._denominator = math.lcm(*(share.denominator for share in shares))
        parts = [share.numerator * (self._denominator // share.denominator) for share in shares]
        self._cumulative = np.cumsum(np.array(parts, object))
        self._used = np.array([share > 0 for share in shares])
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
        blocks, row = np.unique(number, return_inverse=True)
        before, first = self._quotas(blocks)
        key = derive_key(self._key, blocks.astype(np.uint64))[row]
        in_last = number == self._last
        kind = in_last.astype(np.intp) if in_last.any() else 0  # one size for all is faster
        place = permute(slot.astype(np.uint64), self._sizes[kind], self._bits[kind], key)
        # The concatenated rows of `first` ascend, so one search finds every source. Of sources that
        # start at the same place, only the last one has a quota.
        edges = (first + np.arange(len(blocks))[:, None] * self.block).ravel()
        place = place.astype(np.int64)
        found = np.searchsorted(edges, row * self.block + place, side="right") - 1
        source = found - row * len(self._before)
        return source, before.ravel()[found] + place - first.ravel()[found]

    def counts_after(self, blocks: np.ndarray) -> np.ndarray:
        """Return the sequences of each source up to the end of some numbers of blocks, (B, S)."""
        # Arrays of Python integers, which are exact: the products soon exceed 64 bits.
        lengths = np.minimum(blocks.astype(object) * self.block, self._length)
        ends = lengths[:, None] * self._cumulative // self._denominator
        counts = self._before + np.diff(ends, axis=1, prepend=0).astype(np.int64)
        counts[blocks > self._last] = self.at_end
        return counts

    def _quotas(self, blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (sequences of each source before each block, first place of each source in it).

        (B, S) int64 each.
        """
        before = self.counts_after(blocks)
        quotas = self.counts_after(blocks + 1) - before
        complete = blocks != self._last
        assert (quotas[complete][:, self._used] > 0).all(), "a source is starved"
        return before, np.cumsum(quotas, axis=1) - quotas


def counts_at_end(
    shares: Sequence[Fraction], length: int, block: int = BLOCK_SEQUENCES
) -> list[int]:
    """Return the sequences of each source in a complete stage.

    The floors of `length` times the cumulative shares, unless the last, short block would so have
    fewer sequences of a source than none. Such a source keeps what it has had, and the sources
    furthest above their share have one less.

    Args:
        length: of the stage, in sequences.
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
    """Return differences of the floors of `length` times the cumulative shares."""
    ends = [int(length * level) for level in accumulate(shares)]
    return [end - begin for begin, end in zip([0, *ends], ends, strict=False)]


def block_size(shares: Sequence[Fraction], block: int = BLOCK_SEQUENCES) -> int:
    """Return the sequences of a mixing block for some shares: see `Order`."""
    while block * min(share for share in shares if share) < 2:
        block *= 2
    return block


def exact_shares(
    weights: Sequence[float], where: str = "--data", *, allow_zero: bool
) -> list[Fraction]:
    """Return weights as exact shares of 1.

    Args:
        where: the flag of the weights, for messages.
        allow_zero: accept 0, for all but one.

    Raises:
        ConfigError: see `Order`.
    """
    problems = []
    for number, weight in enumerate(weights):
        if not (math.isfinite(weight) and (weight > 0 or (allow_zero and weight == 0))):
            problems.append(
                f"{where}: weight {weight} of source {number} is not a number above 0. "
                f"Correct it, or leave the source out."
            )
    if problems:
        raise ConfigError(problems)
    if not any(weights):
        raise ConfigError(f"{where}: every weight is 0. Give a source a weight.")
    # A float's shortest decimal form is what the user wrote: 0.7 means 7/10, not 0x1.666...p-1.
    exact = [Fraction(repr(float(weight))) for weight in weights]
    total = sum(exact)
    shares = [weight / total for weight in exact]
    problems = [
        f"{where}: weight {weights[number]} of source {number} gives it {float(share):.1e} of the "
        f"sequences; the minimum is 2^-20 (9.5e-07). Raise it, or leave the source out."
        for number, share in enumerate(shares)
        if 0 < share < MIN_SHARE
    ]
    if problems:
        raise ConfigError(problems)
    return shares
