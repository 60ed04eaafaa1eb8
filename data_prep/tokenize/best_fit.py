"""Best-fit-decreasing bin packing of documents into rows. Pure: numpy, no files.

Each document, longest first, goes to the row with the least room that still holds it, or opens one.
Documents of one length are placed together: those of length l fill the rows with the least room r
of at least l, r // l into each, since a row that took one has less room than any other candidate.
So the work is not a step for each document but one for each length and group of rows of equal room;
the result is that of placing one after the other.

Source: Ding et al., "Fewer truncations improve language modeling" (2024), section 3, for best-fit
packing of a corpus; the grouping by length is ours.
"""

from collections import deque

import numpy as np


def cut_documents(ends: np.ndarray, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the pieces of documents laid end to end: those longer than a row are cut into rows.

    A row is `seq_len` + 1 ids, of which the last is only a target. A piece of a cut document begins
    on the last id of the piece before it, so that every id but the first is a target once.

    Args:
        ends: (D,) int64, ascending; the first document starts at 0.

    Returns:
        Starts and lengths, (P,) int64 each, by start.
    """
    starts = np.concatenate([[0], ends[:-1]])
    lengths = ends - starts
    counts = np.maximum(1, -(-(lengths - 1) // seq_len))
    number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    offsets = number * seq_len
    pieces = np.minimum(np.repeat(lengths, counts) - offsets, seq_len + 1)
    return np.repeat(starts, counts) + offsets, pieces


def fill_rows(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, int]:
    """Assign pieces to rows, best fit, longest first; equal lengths in the order given.

    Args:
        lengths: (P,) int64 from 1 to `capacity`.

    Returns:
        The row of each piece, (P,) int64, and the number of rows. Rows are numbered as opened.
    """
    by_length = np.argsort(capacity - lengths, kind="stable")
    counts = np.bincount(lengths, minlength=capacity + 1)
    rooms = _Rooms(capacity)
    rows = np.empty(len(lengths), np.int64)
    placed = 0
    for length in np.flatnonzero(counts)[::-1].tolist():
        missing = int(counts[length])
        while missing:
            room, some = rooms.least(length, missing)
            each = room // length
            used = min(len(some), -(-missing // each))
            rooms.give_back(room, some[used:])
            taken = np.repeat(some[:used], each)[:missing]
            rows[placed : placed + len(taken)] = taken
            full, rest = divmod(len(taken), each)
            rooms.put(room - each * length, some[:full])
            if rest:
                rooms.put(room - rest * length, some[full : full + 1])
            placed += len(taken)
            missing -= len(taken)
    result = np.empty_like(rows)
    result[by_length] = rows
    return result, rooms.num_rows


class _Rooms:
    """Open rows by the room that they have left, in the order in which they came to have it."""

    def __init__(self, capacity: int):
        self.capacity, self.num_rows = capacity, 0
        self._queues: list[deque[np.ndarray]] = [deque() for _ in range(capacity + 1)]
        self._present = 0  # a bit for each room that rows have: the next one is a shift away

    def least(self, length: int, missing: int) -> tuple[int, np.ndarray]:
        """Take rows out that have the least room of at least `length`, or open new ones."""
        above = self._present >> length
        if not above:
            opened = -(-missing // (self.capacity // length))
            self.num_rows += opened
            return self.capacity, np.arange(self.num_rows - opened, self.num_rows)
        room = length + (above & -above).bit_length() - 1
        queue = self._queues[room]
        rows = queue.popleft()
        if not queue:
            self._present ^= 1 << room
        return room, rows

    def put(self, room: int, rows: np.ndarray) -> None:
        if room and len(rows):
            self._queues[room].append(rows)
            self._present |= 1 << room

    def give_back(self, room: int, rows: np.ndarray) -> None:
        if len(rows):
            self._queues[room].appendleft(rows)
            self._present |= 1 << room


def order_rows(
    starts: np.ndarray, rows: np.ndarray, lengths: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Put rows into the order of the corpus: by the start of their longest piece.

    In the order in which they were opened the first ones would be those of the longest documents,
    and validation reads the first ones.

    Args:
        starts, rows, lengths: of each piece, (P,) int64, by start.

    Returns:
        The pieces row after row, by start in each, (P,) int64 indices; and the rows' ends, in
        pieces, (R,) int64.
    """
    last_to_first = len(lengths) - 1 - np.argsort(lengths[::-1], kind="stable")
    lead = np.empty(int(rows.max()) + 1, np.int64)
    lead[rows[last_to_first]] = starts[last_to_first]  # what is assigned last stays
    place = np.empty_like(lead)
    place[np.argsort(lead)] = np.arange(len(lead))
    placed = place[rows]
    return np.argsort(placed, kind="stable"), np.cumsum(np.bincount(placed))
