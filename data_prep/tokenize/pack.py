"""Make the best-fit packing of a source for one `seq_len`: the index that training reads.

`data_prep.best_fit` decides what shares a row, here it is fed block by block and written. The index
depends on where documents end and on `seq_len` only. zerolm/packing.py has its format.
"""

import contextlib
import fcntl
import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from data_prep.best_fit import cut_documents, fill_rows, order_rows
from zerolm.errors import ShardError
from zerolm.files import sync_directory, write_json
from zerolm.order import num_windows
from zerolm.packing import FORMAT, PARTS, PIECE, ROW_END, VERSION, index_file, open_packing
from zerolm.shards import Source

# Packed together, in about 0.7 GB; the rows of a block are as full as those of the whole, since
# almost every length is there a thousand times.
BLOCK_PIECES = 1 << 23


def pack(source: Source, seq_len: int, block_pieces: int = BLOCK_PIECES) -> dict[str, Any]:
    """Write a source's index, or keep the one that is there and right; return its manifest.

    Raises:
        ShardError: the directory cannot be written, or another process packs there now.
    """
    if (kept := _kept(source, seq_len)) is not None:
        return kept
    try:
        with _alone(source.directory, seq_len):
            kept = _kept(source, seq_len)  # another process may have been at it just now
            return kept if kept is not None else _write(source, seq_len, block_pieces)
    except OSError as error:
        raise ShardError(
            f"{source.directory}: the index cannot be written ({error.strerror or error}). Make "
            f"room or the directory writable, or copy the shards to where it can be."
        ) from error


def _kept(source: Source, seq_len: int) -> dict[str, Any] | None:
    """Return the manifest of the index that is there, unless it is stale or damaged."""
    try:
        packing = open_packing(source, seq_len)
    except ShardError:
        return None
    return None if packing.damage() else packing.manifest


@contextlib.contextmanager
def _alone(directory: Path, seq_len: int) -> Iterator[None]:
    """Keep other processes from packing the same; a lock that a killed one left is no lock."""
    path = index_file(directory, seq_len, "lock")
    with open(path, "ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            own = os.path.samestat(os.fstat(file.fileno()), path.stat())
        except (BlockingIOError, FileNotFoundError):
            own = False  # in use, or the file of one that ended since it was opened
        if not own:
            raise ShardError(f"{directory}: another process packs there now. Wait for it.")
        try:
            yield
        finally:
            path.unlink()


def _write(source: Source, seq_len: int, block_pieces: int) -> dict[str, Any]:
    counts = {"num_rows": 0, "num_pieces": 0, "num_padding": 0}
    index_file(source.directory, seq_len).unlink(missing_ok=True)
    files = {part: _Part(index_file(source.directory, seq_len, part)) for part in PARTS}
    try:
        for starts, lengths in _blocks(source, seq_len, block_pieces):
            rows, _ = fill_rows(lengths, seq_len + 1)
            order, ends = order_rows(starts, rows, lengths)
            records = np.empty(len(order), PIECE)
            records["start"], records["length"] = starts[order], lengths[order]
            files["pieces"].write(records)
            files["rows"].write((ends + counts["num_pieces"]).astype(ROW_END))
            counts["num_rows"] += len(ends)
            counts["num_pieces"] += len(order)
            counts["num_padding"] += len(ends) * (seq_len + 1) - int(lengths.sum())
        entries = {part: file.publish() for part, file in files.items()}
    finally:
        for file in files.values():
            file.close()
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "seq_len": seq_len,
        "source_fingerprint": source.fingerprint,
        **counts,
        **entries,
        "efficiency": [vars(row) for row in efficiency(source, seq_len, counts)],
    }
    sync_directory(source.directory)
    write_json(index_file(source.directory, seq_len), manifest)
    return manifest


class _Part:
    """A file of an index in the making; renamed when whole."""

    def __init__(self, path: Path):
        self.path, self.temporary = path, path.with_name(path.name + ".tmp")
        self.file: BinaryIO = open(self.temporary, "wb")
        self.digest, self.size, self.published = hashlib.sha256(), 0, False

    def write(self, values: np.ndarray) -> None:
        data = values.tobytes()
        self.file.write(data)
        self.digest.update(data)
        self.size += len(data)

    def publish(self) -> dict[str, Any]:
        self.file.flush()
        os.fsync(self.file.fileno())
        os.replace(self.temporary, self.path)
        self.published = True
        return {"size_bytes": self.size, "sha256": self.digest.hexdigest()}

    def close(self) -> None:
        if not self.published:
            self.temporary.unlink(missing_ok=True)
        self.file.close()


def _blocks(
    source: Source, seq_len: int, block_pieces: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield starts in the source and lengths of at most so many pieces at a time."""
    starts, lengths = np.empty(0, np.int64), np.empty(0, np.int64)
    for number in range(len(source.manifest["shards"])):
        ends = source.document_ends(number).astype(np.int64)
        more, their_lengths = cut_documents(ends, seq_len)
        starts = np.concatenate([starts, more + int(source.starts[number])])
        lengths = np.concatenate([lengths, their_lengths])
        while len(starts) >= block_pieces:
            yield starts[:block_pieces], lengths[:block_pieces]
            starts, lengths = starts[block_pieces:], lengths[block_pieces:]
    if len(starts):
        yield starts, lengths


@dataclass(frozen=True)
class Efficiency:
    """What one way of packing makes of a source.

    Attributes:
        cut_documents: those whose tokens are not all in one row; and the tokens of these.
        padding: ids of rows that stand for nothing.
    """

    packing: str
    rows: int
    padding: int
    cut_documents: int
    cut_tokens: int

    def line(self, source_documents: int, source_tokens: int, seq_len: int) -> str:
        ids = self.rows * (seq_len + 1)
        return (
            f"{self.packing:<10} {self.rows:>12,} {self.padding / ids:>9.2%} "
            f"{self.cut_documents:>14,} {self.cut_documents / source_documents:>8.2%} "
            f"{self.cut_tokens / source_tokens:>10.2%}"
        )


HEADER = (
    f"{'packing':<10} {'rows':>12} {'padding':>9} {'cut documents':>14} {'of all':>8} "
    f"{'of tokens':>10}"
)


def efficiency(source: Source, seq_len: int, counts: dict[str, int]) -> list[Efficiency]:
    """Compare the two ways of packing, from the ends of the documents.

    Args:
        counts: `num_rows` and `num_padding` of the index.
    """
    windows = num_windows(source.num_tokens, seq_len)
    used = windows * seq_len + 1 if windows else 0
    cut = [0, 0]
    long = [0, 0]
    for number in range(len(source.manifest["shards"])):
        ends = source.document_ends(number).astype(np.int64)
        lengths = np.diff(ends, prepend=0)
        ends += int(source.starts[number])
        # A window goes on to the first id of the next one, which is its last target.
        ends_in_window = (ends - lengths) // seq_len * seq_len + seq_len + 1
        split = ends > np.minimum(ends_in_window, used)
        above = lengths > seq_len + 1
        for sums, chosen in ((cut, split), (long, above)):
            sums[0] += int(chosen.sum())
            sums[1] += int(lengths[chosen].sum())
    return [
        Efficiency("concat", windows, 0, *cut),
        Efficiency("best_fit", counts["num_rows"], counts["num_padding"], *long),
    ]
