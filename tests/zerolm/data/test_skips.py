from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from zerolm.data.order import Order
from zerolm.data.skips import (
    merge_ranges,
    sequence_ids,
    sequence_range,
    source_counts,
    used_sequences_end,
)

RANGES = st.lists(
    st.tuples(st.integers(0, 200), st.integers(1, 40)).map(lambda pair: (pair[0], sum(pair))),
    max_size=6,
)


def plainly(ranges, size: int) -> list[int]:
    skipped = {number for start, end in ranges for number in range(start, end)}
    return [number for number in range(size) if number not in skipped]


@given(RANGES)
@settings(deadline=None)
def test_positions_number_the_sequences_that_are_not_skipped(ranges) -> None:
    left = plainly(ranges, 600)
    ids = sequence_ids(np.arange(len(left)), merge_ranges(ranges))
    assert ids.tolist() == left


@given(RANGES)
@settings(deadline=None)
def test_merged_ranges_are_disjoint_and_skip_the_same(ranges) -> None:
    joined = merge_ranges(ranges)
    assert all(first[1] < second[0] for first, second in pairwise(joined))
    assert plainly(joined, 600) == plainly(ranges, 600)


@given(RANGES, st.integers(0, 300))
@settings(deadline=None)
def test_counts_are_those_of_the_consumed_sequences(ranges, position) -> None:
    order = Order([50, 31], [0.7, 0.3], seed=5)
    seen = order(sequence_ids(np.arange(position), merge_ranges(ranges))).source
    expected = np.bincount(seen, minlength=2)
    assert source_counts(order, position, merge_ranges(ranges)).tolist() == expected.tolist()


def test_a_range_after_a_position_does_not_change_it() -> None:
    assert sequence_ids(np.arange(8), [[8, 16]]).tolist() == list(range(8))
    assert sequence_range(0, 8, [[8, 16]]) == (0, 8)
    assert sequence_range(0, 9, [[8, 16]]) == (0, 17)


@given(RANGES, st.integers(0, 300))
@settings(deadline=None)
def test_the_used_sequences_end_behind_what_was_consumed_or_skipped(ranges, position) -> None:
    used = plainly(ranges, 600)[:position] + [end - 1 for _, end in ranges]
    assert used_sequences_end(position, merge_ranges(ranges)) == max(used, default=-1) + 1
