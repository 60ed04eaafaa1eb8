"""Ranges of the data order that a run skips after a rollback. Pure.

A range is a pair of sequence numbers, [start, end). A run's position counts the sequences that it
has consumed, excluding skipped ones, so the position remains one integer; `sequence_ids` maps
positions to sequence numbers. A range that is added later starts at or after the position to which
the run is rolled back, so earlier positions keep their meaning, for any number of ranks.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

SkippedRanges = Sequence[Sequence[int]]


def merge_ranges(ranges: Iterable[Sequence[int]]) -> list[list[int]]:
    """Return the ranges in ascending order, merging those that touch or overlap."""
    result: list[list[int]] = []
    for start, end in sorted((int(start), int(end)) for start, end in ranges):
        assert 0 <= start < end, "an empty range"
        if result and start <= result[-1][1]:
            result[-1][1] = max(result[-1][1], end)
        else:
            result.append([start, end])
    return result


def sequence_ids(positions: np.ndarray, skipped: SkippedRanges) -> np.ndarray:
    """Convert positions to sequence numbers, (...) int64.

    Args:
        positions: (...) int64.
        skipped: the result of `merge_ranges`.
    """
    if not len(skipped):
        return positions
    table = np.array(skipped, np.int64)
    lengths = np.cumsum(table[:, 1] - table[:, 0])
    # The positions at which the ranges start, not counting the sequences in earlier ranges.
    starts = table[:, 0] - np.concatenate([[0], lengths[:-1]])
    num_passed = np.searchsorted(starts, positions, side="right")
    return positions + np.concatenate([[0], lengths])[num_passed]


def sequence_range(start: int, end: int, skipped: SkippedRanges) -> tuple[int, int]:
    """Return the range of sequence numbers that the positions [start, end) span."""
    assert start < end, "an empty range"
    first, last = sequence_ids(np.array([start, end - 1], np.int64), skipped).tolist()
    return first, last + 1


def used_sequences_end(position: int, skipped: SkippedRanges) -> int:
    """Return one more than the highest sequence number that a run has consumed or skipped."""
    consumed = sequence_range(0, position, skipped)[1] if position else 0
    return max([consumed, *(end for _, end in skipped)])


def source_counts(order: Any, position: int, skipped: SkippedRanges) -> np.ndarray:
    """Count the sequences from each source that a run at `position` has consumed: (S,) int64."""
    end = position
    num_skipped = 0
    for start, stop in skipped:
        if start > end:
            break
        num_skipped = num_skipped + order.counts(stop) - order.counts(start)
        end += stop - start
    return order.counts(end) - num_skipped
