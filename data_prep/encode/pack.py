"""Writes the best-fit packing index of a source for one `seq_len`, which training reads.

The index depends only on the ends of the documents and on `seq_len`. `data_prep.encode.best_fit`
assigns documents to rows; `zerolm.data.packing` describes the format of the index.
"""

import contextlib
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from data_prep.encode.best_fit import cut_documents, fill_rows, order_rows
from zerolm.common.errors import ShardError
from zerolm.common.files import sha256_file, write_atomically, write_json
from zerolm.common.locks import FileLock, LockTaken
from zerolm.common.records import with_digest
from zerolm.data.order import num_windows
from zerolm.data.packing import FORMAT, PARTS, PIECE, ROW_END, VERSION, index_file, open_packing
from zerolm.shards.reader import Source

# Packing one block takes about 0.7 GB of memory. In a block of this size, almost every length
# occurs a thousand times, so the block's rows are as full as if all pieces were packed together.
BLOCK_PIECES = 1 << 23


def pack(source: Source, seq_len: int, block_pieces: int = BLOCK_PIECES) -> dict[str, Any]:
    """Write a source's index unless an intact index exists, and return the index's manifest.

    Raises:
        ShardError: the directory cannot be written, or another process is writing an index there.
    """
    if (existing := _intact_index(source, seq_len)) is not None:
        return existing
    try:
        with _lock_index(source.directory, seq_len):
            existing = _intact_index(source, seq_len)  # another process may have just written it
            return existing if existing is not None else _write(source, seq_len, block_pieces)
    except OSError as error:
        raise ShardError(
            f"{source.directory}: the index cannot be written ({error.strerror or error}). Free "
            "disk space, make the directory writable, or copy the shards to a writable directory."
        ) from error


def _intact_index(source: Source, seq_len: int) -> dict[str, Any] | None:
    """Return the manifest of the existing index, or None if the index is absent, stale or damaged.

    Also return None for an index from an older release, which did not verify document ends.
    """
    try:
        packing = open_packing(source, seq_len)
    except ShardError:
        return None
    verified = packing.manifest.get("document_ends") == _document_ends(source)
    return packing.manifest if verified and not packing.damage() else None


def _document_ends(source: Source) -> str:
    """Return a hex SHA-256 digest that identifies a source's document ends."""
    digests = [shard["index_sha256"] for shard in source.manifest["shards"]]
    return hashlib.sha256("\n".join(digests).encode()).hexdigest()


@contextlib.contextmanager
def _lock_index(directory: Path, seq_len: int) -> Iterator[None]:
    """Prevent other processes from writing the index; a process that exits releases its lock."""
    path = index_file(directory, seq_len, "lock")
    try:
        lock = FileLock(path)
    except LockTaken as error:
        raise ShardError(
            f"{directory}: another process is packing there. Wait until it has finished."
        ) from error
    with lock:
        if lock.unsupported is not None:
            raise lock.unsupported
        try:
            yield
        finally:
            path.unlink()


def _write(source: Source, seq_len: int, block_pieces: int) -> dict[str, Any]:
    counts = {"num_rows": 0, "num_pieces": 0, "num_padding": 0}
    index_file(source.directory, seq_len).unlink(missing_ok=True)
    paths = {part: index_file(source.directory, seq_len, part) for part in PARTS}

    def fill(row_file: BinaryIO, piece_file: BinaryIO) -> None:
        for starts, lengths in _blocks(source, seq_len, block_pieces):
            rows, _ = fill_rows(lengths, seq_len + 1)
            order, ends = order_rows(starts, rows, lengths)
            records = np.empty(len(order), PIECE)
            records["start"], records["length"] = starts[order], lengths[order]
            piece_file.write(records.data)
            row_file.write((ends + counts["num_pieces"]).astype(ROW_END).data)
            counts["num_rows"] += len(ends)
            counts["num_pieces"] += len(order)
            counts["num_padding"] += len(ends) * (seq_len + 1) - int(lengths.sum())

    write_atomically(
        paths["rows"], lambda rows: write_atomically(paths["pieces"], partial(fill, rows))
    )
    entries = {
        part: {"size_bytes": path.stat().st_size, "sha256": sha256_file(path)}
        for part, path in paths.items()
    }
    content = {
        "format": FORMAT,
        "version": VERSION,
        "seq_len": seq_len,
        "source_fingerprint": source.fingerprint,
        "document_ends": _document_ends(source),
        **counts,
        **entries,
        "efficiency": [vars(row) for row in efficiency(source, seq_len, counts)],
    }
    manifest = with_digest(content)
    write_json(index_file(source.directory, seq_len), manifest)
    return manifest


def _blocks(
    source: Source, seq_len: int, block_pieces: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the starts and lengths of all pieces, in blocks of at most `block_pieces`."""
    starts, lengths = np.empty(0, np.int64), np.empty(0, np.int64)
    for number in range(len(source.manifest["shards"])):
        ends = source.document_ends(number).astype(np.int64)
        shard_starts, shard_lengths = cut_documents(ends, seq_len)
        starts = np.concatenate([starts, shard_starts + int(source.starts[number])])
        lengths = np.concatenate([lengths, shard_lengths])
        while len(starts) >= block_pieces:
            yield starts[:block_pieces], lengths[:block_pieces]
            starts, lengths = starts[block_pieces:], lengths[block_pieces:]
    if len(starts):
        yield starts, lengths


@dataclass(frozen=True)
class Efficiency:
    """Statistics on a packing method: its rows, padding and cut documents.

    Attributes:
        packing: "concat" or "best_fit".
        padding: number of padding ids in all rows.
        cut_documents: number of documents whose tokens are spread over several rows.
        cut_tokens: total number of tokens in those documents.
    """

    packing: str
    rows: int
    padding: int
    cut_documents: int
    cut_tokens: int

    def line(self, source_documents: int, source_tokens: int, seq_len: int) -> str:
        """Return these statistics as a table row; EFFICIENCY_HEADER is the header of the table."""
        ids = self.rows * (seq_len + 1)
        return (
            f"{self.packing:<10} {self.rows:>12,} {self.padding / ids:>9.2%} "
            f"{self.cut_documents:>14,} {self.cut_documents / source_documents:>8.2%} "
            f"{self.cut_tokens / source_tokens:>10.2%}"
        )


EFFICIENCY_HEADER = (
    f"{'packing':<10} {'rows':>12} {'padding':>9} {'cut documents':>14} {'of all':>8} "
    f"{'of tokens':>10}"
)


def efficiency(source: Source, seq_len: int, counts: dict[str, int]) -> list[Efficiency]:
    """Compare best-fit packing with concatenation, based on the document ends.

    Args:
        counts: `num_rows` and `num_padding` of the best-fit index.
    """
    windows = num_windows(source.num_tokens, seq_len)
    used = windows * seq_len + 1 if windows else 0
    cut = [0, 0]  # documents cut by concatenation, and their tokens
    long = [0, 0]  # documents longer than a row, which best-fit packing must cut, and their tokens
    for number in range(len(source.manifest["shards"])):
        ends = source.document_ends(number).astype(np.int64)
        lengths = np.diff(ends, prepend=0)
        ends += int(source.starts[number])
        # The last target of a window is the first id of the next window.
        ends_in_window = (ends - lengths) // seq_len * seq_len + seq_len + 1
        split = ends > np.minimum(ends_in_window, used)
        above = lengths > seq_len + 1
        for totals, chosen in ((cut, split), (long, above)):
            totals[0] += int(chosen.sum())
            totals[1] += int(lengths[chosen].sum())
    return [
        Efficiency("concat", windows, 0, *cut),
        Efficiency("best_fit", counts["num_rows"], counts["num_padding"], *long),
    ]
