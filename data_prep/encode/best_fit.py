"""Best-fit-decreasing bin packing of documents into rows. Uses only numpy; accesses no files.

Each document, longest first, is placed in the row with the least sufficient space, or in a new row.
All documents of the same length l are placed together. They fill the rows with the least sufficient
space r, with r // l documents in each, because a row that has just received a document has less
space left than any other candidate. The result is the same, but takes one step per length and group
of rows with equal space instead of one step per document.

Source: Ding et al., "Fewer truncations improve language modeling" (2024), section 3, for best-fit
packing of a corpus; grouping by length is ours.
"""

from collections import deque

import numpy as np


def cut_documents(ends: np.ndarray, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
    """Cut concatenated documents into pieces; only documents longer than a row are cut.

    A row contains `seq_len` + 1 ids, of which the last is only a target. Each piece after a
    document's first begins with the last id of the piece before it, so every id except the
    document's first is a target exactly once.

    Args:
        ends: index after each document's last id, ascending, (D,) int64; the first document starts
            at 0.

    Returns:
        Start and length of each piece, sorted by start; two arrays, (P,) int64.
    """
    starts = np.concatenate([[0], ends[:-1]])
    lengths = ends - starts
    counts = np.maximum(1, -(-(lengths - 1) // seq_len))
    number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    offsets = number * seq_len
    pieces = np.minimum(np.repeat(lengths, counts) - offsets, seq_len + 1)
    return np.repeat(starts, counts) + offsets, pieces


def fill_rows(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, int]:
    """Assign pieces to rows by best fit, longest first; pieces of equal length keep their order.

    Args:
        lengths: lengths of the pieces, from 1 to `capacity`, (P,) int64.

    Returns:
        The row of each piece, (P,) int64, and the number of rows. Rows are numbered in the order in
        which they were opened.
    """
    by_length = np.argsort(capacity - lengths, kind="stable")
    counts = np.bincount(lengths, minlength=capacity + 1)
    open_rows = _OpenRows(capacity)
    rows = np.empty(len(lengths), np.int64)
    num_placed = 0
    for length in np.flatnonzero(counts)[::-1].tolist():
        num_left = int(counts[length])
        while num_left:
            room, candidates = open_rows.take_fullest(length, num_left)
            pieces_per_row = room // length
            num_used = min(len(candidates), -(-num_left // pieces_per_row))
            open_rows.return_unused(room, candidates[num_used:])
            placed = np.repeat(candidates[:num_used], pieces_per_row)[:num_left]
            rows[num_placed : num_placed + len(placed)] = placed
            num_full, rest = divmod(len(placed), pieces_per_row)
            open_rows.put(room - pieces_per_row * length, candidates[:num_full])
            if rest:
                open_rows.put(room - rest * length, candidates[num_full : num_full + 1])
            num_placed += len(placed)
            num_left -= len(placed)
    result = np.empty_like(rows)
    result[by_length] = rows
    return result, open_rows.num_rows


class _OpenRows:
    """Rows with free space, grouped by how many more ids fit (their "room"), in insertion order."""

    def __init__(self, capacity: int):
        self.capacity, self.num_rows = capacity, 0
        self._queues: list[deque[np.ndarray]] = [deque() for _ in range(capacity + 1)]
        self._present = 0  # bit r is set if any row has room r

    def take_fullest(self, length: int, num_pieces: int) -> tuple[int, np.ndarray]:
        """Remove rows with the least sufficient room, or open new rows; return the room and the
        rows.
        """
        above = self._present >> length
        if not above:
            opened = -(-num_pieces // (self.capacity // length))
            self.num_rows += opened
            return self.capacity, np.arange(self.num_rows - opened, self.num_rows)
        room = length + (above & -above).bit_length() - 1
        queue = self._queues[room]
        rows = queue.popleft()
        if not queue:
            self._present ^= 1 << room
        return room, rows

    def put(self, room: int, rows: np.ndarray) -> None:
        """Append rows to the queue of rows with the given room."""
        if room and len(rows):
            self._queues[room].append(rows)
            self._present |= 1 << room

    def return_unused(self, room: int, rows: np.ndarray) -> None:
        """Put rows back at the front of the queue of rows with the given room."""
        if len(rows):
            self._queues[room].appendleft(rows)
            self._present |= 1 << room


def order_rows(
    starts: np.ndarray, rows: np.ndarray, lengths: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Sort rows into corpus order, by the start of each row's longest piece.

    In the order in which rows were opened, the longest documents would come first, and validation
    reads only the first rows.

    Args:
        starts, rows, lengths: start, row and length of each piece, sorted by start, (P,) int64.

    Returns:
        Indices of the pieces, ordered by row and then by start, (P,) int64, and for each row the
        number of pieces up to its end, (R,) int64.
    """
    last_to_first = len(lengths) - 1 - np.argsort(lengths[::-1], kind="stable")
    lead = np.empty(int(rows.max()) + 1, np.int64)
    lead[rows[last_to_first]] = starts[last_to_first]  # the last assignment to a row wins
    rank = np.empty_like(lead)
    rank[np.argsort(lead)] = np.arange(len(lead))
    row_ranks = rank[rows]
    return np.argsort(row_ranks, kind="stable"), np.cumsum(np.bincount(row_ranks))
