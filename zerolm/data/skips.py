"""Windows of the data order that a run leaves out, after a rollback. Pure.

A window is a pair of sequence numbers, [start, end). A run's position counts the sequences that it
consumed, without those left out, and stays one integer: `sequence_ids` says which sequences of the
order stand at which positions. A window that is added later lies at or behind the position that the
run is rolled back to, so positions before it keep their meaning, on any number of ranks.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

Windows = Sequence[Sequence[int]]


def merged(windows: Iterable[Sequence[int]]) -> list[list[int]]:
    """Return the windows ascending, those that touch or overlap as one."""
    result: list[list[int]] = []
    for start, end in sorted((int(start), int(end)) for start, end in windows):
        assert 0 <= start < end, "an empty window"
        if result and start <= result[-1][1]:
            result[-1][1] = max(result[-1][1], end)
        else:
            result.append([start, end])
    return result


def sequence_ids(positions: np.ndarray, windows: Windows) -> np.ndarray:
    """Return the sequence number at each position, (...) int64.

    Args:
        windows: as `merged` returns them.
    """
    if not len(windows):
        return positions
    table = np.array(windows, np.int64)
    lengths = np.cumsum(table[:, 1] - table[:, 0])
    # Windows begin at these positions, once those before them are left out.
    begins = table[:, 0] - np.concatenate([[0], lengths[:-1]])
    passed = np.searchsorted(begins, positions, side="right")
    return positions + np.concatenate([[0], lengths])[passed]


def sequence_range(start: int, end: int, windows: Windows) -> tuple[int, int]:
    """Return the sequence numbers [first, last + 1) that the positions [start, end) span."""
    assert start < end, "an empty range"
    first, last = sequence_ids(np.array([start, end - 1], np.int64), windows).tolist()
    return first, last + 1


def reached(position: int, windows: Windows) -> int:
    """Return the sequence number below which all that a run has consumed or left out lies."""
    consumed = sequence_range(0, position, windows)[1] if position else 0
    return max([consumed, *(end for _, end in windows)])


def counts(order: Any, position: int, windows: Windows) -> np.ndarray:
    """Return how many sequences of each source a run at `position` has consumed, (S,) int64.

    Args:
        order: the run's `zerolm.order.Order`.
    """
    end = position
    left_out = 0
    for start, stop in windows:
        if start > end:
            break
        left_out = left_out + order.counts(stop) - order.counts(start)
        end += stop - start
    return order.counts(end) - left_out
