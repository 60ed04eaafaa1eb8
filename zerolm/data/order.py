"""The order of the training data, as arithmetic on the sequence number. Uses only numpy, no files.

Sequence number g (0, 1, 2, ... over the entire run) maps to one window of one source by a pure
function of (seed, number of windows in each source, blends, g). Nothing is stored and
nothing is drawn at random: a position in the data is one integer, seeking is free, and ranks,
micro-batches and loader workers cannot change the order, because each only evaluates the numbers
that it needs.

    g  ->  blend, place in it         a blend starts at a sequence number and has weights; most runs
                                      have one blend
       ->  mixing block, slot         block, slot = divmod(place, block size of the blend); a block
                                      also ends where the next blend starts
       ->  source                     each source has a quota of the block's slots; the slots are
                                      permuted with a key of (seed, blend, block)
       ->  n: the source's n-th       its sequences in earlier blends and blocks, plus the rank of
           sequence                   this slot among its slots of the block
       ->  epoch, window              epoch, k = divmod(n, windows of the source); the windows of an
                                      epoch are permuted with a key of (seed, source, epoch), or
                                      groups of consecutive windows, each read from first to last

Quotas are differences of rounded cumulative weights: floor(n W_s) with W_s = w_0 + ... + w_s, taken
at both ends of a block in exact integers, where n counts from the start of the blend. So at the end
of any block, each source has provided its weight times n, to within one sequence, however long the
run is; a fixed quota per block would drift. At the end of a blend, each source is within two
sequences, because the last block may be so short that a rounded difference is -1 (`counts_at_end`).
The epochs of a source continue across blends. If a branch has a longer `seq_len`, its blend starts
with the number of windows that were consumed before the blend. Groups of short windows are read in
the order of the long windows that they form, so the long windows that follow are exactly those not
yet read.

`zerolm.data.permutation` implements the permutation. The order is part of a run's identity: a
change to the golden values in tests/zerolm/data/test_order.py would make existing runs
irreproducible. docs/data_order.md is the user's guide; `zerolm.data.mixture` builds blends from the
settings.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from zerolm.data.permutation import MASK_64, derive_key, domain_bits, permute
from zerolm.data.quotas import BLOCK_SEQUENCES, MAX_SEQUENCES, StageMixer, exact_shares

_SLOTS_KEY, _WINDOWS_KEY, _BLEND_KEY = 1, 2, 3  # distinguish keys by purpose


def num_windows(num_tokens: int, seq_len: int) -> int:
    """Return the number of windows in a source of `num_tokens` ids.

    A window consists of `seq_len` + 1 ids. Each window starts at the last id of the previous one,
    so each id except the first is a target exactly once. Up to `seq_len` - 1 ids after the last
    full window are unused.
    """
    return max(0, (num_tokens - 1) // seq_len)


class Placement(NamedTuple):
    """The source, window and epoch of each sequence; (N,) int64 each."""

    source: np.ndarray
    window: np.ndarray
    epoch: np.ndarray


class Blend(NamedTuple):
    """The weights of the sources from a sequence number to the start of the next blend.

    Attributes:
        start: sequence number at which the blend starts.
        weights: one weight per source, in any unit; 0 if the source is not used.
        consumed: number of windows consumed from each source before the blend; None to continue
            from the previous blends.
    """

    start: int
    weights: tuple[float, ...]
    consumed: tuple[int, ...] | None = None


class Order:
    """The order of the sequences from all sources, for one seed.

    Args:
        num_windows: number of windows in each source, at least 1.
        weights: share of the sequences from each source in the first blend, in any unit. Weights
            are used as the exact decimal numbers that they print as. 0 is for sources that only
            later blends use.
        seed: any integer; used modulo 2^64.
        block: minimum number of sequences in a mixing block. It is doubled until each source's
            share is at least two sequences per block, so at least one remains after rounding.
        blends: later blends, in ascending order of start.
        group: number of consecutive windows of a source that are read one after another. Windows
            after the last complete group are unused.

    Raises:
        ConfigError: weights are not positive numbers, or give a source less than 2^-20 of the
            sequences; all problems are listed.
    """

    def __init__(
        self,
        num_windows: Sequence[int],
        weights: Sequence[float],
        seed: int,
        block: int = BLOCK_SEQUENCES,
        blends: Sequence[Blend] = (),
        group: int = 1,
    ):
        self._group, groups = group, [count // group for count in num_windows]
        assert all(0 < count < MAX_SEQUENCES for count in groups), "a source without windows"
        self.num_windows = np.array(groups, np.int64) * group
        self._bits = np.array([domain_bits(int(count)) for count in groups], np.uint64)
        seed_key = derive_key(np.uint64(0), np.uint64(seed & MASK_64))
        windows_key = derive_key(seed_key, np.uint64(_WINDOWS_KEY))
        self._source_keys = derive_key(windows_key, np.arange(len(weights), dtype=np.uint64))
        all_blends = [Blend(0, tuple(weights)), *blends]
        self.starts = np.array([blend.start for blend in all_blends], np.int64)
        assert (np.diff(self.starts) > 0).all(), "blends ascend"
        self._mixers: list[StageMixer] = []
        shifts = list[int]()  # for a single source: sequence index in it minus sequence number
        before = np.zeros(len(num_windows), np.int64)
        for number, blend in enumerate(all_blends):
            assert len(num_windows) == len(blend.weights) > 0, "one weight a source"
            if number == 0:
                key = derive_key(seed_key, np.uint64(_SLOTS_KEY))
            else:
                key = derive_key(seed_key, np.uint64(_BLEND_KEY))
                key = derive_key(key, np.uint64(blend.start))
            where = f"--data_stage at sequence {blend.start}" if number else "--data"
            shares = exact_shares(blend.weights, where, allow_zero=bool(blends))
            if blend.consumed is not None:
                before = np.array(blend.consumed, np.int64)
            bounds = self.starts[number : number + 2].tolist()
            self._mixers.append(StageMixer(shares, block, key, before, *bounds))
            shifts.append(int(before[0]) - blend.start)
            before = self._mixers[-1].at_end
        self._shifts = np.array(shifts, np.int64)
        self.block = self._mixers[0].block

    def __call__(self, sequence_ids: np.ndarray) -> Placement:
        """Return the source and window of each sequence.

        Args:
            sequence_ids: (N,) int64 in [0, 2^62), in any order.
        """
        ids = np.asarray(sequence_ids, np.int64)
        assert ids.size == 0 or (ids.min() >= 0 and ids.max() < MAX_SEQUENCES), "sequence id"
        source, sample = self._mix(ids)
        size = self.num_windows[source]
        epoch, index = np.divmod(sample, size)
        key = derive_key(self._source_keys[source], epoch.astype(np.uint64))
        place, in_group = np.divmod(index.astype(np.uint64), np.uint64(self._group))
        groups = (size // self._group).astype(np.uint64)
        window = permute(place, groups, self._bits[source], key).astype(np.int64)
        window = window * self._group + in_group.astype(np.int64)
        return Placement(source, window, epoch)

    def counts(self, num_sequences: int) -> np.ndarray:
        """Count how many of the first `num_sequences` sequences come from each source: (S,) int64.

        This is cheap at the end of a mixing block; inside a block, the block's first sequences must
        also be placed.
        """
        before, sources, _ = self._block_until(num_sequences)
        return before + np.bincount(sources, minlength=len(before))

    def ends(self, num_sequences: int) -> np.ndarray:
        """Return each source's number of windows up to and including the last one read: (S,) int64.

        Inside a mixing block this may exceed `counts`, because slots are permuted, so a source's
        windows are not read in their order.
        """
        ends, sources, samples = self._block_until(num_sequences)
        np.maximum.at(ends, sources, samples + 1)
        return ends

    def _block_until(self, num_sequences: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the counts at the start of the current block, and its sequences so far.

        The sequences are returned as the source of each, and its index among that source's
        sequences.
        """
        mixer = self._mixers[self.blend_of(num_sequences)]
        blocks, rest = divmod(int(num_sequences) - mixer.start, mixer.block)
        before = mixer.counts_after(np.array([blocks]))[0]
        ids = np.arange(num_sequences - rest, num_sequences, dtype=np.int64)
        return before, *self._mix(ids)

    def blend_of(self, sequence_id: int) -> int:
        """Return the index of the blend that contains a sequence number."""
        return int(np.searchsorted(self.starts, sequence_id, side="right")) - 1

    def _mix(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the source of each sequence, and its index among that source's sequences."""
        if len(self.num_windows) == 1:  # no mixing: sequences [0, windows) are exactly one epoch
            blend = np.searchsorted(self.starts, ids, side="right") - 1
            return np.zeros_like(ids), ids + self._shifts[blend]
        if len(self._mixers) == 1:
            return self._mixers[0](ids)
        source, sample = np.empty_like(ids), np.empty_like(ids)
        blend = np.searchsorted(self.starts, ids, side="right") - 1
        for number in np.unique(blend):
            mine = blend == number
            source[mine], sample[mine] = self._mixers[number](ids[mine])
        return source, sample
