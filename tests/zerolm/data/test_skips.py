from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from zerolm.order import Order
from zerolm.skipped import counts, merged, sequence_ids, sequence_range

WINDOWS = st.lists(
    st.tuples(st.integers(0, 200), st.integers(1, 40)).map(lambda pair: (pair[0], sum(pair))),
    max_size=6,
)


def plainly(windows, size: int) -> list[int]:
    left_out = {number for start, end in windows for number in range(start, end)}
    return [number for number in range(size) if number not in left_out]


@given(WINDOWS)
def test_positions_are_the_sequences_that_are_left_in_order(windows) -> None:
    left = plainly(windows, 600)
    ids = sequence_ids(np.arange(len(left)), merged(windows))
    assert ids.tolist() == left


@given(WINDOWS)
def test_merged_windows_are_apart_and_leave_out_the_same(windows) -> None:
    joined = merged(windows)
    assert all(first[1] < second[0] for first, second in pairwise(joined))
    assert plainly(joined, 600) == plainly(windows, 600)


@given(WINDOWS, st.integers(0, 300))
def test_counts_are_those_of_the_sequences_that_were_consumed(windows, position) -> None:
    order = Order([50, 31], [0.7, 0.3], seed=5)
    seen = order(sequence_ids(np.arange(position), merged(windows))).source
    expected = np.bincount(seen, minlength=2)
    assert counts(order, position, merged(windows)).tolist() == expected.tolist()


def test_a_window_behind_a_position_leaves_it_as_it_is() -> None:
    assert sequence_ids(np.arange(8), [[8, 16]]).tolist() == list(range(8))
    assert sequence_range(0, 8, [[8, 16]]) == (0, 8)
    assert sequence_range(0, 9, [[8, 16]]) == (0, 17)
