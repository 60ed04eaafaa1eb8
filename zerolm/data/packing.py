"""Reads the best-fit packing index, which lists the documents that share each row.

Without packing, a row is a window of the concatenated documents. With packing, an index next to the
shards defines the rows; `zerolm data pack` builds it for one `seq_len`:

    packing-2048.json    published last; without it the index is incomplete
    packing-2048.rows    little-endian uint64: the end of each row, counted in pieces
    packing-2048.pieces  12 bytes each: start (uint64, token of the source) and length (uint32)

A piece is a document, or part of a document that is longer than a row. docs/formats.md describes
the keys. Independent of torch.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

import numpy as np

from zerolm.common.errors import RecordError, ShardError, ShardReadError
from zerolm.common.files import sha256_file
from zerolm.common.records import Count, digest_problem, read_record
from zerolm.config.settings import BEST_FIT
from zerolm.data.order import num_windows
from zerolm.shards.reader import Source

FORMAT, VERSION = "zerolm-packing", 1
PIECE = np.dtype([("start", "<u8"), ("length", "<u4")])
ROW_END = np.dtype("<u8")
PARTS = ("rows", "pieces")


class _IndexFile(TypedDict):
    size_bytes: Count
    sha256: str


class PackingManifest(TypedDict):
    """The content of `packing-*.json`."""

    format: str
    version: int
    seq_len: Count
    num_rows: Count
    efficiency: list[dict[str, Any]]
    source_fingerprint: str
    rows: _IndexFile
    pieces: _IndexFile


def index_file(directory: Path, seq_len: int, part: str = "json") -> Path:
    """Return the path of one of an index's files: `json`, `rows` or `pieces`."""
    return directory / f"packing-{seq_len}.{part}"


@dataclass(frozen=True)
class Packing:
    """One source's packing index, opened for reading. It is pickled without its memory maps.

    Attributes:
        manifest: the checked content of packing-<seq_len>.json.
    """

    directory: Path
    manifest: dict[str, Any]
    num_tokens: int
    _maps: dict[str, np.ndarray]

    @property
    def seq_len(self) -> int:
        return self.manifest["seq_len"]

    @property
    def num_rows(self) -> int:
        return self.manifest["num_rows"]

    @property
    def fingerprint(self) -> str:
        """SHA-256, in hex, that identifies the rows."""
        digests = [self.manifest[part]["sha256"] for part in PARTS]
        return hashlib.sha256("\n".join(digests).encode()).hexdigest()

    def pieces(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the starts in the source and the lengths of a row's pieces, in reading order.

        Raises:
            ShardReadError: the row is invalid, because the index is damaged.
        """
        ends, pieces = self._map("rows", ROW_END), self._map("pieces", PIECE)
        first, end = int(ends[row - 1]) if row else 0, int(ends[row])
        row_pieces = pieces[first:end]
        starts, lengths = row_pieces["start"], row_pieces["length"]
        # Each number is first checked alone, because damaged ones may be so large that sums
        # overflow.
        if not (
            0 <= first < end <= len(pieces)
            and int(lengths.max()) <= self.num_tokens
            and int(starts.max()) <= self.num_tokens
            and int((starts + lengths).max()) <= self.num_tokens
            and int(lengths.sum(dtype=np.uint64)) <= self.seq_len + 1
        ):
            raise ShardReadError(
                f"{index_file(self.directory, self.seq_len)}: row {row} is outside the source's "
                f"{self.num_tokens} tokens: the index is damaged. {_repack_hint(self)}"
            )
        return starts, lengths

    def damage(self) -> list[str]:
        """Compare both files with their checksums; return one line for each damaged file."""
        files = {part: index_file(self.directory, self.seq_len, part) for part in PARTS}
        return [
            f"{file}: is damaged: its SHA-256 differs. {_repack_hint(self)}"
            for part, file in files.items()
            if sha256_file(file) != self.manifest[part]["sha256"]
        ]

    def _map(self, part: str, dtype: np.dtype) -> np.ndarray:
        if part not in self._maps:
            path = index_file(self.directory, self.seq_len, part)
            self._maps[part] = np.memmap(path, dtype, mode="r").view(np.ndarray)
        return self._maps[part]

    def __getstate__(self):  # maps are not pickled: each process opens its own
        return {name: value for name, value in vars(self).items() if name != "_maps"}

    def __setstate__(self, state):
        for name, value in {**state, "_maps": {}}.items():
            object.__setattr__(self, name, value)


def _repack_hint(packing: Packing) -> str:
    return f"Run: zerolm data pack {packing.directory} --seq_len {packing.seq_len}"


def open_packing(source: Source, seq_len: int) -> Packing:
    """Open a source's packing index, and check that it is complete and matches the source's tokens.

    Raises:
        ShardError: there is no index for this `seq_len`, it was built from other tokens, or one of
            its files is missing or has the wrong size.
    """
    if source.is_remote:
        raise ShardError(
            f"{source.directory}: --packing {BEST_FIT} needs its index next to the shards on this "
            "machine. Copy both here and use their path, or use --packing concat."
        )
    path = index_file(source.directory, seq_len)
    command = f"Run: zerolm data pack {source.directory} --seq_len {seq_len}"
    try:
        found = read_record(path, PackingManifest, command)
    except RecordError as error:
        raise ShardError(error.problems) from None
    if found is None:
        raise ShardError(
            f"{path}: no such file, but --packing {BEST_FIT} with --seq_len {seq_len} needs it. "
            f"{command}"
        )
    manifest: dict[str, Any] = dict(found)
    sizes = {part: manifest[part]["size_bytes"] for part in PARTS}
    valid = (manifest["format"], manifest["version"]) == (FORMAT, VERSION)
    valid = valid and manifest["seq_len"] == seq_len and manifest["num_rows"] > 0
    if not valid or sizes["rows"] != manifest["num_rows"] * ROW_END.itemsize:
        raise ShardError(
            f"{path}: is not a {FORMAT} index of version {VERSION} for --seq_len {seq_len}. "
            f"{command}"
        )
    made_from = manifest["source_fingerprint"]
    if made_from != source.fingerprint:
        raise ShardError(
            f"{path}: source_fingerprint: {made_from[:16]}, but the tokens here are "
            f"{source.fingerprint[:16]}: it was built from other tokens. {command}"
        )
    if changed := digest_problem(manifest):
        raise ShardError(f"{path}: {changed}. {command}")
    problems = []
    for part, size in sizes.items():
        file = index_file(source.directory, seq_len, part)
        actual = file.stat().st_size if file.is_file() else None
        if actual != size:
            state = "is missing" if actual is None else f"has {actual} bytes"
            problems.append(f"{file}: {state}, but its manifest says {size} bytes. {command}")
    if problems:
        raise ShardError(problems)
    return Packing(source.directory, manifest, source.num_tokens, {})


def open_intact_packing(source: Source, seq_len: int) -> Packing:
    """Open a source's packing index, and verify the checksums of its files."""
    packing = open_packing(source, seq_len)
    if damage := packing.damage():
        raise ShardError(damage)
    return packing


def verify_packings(source: Source) -> list[str]:
    """Verify the packing indices next to a source; return one line for each damaged index."""
    problems: list[str] = []
    if source.is_remote:  # packing is not supported for remote sources
        return problems
    for path in sorted(source.directory.glob("packing-*.json")):
        seq_len = path.stem.removeprefix("packing-")
        if not seq_len.isdigit():
            continue
        try:
            problems += open_packing(source, int(seq_len)).damage()
        except ShardError as error:
            problems += error.problems
    return problems


def num_rows(source: Source, seq_len: int, packing: str) -> int:
    """Return the number of rows in a source for a kind of packing, `BEST_FIT` or `CONCAT`."""
    if packing == BEST_FIT:
        return open_packing(source, seq_len).num_rows
    return num_windows(source.num_tokens, seq_len)


def data_fingerprint(sources: Sequence[Source], seq_len: int | None, packing: str) -> str:
    """Return a SHA-256, in hex, that identifies a run's rows by their tokens and their packing."""
    prints = [source.fingerprint for source in sources]
    if packing == BEST_FIT:
        assert seq_len is not None
        prints += [open_packing(source, seq_len).fingerprint for source in sources]
    return hashlib.sha256("\n".join(prints).encode()).hexdigest()
