"""The order of the training data: arithmetic on the sequence number. Knows numpy, but no files.

Sequence number g (0, 1, 2, ... over the whole run) belongs to one window of one source, and which
one is a pure function of (seed, windows of each source, stages of weights, g). Nothing is stored,
nothing is drawn: a position in the data is one integer, seeking costs nothing, and ranks,
micro-batches and loader workers cannot change the order, since each just asks for the numbers that
it needs.

    g  ->  stage and place in it      a stage begins at a sequence number and has weights; most
                                      runs have one
       ->  mixing block and slot      block, slot = divmod(place, block size of the stage); where
                                      the next stage begins inside a block, the block ends there
       ->  source                     the slots of a block are dealt to the sources by quota and
                                      permuted, with a key of (seed, stage, block)
       ->  n: the source's n-th       samples of earlier stages and blocks + the place among the
                                      source's own
       ->  epoch, window              epoch, k = divmod(n, windows of the source); the epoch's
                                      windows are permuted, with a key of (seed, source, epoch)

Quotas are differences of rounded cumulative weights, floor(n W_s) with W_s = w_0 + ... + w_s taken
at both ends of a block, in exact integers, n counted from the start of the stage: at the end of any
block, and so of any stage, each source has had its weight times n to within one sequence, however
far the run is. A fixed quota per block would drift. A source's epochs go on through the stages.

zerolm/permutation.py permutes. The order is part of what a run is: tests/zerolm/test_order.py has
golden values, and any change of this file that changes one would make runs irreproducible.
docs/data_order.md is for users; zerolm/mixture.py makes stages of what they ask for.
"""

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from zerolm.errors import ConfigError
from zerolm.permutation import MASK_64, derive_key, domain_bits, permute

# Small, so that a global batch of any usual size is a whole number of blocks and has the weights
# of the run, and so that a source's epochs overlap by no more than its part of one block.
BLOCK_SEQUENCES = 64
MAX_SEQUENCES = 1 << 62
MIN_SHARE = Fraction(1, 1 << 20)  # keeps a mixing block, and so the cost of counts(), bounded

_DEAL_SLOTS, _SHUFFLE_WINDOWS, _DEAL_STAGE = 1, 2, 3  # what a key is for


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


class Stage(NamedTuple):
    """Weights from a sequence number on, up to the next stage."""

    start: int
    weights: tuple[float, ...]  # of each source, in any unit; 0: it gives nothing


class Order:
    """The order over some sources, for one seed.

    Args:
        num_windows: windows of each source, at least 1 each.
        weights: share of the sequences that each source gives, in any unit. They are taken as the
            decimal numbers that they print as, exactly. 0 is for a source of later stages.
        seed: any integer; equal modulo 2^64 is equal.
        block: least number of sequences in a mixing block. It is doubled until the weights give
            each source at least two sequences a block, so that rounding leaves it at least one.
        stages: with other weights from their `start` on, ascending and above 0.

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
        stages: Sequence[Stage] = (),
    ):
        assert all(0 < count < MAX_SEQUENCES for count in num_windows), "a source without windows"
        self.num_windows = np.array(num_windows, np.int64)
        self._bits = np.array([domain_bits(int(count)) for count in num_windows], np.uint64)
        seed_key = derive_key(np.uint64(0), np.uint64(seed & MASK_64))
        windows_key = derive_key(seed_key, np.uint64(_SHUFFLE_WINDOWS))
        self._source_keys = derive_key(windows_key, np.arange(len(weights), dtype=np.uint64))
        everything = [Stage(0, tuple(weights)), *stages]
        self.starts = np.array([stage.start for stage in everything], np.int64)
        assert (np.diff(self.starts) > 0).all(), "stages ascend"
        self._deals: list[_Deal] = []
        given = np.zeros(len(num_windows), np.int64)
        for number, stage in enumerate(everything):
            assert len(num_windows) == len(stage.weights) > 0, "one weight a source"
            if number == 0:
                key = derive_key(seed_key, np.uint64(_DEAL_SLOTS))
            else:
                key = derive_key(seed_key, np.uint64(_DEAL_STAGE))
                key = derive_key(key, np.uint64(stage.start))
            where = f"--data_stage at sequence {stage.start}" if number else "--data"
            shares = exact_shares(stage.weights, where, may_rest=bool(stages))
            deal = _Deal(shares, block, key, given, *self.starts[number : number + 2].tolist())
            self._deals.append(deal)
            given = deal.at_end
        self.block = self._deals[0].block

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
        key = derive_key(self._source_keys[source], epoch.astype(np.uint64))
        window = permute(index.astype(np.uint64), size.astype(np.uint64), self._bits[source], key)
        return Placement(source, window.astype(np.int64), epoch)

    def counts(self, num_sequences: int) -> np.ndarray:
        """Return how many of the first `num_sequences` sequences each source gives, (S,) int64.

        Costs nothing at the end of a mixing block, inside one a look at its first sequences.
        """
        deal = self._deals[self.stage_of(num_sequences)]
        blocks, rest = divmod(int(num_sequences) - deal.start, deal.block)
        before = deal.given(np.array([blocks]))[0]
        ids = np.arange(num_sequences - rest, num_sequences, dtype=np.int64)
        return before + np.bincount(self._deal(ids)[0], minlength=len(before))

    def stage_of(self, sequence_id: int) -> int:
        """Return the number of the stage that a sequence belongs to, from 0."""
        return int(np.searchsorted(self.starts, sequence_id, side="right")) - 1

    def _deal(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the source of each sequence and its number among that source's samples."""
        if len(self.num_windows) == 1:  # without dealing, ids [0, windows) are exactly one epoch
            return np.zeros_like(ids), ids
        if len(self._deals) == 1:
            return self._deals[0](ids)
        source, sample = np.empty_like(ids), np.empty_like(ids)
        stage = np.searchsorted(self.starts, ids, side="right") - 1
        for number in np.unique(stage):
            mine = stage == number
            source[mine], sample[mine] = self._deals[number](ids[mine])
        return source, sample


class _Deal:
    """How one stage deals its sequences to the sources, in mixing blocks.

    Args:
        shares: of each source, exactly; 0 for those that rest.
        before: samples that each source gave in earlier stages, (S,) int64.
        start, stop: sequence numbers of the stage; no `stop`: it has no end.
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
        self._active = np.array([share > 0 for share in shares])
        num_blocks = -(-self._length // self.block)
        self._last = num_blocks - 1
        last_size = self._length - self._last * self.block
        self._sizes = np.array([self.block, last_size], np.uint64)
        self._bits = np.array([domain_bits(self.block), domain_bits(last_size)], np.uint64)
        self.at_end = self.given(np.array([num_blocks]))[0] if stop < MAX_SEQUENCES else before

    def __call__(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the source of each sequence of this stage, and its number among its samples."""
        number, slot = np.divmod(ids - self.start, self.block)
        blocks, row = np.unique(number, return_inverse=True)
        given, first = self._quotas(blocks)
        key = derive_key(self._key, blocks.astype(np.uint64))[row]
        ends_here = number == self._last
        kind = ends_here.astype(np.intp) if ends_here.any() else 0  # one size for all is faster
        place = permute(slot.astype(np.uint64), self._sizes[kind], self._bits[kind], key)
        # The rows of `first`, laid end to end, ascend; so one search finds every source. Of sources
        # that begin at one place, only the last has anything there.
        edges = (first + np.arange(len(blocks))[:, None] * self.block).ravel()
        place = place.astype(np.int64)
        found = np.searchsorted(edges, row * self.block + place, side="right") - 1
        source = found - row * len(self._before)
        return source, given.ravel()[found] + place - first.ravel()[found]

    def given(self, blocks: np.ndarray) -> np.ndarray:
        """Return each source's samples up to the end of so many blocks of the stage, (B, S)."""
        # Arrays of Python integers, which are exact: the products exceed 64 bits early.
        lengths = np.minimum(blocks.astype(object) * self.block, self._length)
        ends = lengths[:, None] * self._cumulative // self._denominator
        return self._before + np.diff(ends, axis=1, prepend=0).astype(np.int64)

    def _quotas(self, blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (B, S) int64 twice: samples given before each block, and each source's first
        place in the block."""
        given = self.given(blocks)
        quotas = self.given(blocks + 1) - given
        whole = blocks != self._last
        assert (quotas[whole][:, self._active] > 0).all(), "a source is starved"
        return given, np.cumsum(quotas, axis=1) - quotas


def block_size(shares: Sequence[Fraction], block: int = BLOCK_SEQUENCES) -> int:
    """Return the sequences of a mixing block of these shares: see `Order`."""
    while block * min(share for share in shares if share) < 2:
        block *= 2
    return block


def exact_shares(
    weights: Sequence[float], where: str = "--data", *, may_rest: bool = False
) -> list[Fraction]:
    """Return weights as exact shares of 1.

    Args:
        where: they were given, for messages.
        may_rest: 0 is allowed, for all but one.

    Raises:
        ConfigError: see `Order`.
    """
    problems = []
    for number, weight in enumerate(weights):
        if not (math.isfinite(weight) and (weight > 0 or (may_rest and weight == 0))):
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
        f"sequences; the least is 2^-20 (9.5e-07). Raise it, or leave the source out."
        for number, share in enumerate(shares)
        if 0 < share < MIN_SHARE
    ]
    if problems:
        raise ConfigError(problems)
    return shares
