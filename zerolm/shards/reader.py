"""Open and verify a shard directory, local or in a store. Independent of torch.

A shard directory is one data source:

    manifest.json       published last; a directory without one is not data shard-00000.bin
    little-endian token ids, uint16 if the vocabulary fits, else uint32 shard-00000.idx
    little-endian uint64: the end of each document in the shard, in tokens shard-00000.sums
    little-endian uint64: a checksum of each block of 64 KiB tokenizer/          the files of the
    tokenizer that encoded the text

docs/formats.md describes each file and key.
"""

import contextlib
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePath
from typing import Any

import numpy as np

from zerolm.common.errors import ConfigError, ShardError, ShardReadError
from zerolm.common.url import Url, is_url
from zerolm.shards.checksums import BlockChecksums
from zerolm.shards.local import LocalFiles
from zerolm.shards.manifest import DTYPES, MANIFEST, SIDECARS
from zerolm.shards.remote import RemoteFiles
from zerolm.shards.table import all_have, column, digest_lines, read_table
from zerolm.shards.token_bytes import exact_bytes
from zerolm.shards.tokenizer import copy_problems

VERIFY_CHUNK_BYTES = 1 << 23  # a multiple of the block size


@dataclass(frozen=True)
class Source:
    """A shard directory, opened for reading as a single stream of `num_tokens` ids.

    Token positions count over all shards in manifest order.

    Attributes:
        directory: a local path, or the URL of a directory in a store.
        starts: the first token position in each shard, followed by `num_tokens`; (S + 1,) int64.
        files: the reader for the local directory or store.
    """

    directory: Any
    starts: np.ndarray
    files: Any

    @property
    def manifest(self) -> dict[str, Any]:
        """The checked content of manifest.json. Using `head` and `shards` is faster."""
        return self.files.manifest

    @property
    def head(self) -> dict[str, Any]:
        """The manifest without `shards`."""
        return self.files.head

    @property
    def shards(self) -> Sequence[dict[str, Any]]:
        """The `shards` entries of the manifest, which may be created on access."""
        return self.files.shards

    @property
    def num_tokens(self) -> int:
        return self.head["num_tokens"]

    @property
    def num_documents(self) -> int:
        return self.head["num_documents"]

    @property
    def vocab_size(self) -> int:
        return self.head["vocab_size"]

    @property
    def eos_id(self) -> int:
        return self.head["eos_id"]

    @property
    def bos_id(self) -> int | None:
        """The id that begins every document; None if documents have none."""
        return self.head.get("bos_id")

    @property
    def dtype(self) -> np.dtype:
        return DTYPES[self.head["dtype"]]

    @property
    def is_remote(self) -> bool:
        return self.files.is_remote

    @property
    def has_checksums(self) -> bool:
        """Whether blocks can be verified when read; shards from old releases have no checksums."""
        return all_have(self.shards, "sums")

    @cached_property
    def fingerprint(self) -> str:
        """Hex SHA-256 of the dtype, tokenizer and shard checksums, which identifies the ids."""
        parts = [self.head["dtype"], self.head["tokenizer"]["fingerprint"]]
        parts.append(digest_lines(self.shards))
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    def ids(self, number: int, start: int, stop: int) -> np.ndarray:
        """Return the ids at [start, stop) in one shard as a read-only array.

        Raises:
            ShardReadError: a block is damaged, or a store does not deliver it.
        """
        return self.files.ids(number, start, stop)

    def shard(self, number: int) -> np.ndarray:
        """Return all ids in one shard; unlike `ids`, do not verify blocks of local files."""
        return self.files.shard(number)

    def read(self, start: int, out: np.ndarray) -> None:
        """Copy the ids at [start, start + len(out)) into `out`, an (N,) array of any integer dtype.

        Raises:
            IndexError: the range extends beyond the source.
            ShardReadError: as `ids`.
        """
        stop = start + len(out)
        if start < 0 or stop > self.num_tokens:
            raise IndexError(
                f"tokens {start} to {stop} are out of range: there are {self.num_tokens}"
            )
        number = int(np.searchsorted(self.starts, start, side="right")) - 1
        while start < stop:
            first, end = int(self.starts[number]), int(self.starts[number + 1])
            upto = min(stop, end)
            filled = len(out) - (stop - start)
            out[filled : filled + upto - start] = self.ids(number, start - first, upto - first)
            start, number = upto, number + 1

    def ranges(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """Split the range [start, stop) into one range per shard: (shard, first id in it, end in
        it).
        """
        number = int(np.searchsorted(self.starts, start, side="right")) - 1
        ranges = []
        while start < stop:
            first, end = int(self.starts[number]), int(self.starts[number + 1])
            ranges.append((number, start - first, min(stop, end) - first))
            start, number = end, number + 1
        return ranges

    def document_ends(self, number: int) -> np.ndarray:
        """Return the ends of the documents in one shard, from the shard's start: (D,) uint64.

        Raises:
            ShardReadError: the file differs from the manifest, or a store does not deliver it.
        """
        return np.frombuffer(self.files.read_index(number), "<u8")

    def index_problems(self) -> list[str]:
        """Read the document ends of all shards; return a problem for each damaged file."""
        problems: list[str] = []
        for number in range(len(self.shards)):
            try:
                self.document_ends(number)
            except ShardReadError as error:
                problems += error.problems
        return problems

    def tokenizer_directory(self) -> Path:
        """Return the local directory of the tokenizer copy; it may not exist.

        Raises:
            ShardError: its files do not match the manifest, or a store does not deliver them.
        """
        return self.files.tokenizer_directory()


def open_source(directory: str | PurePath) -> Source:
    """Open a shard directory, local or in a store; check its manifest and file sizes.

    Raises:
        ShardError: lists all problems: the manifest is missing or has another format, or files are
            missing or have the wrong size.
    """
    files: Any
    if isinstance(directory, Url) or is_url(str(directory)):
        directory = Url(directory)
        files = RemoteFiles.open(directory)
    else:
        directory = Path(directory)
        files = LocalFiles.open(directory)
    if problems := files.problems():
        raise ShardError(problems)
    starts = np.concatenate([[0], np.cumsum(column(files.shards, "num_tokens"))])
    return Source(directory, starts, files)


# -------------------------------------------------------------------------------------------------
# Verification


def verify(directory: str | PurePath) -> dict[str, Any]:
    """Check all files, checksums, ids and document ends in a directory; return the manifest.

    Raises:
        ShardError: lists every file whose content differs from the manifest.
    """
    source = open_source(directory)
    problems = source.files.size_problems()
    if problems:
        raise ShardError(problems)
    if not source.is_remote:
        try:
            read_table(source.directory)
        except ShardError as error:
            problems += error.problems
    counts = _Counts(source)
    for number in range(len(source.shards)):
        problems += _shard_problems(source, number, counts)
    if "input_files" in source.head:  # the file that document origins refer to
        problems += _input_files_problems(source)
    try:
        tokenizer = source.tokenizer_directory()
        if not tokenizer.is_dir():
            problems += copy_problems(tokenizer, source.head["tokenizer"].get("files", []))
    except ShardError as error:
        problems += error.problems
    if problems := problems or counts.problems():
        raise ShardError(problems)
    return source.manifest


def _input_files_problems(source: Source) -> list[str]:
    entry = source.head["input_files"]
    path = source.directory / entry["file"]
    try:
        actual = hashlib.sha256(source.files.read_bytes(entry["file"])).hexdigest()
    except (OSError, ShardError):
        return [f"{path}: the manifest lists it, but it is missing. Restore it."]
    return [] if actual == entry["sha256"] else [_mismatch(path, actual, entry["sha256"])]


def _shard_problems(source: Source, number: int, counts: "_Counts") -> list[str]:
    """Read all files of a shard once; return a problem for each difference from the manifest."""
    shard = source.shards[number]
    problems, sidecars = [], {}
    for key in ("index", *(key for key in SIDECARS if key in shard)):
        sidecars[key] = source.files.read_bytes(shard[key])
        actual = hashlib.sha256(sidecars[key]).hexdigest()
        if actual != shard[f"{key}_sha256"]:
            where = source.directory / shard[key]
            problems.append(_mismatch(where, actual, shard[f"{key}_sha256"]))
    ends = np.frombuffer(sidecars["index"], "<u8").astype(np.int64)
    digest, checksums, ids = hashlib.sha256(), BlockChecksums(), _IdCheck(source, number, ends)
    for start in range(0, shard["size_bytes"], VERIFY_CHUNK_BYTES):
        stop = min(start + VERIFY_CHUNK_BYTES, shard["size_bytes"])
        part = source.files.read_bytes(shard["file"], start, stop)
        digest.update(part)
        checksums.update(part)
        ids.update(np.frombuffer(part, source.dtype))
        counts.update(np.frombuffer(part, source.dtype))
    if digest.hexdigest() != shard["sha256"]:
        blocks = ""
        if "sums" in sidecars and not problems:
            expected = np.frombuffer(sidecars["sums"], "<u8")
            damaged = np.flatnonzero(expected != np.frombuffer(checksums.content(), "<u8")).tolist()
            blocks = (
                f" in block {', '.join(map(str, damaged[:8]))} (of 64 KiB each)" if damaged else ""
            )
        where = source.directory / shard["file"]
        problems.append(_mismatch(where, digest.hexdigest(), shard["sha256"], blocks))
    return problems or ids.problems()  # ids may be wrong even in an undamaged file


def _mismatch(where: Any, actual: str, expected: str, blocks: str = "") -> str:
    return (
        f"{where}: SHA-256 {actual}, but the manifest says {expected}. The file is "
        f"damaged{blocks}: restore it, or tokenize again."
    )


class _Counts:
    """Recounts some numbers in a manifest by reading all ids."""

    def __init__(self, source: Source):
        self.source, self.eos_ids, self.text_bytes = source, 0, 0
        self.table: np.ndarray | None = None
        with contextlib.suppress(ShardError, ConfigError):  # no tokenizer copy, or a damaged one
            self.table = exact_bytes(source.tokenizer_directory(), source.vocab_size)

    def update(self, tokens: np.ndarray) -> None:
        """Count the next ids."""
        self.eos_ids += int(np.count_nonzero(tokens == self.source.eos_id))
        if self.table is not None:
            self.text_bytes += int(self.table.take(tokens, mode="clip").sum())

    def problems(self) -> list[str]:
        """Return a problem for each number in the manifest that differs from the count."""
        head, counted = self.source.head, {}
        # After a split, the recorded number covers both parts.
        if "split" not in head or "reshard" in head:
            counted["inner_eos_ids"] = self.eos_ids - self.source.num_documents
        if self.table is not None:
            counted["text_bytes"] = self.text_bytes
        fix = "Tokenize again." if "digest" in head else "Correct it, or tokenize again."
        return [
            f"{self.source.directory / MANIFEST}: {key}: {head[key]}, but the tokens have {count}. "
            f"{fix}"
            for key, count in counted.items()
            if head.get(key, count) != count
        ]


class _IdCheck:
    """Checks a shard's ids against the document ends and the vocabulary size; pass all ids in
    order.
    """

    def __init__(self, source: Source, number: int, ends: np.ndarray):
        self.source, self.shard, self.ends = source, source.shards[number], ends
        self.largest, self.seen, self.documents_end_in_eos = 0, 0, True
        self.begins, self.documents_begin_with_bos = np.insert(ends[:-1], 0, 0), True

    def update(self, tokens: np.ndarray) -> None:
        """Check the next ids of the shard."""
        bounds = [self.seen, self.seen + len(tokens)]
        first, last = np.searchsorted(self.ends, bounds, side="right")
        eos_places = self.ends[first:last] - 1 - self.seen
        eos_places = eos_places[(eos_places >= 0) & (eos_places < len(tokens))]  # damaged index
        self.documents_end_in_eos &= bool((tokens[eos_places] == self.source.eos_id).all())
        if self.source.bos_id is not None:
            first, last = np.searchsorted(self.begins, bounds)
            begins = tokens[self.begins[first:last] - self.seen]
            self.documents_begin_with_bos &= bool((begins == self.source.bos_id).all())
        self.largest = max(self.largest, int(tokens.max()))
        self.seen += len(tokens)

    def problems(self) -> list[str]:
        ends, index = self.ends, self.source.directory / self.shard["index"]
        if ends[-1] != self.seen or ends[0] < 1 or (np.diff(ends) < 1).any():
            return [f"{index}: document ends do not ascend to {self.seen}. Tokenize again."]
        eos_id, vocab_size, problems = self.source.eos_id, self.source.vocab_size, []
        if not self.documents_end_in_eos:
            problems.append(f"{index}: a document does not end in id {eos_id}. Tokenize again.")
        if not self.documents_begin_with_bos:
            problems.append(
                f"{index}: a document does not begin with id {self.source.bos_id}. Tokenize again."
            )
        if self.largest >= vocab_size:
            problems.append(
                f"{self.source.directory / self.shard['file']}: token id {self.largest} is not "
                f"below the vocabulary size {vocab_size}. Tokenize again."
            )
        return problems
