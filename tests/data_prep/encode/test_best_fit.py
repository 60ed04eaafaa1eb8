"""Best-fit packing against a direct implementation that searches all rows for each document."""

import numpy as np
import pytest

from data_prep.encode.best_fit import cut_documents, fill_rows, order_rows


def one_by_one(lengths, capacity):
    """Best fit decreasing by its definition: check every open row for every document.

    Rows of equal room are taken in the order in which they came to have it.
    """
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    rooms, since, where = [], [], [0] * len(lengths)
    for now, index in enumerate(order):
        length = lengths[index]
        fitting = [row for row, room in enumerate(rooms) if room >= length]
        if fitting:
            row = min(fitting, key=lambda row: (rooms[row], since[row]))
        else:
            row = len(rooms)
            rooms.append(capacity)
            since.append(now)
        rooms[row] -= length
        since[row] = now
        where[index] = row
    return where, rooms


@pytest.mark.parametrize("seed", range(30))
def test_rows_equal_those_of_placing_one_by_one(seed):
    generator = np.random.default_rng(seed)
    capacity = int(generator.integers(1, 60))
    high = capacity + 1 if seed % 3 else max(2, capacity // 3)
    lengths = generator.integers(1, high, int(generator.integers(1, 400)))
    rows, num_rows = fill_rows(lengths, capacity)
    _, rooms = one_by_one(lengths.tolist(), capacity)
    assert num_rows == len(rooms)
    left = capacity - np.bincount(rows, weights=lengths, minlength=num_rows)
    assert sorted(left.astype(int)) == sorted(rooms), "the same rows are as full"
    assert left.min() >= 0


@pytest.mark.parametrize("seed", range(10))
def test_rows_hold_the_same_lengths_as_placing_one_by_one(seed):
    generator = np.random.default_rng(100 + seed)
    lengths = generator.integers(1, 40, 300)
    rows, num_rows = fill_rows(lengths, 39)
    where, rooms = one_by_one(lengths.tolist(), 39)

    def content(assigned, count):
        return sorted(sorted(lengths[np.asarray(assigned) == row].tolist()) for row in range(count))

    assert content(rows, num_rows) == content(where, len(rooms))


@pytest.mark.parametrize("seq_len", [1, 2, 7, 16])
def test_cutting_makes_every_id_except_the_first_a_target_once(seq_len):
    lengths = np.array([1, 2, seq_len, seq_len + 1, seq_len + 2, 5 * seq_len + 3, 1])
    ends = np.cumsum(lengths)
    starts, pieces = cut_documents(ends, seq_len)
    assert (np.diff(starts) > 0).all() and pieces.max() <= seq_len + 1
    targets = np.concatenate(
        [np.arange(start + 1, start + length) for start, length in zip(starts, pieces, strict=True)]
    )
    firsts = ends - lengths
    assert targets.tolist() == sorted(set(range(ends[-1])) - set(firsts.tolist()))
    whole = [length for length in lengths if length <= seq_len + 1]
    assert sum(piece == seq_len + 1 for piece in pieces) >= len(pieces) - len(lengths)
    assert len(whole) <= len(pieces)


def test_rows_are_ordered_by_their_longest_pieces():
    lengths = np.array([3, 9, 4, 6, 10, 9])
    starts = np.cumsum(lengths) - lengths
    rows, num_rows = fill_rows(lengths, 10)
    order, ends = order_rows(starts, rows, lengths)
    grouped = np.split(order, ends[:-1])
    assert num_rows == len(grouped) and sorted(order) == list(range(6))
    leads = [max(row, key=lambda index: (lengths[index], -starts[index])) for row in grouped]
    assert leads == sorted(leads), "rows by the place of their longest piece"
    assert all((np.diff(starts[row]) > 0).all() for row in grouped), "pieces by their place"
