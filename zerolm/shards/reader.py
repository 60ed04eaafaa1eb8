"""Token shards: the format on disk, and its reader. Knows numpy, not torch.

A shard directory is one data source:

    manifest.json        published last; a directory without one is not data
    shard-00000.bin      little-endian token ids, uint16 when the vocabulary fits in it, else uint32
    shard-00000.idx      little-endian uint64: the end of each document in the shard, in tokens
    shard-00000.sums     little-endian uint64: of each block of 64 KiB, see zerolm/block_sums.py
    tokenizer/           the files of the tokenizer that made the ids

docs/formats.md describes each key. zerolm/manifest.py checks the manifest, zerolm/shard_writer.py
writes, zerolm/shard_directory.py keeps others out meanwhile; what they offer to other modules can
be imported from here.
"""

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePath
from typing import Any

import numpy as np

from zerolm.block_sums import BlockSums
from zerolm.errors import ShardError
from zerolm.files import sha256_file
from zerolm.manifest import (
    DTYPES,
    MANIFEST,
    SIDECARS,
    TOKENIZER_DIRECTORY,
    read_manifest,
    token_dtype,
)
from zerolm.remote_shards import RemoteFiles
from zerolm.shard_directory import output_problems
from zerolm.shard_files import LocalFiles
from zerolm.shard_writer import DEFAULT_SHARD_TOKENS, ShardWriter
from zerolm.url import Url, is_url

__all__ = [
    "DEFAULT_SHARD_TOKENS",
    "MANIFEST",
    "TOKENIZER_DIRECTORY",
    "ShardWriter",
    "Source",
    "open_source",
    "output_problems",
    "token_dtype",
    "verify",
]

VERIFY_CHUNK_BYTES = 1 << 23  # whole blocks


@dataclass(frozen=True)
class Source:
    """One shard directory, opened for reading: a single stream of `num_tokens` ids.

    Token positions run over all shards in manifest order.
    """

    directory: Any  # Path, or Url of a directory in a store
    manifest: dict[str, Any]
    starts: np.ndarray  # (S + 1,) int64: first token position of each shard, then num_tokens
    files: Any  # LocalFiles or RemoteFiles

    @property
    def num_tokens(self) -> int:
        return self.manifest["num_tokens"]

    @property
    def num_documents(self) -> int:
        return self.manifest["num_documents"]

    @property
    def vocab_size(self) -> int:
        return self.manifest["vocab_size"]

    @property
    def eos_id(self) -> int:
        return self.manifest["eos_id"]

    @property
    def dtype(self) -> np.dtype:
        return DTYPES[self.manifest["dtype"]]

    @property
    def is_remote(self) -> bool:
        return self.files.is_remote

    @property
    def has_sums(self) -> bool:
        """Whether what is read is checked; shards of older releases have no sums of blocks."""
        return all("sums" in shard for shard in self.manifest["shards"])

    @cached_property
    def fingerprint(self) -> str:
        """Hex SHA-256 of what the ids are: dtype, tokenizer and every shard's checksum."""
        what = [self.manifest["dtype"], self.manifest["tokenizer"]["fingerprint"]]
        what += [shard["sha256"] for shard in self.manifest["shards"]]
        return hashlib.sha256("\n".join(what).encode()).hexdigest()

    def ids(self, number: int, start: int, stop: int) -> np.ndarray:
        """Return the ids at [start, stop) of one shard, read-only, counted from its start.

        Raises:
            ShardReadError: they are damaged, or a store does not give them.
        """
        return self.files.ids(number, start, stop)

    def shard(self, number: int) -> np.ndarray:
        """Return all ids of one shard, unchecked where that is quicker: `ids` is for training."""
        return self.files.shard(number)

    def read(self, start: int, out: np.ndarray) -> None:
        """Copy the ids at [start, start + len(out)) into `out`, (N,) of any integer dtype.

        Raises:
            IndexError: the range is not inside the source.
            ShardReadError: as `ids`.
        """
        stop = start + len(out)
        if start < 0 or stop > self.num_tokens:
            raise IndexError(f"tokens {start} to {stop} are outside of {self.num_tokens}")
        number = int(np.searchsorted(self.starts, start, side="right")) - 1
        while start < stop:
            first, end = int(self.starts[number]), int(self.starts[number + 1])
            upto = min(stop, end)
            filled = len(out) - (stop - start)
            out[filled : filled + upto - start] = self.ids(number, start - first, upto - first)
            start, number = upto, number + 1

    def ranges(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """Return where the ids at [start, stop) are: (shard, first id in it, end) each."""
        number = int(np.searchsorted(self.starts, start, side="right")) - 1
        found = []
        while start < stop:
            first, end = int(self.starts[number]), int(self.starts[number + 1])
            found.append((number, start - first, min(stop, end) - first))
            start, number = end, number + 1
        return found

    def document_ends(self, number: int) -> np.ndarray:
        """Return the ends of one shard's documents, (D,) uint64, counted from the shard's start."""
        return np.frombuffer(self.files.index(number), "<u8")

    def tokenizer_directory(self) -> Path:
        """Return where the copy of the tokenizer is on this machine, or would be.

        Raises:
            ShardReadError: a store does not give it.
        """
        return self.files.tokenizer_directory()


def open_source(directory: str | PurePath) -> Source:
    """Open a shard directory after checking its manifest and the size of each file.

    Args:
        directory: a path, or the URL of a directory in a store.

    Raises:
        ShardError: no manifest, another format, or a file that is missing or of another size;
            every problem is listed.
    """
    files: Any
    if isinstance(directory, Url) or is_url(str(directory)):
        directory = Url(directory)
        files = RemoteFiles.open(directory)
    else:
        directory = Path(directory)
        files = LocalFiles(directory, read_manifest(directory))
    if problems := files.problems():
        raise ShardError(problems)
    counts = [shard["num_tokens"] for shard in files.manifest["shards"]]
    starts = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
    return Source(directory, files.manifest, starts, files)


def verify(directory: str | PurePath) -> dict[str, Any]:
    """Check every checksum, id and document end of a shard directory and return its manifest.

    Raises:
        ShardError: each file whose content is not what the manifest says.
    """
    source = open_source(directory)
    problems = []
    for number in range(len(source.manifest["shards"])):
        problems += _shard_problems(source, number)
    if "input_files" in source.manifest:  # what the origins of documents point into
        problems += _input_files_problems(source)
    tokenizer = source.tokenizer_directory()
    for entry in source.manifest["tokenizer"].get("files", []):
        path = tokenizer / entry["file"]
        if not path.is_file():
            problems.append(f"{path}: the manifest lists it, but it is missing. Restore it.")
        elif (actual := sha256_file(path)) != entry["sha256"]:
            problems.append(_another_sum(path, actual, entry["sha256"]))
    if problems:
        raise ShardError(problems)
    return source.manifest


def _input_files_problems(source: Source) -> list[str]:
    entry = source.manifest["input_files"]
    path = source.directory / entry["file"]
    try:
        actual = hashlib.sha256(source.files.bytes_of(entry["file"])).hexdigest()
    except (OSError, ShardError):
        return [f"{path}: the manifest lists it, but it is missing. Restore it."]
    return [] if actual == entry["sha256"] else [_another_sum(path, actual, entry["sha256"])]


def _shard_problems(source: Source, number: int) -> list[str]:
    """Read all of a shard once, and say what of it is not what the manifest says, and where."""
    shard = source.manifest["shards"][number]
    problems, written = [], {}
    for key in ("index", *(key for key in SIDECARS if key in shard)):
        written[key] = source.files.sidecar(number, key)
        actual = hashlib.sha256(written[key]).hexdigest()
        if actual != shard[f"{key}_sha256"]:
            where = source.directory / shard[key]
            problems.append(_another_sum(where, actual, shard[f"{key}_sha256"]))
    ends = np.frombuffer(written["index"], "<u8").astype(np.int64)
    digest, sums, content = hashlib.sha256(), BlockSums(), _Content(source, number, ends)
    for start in range(0, shard["size_bytes"], VERIFY_CHUNK_BYTES):
        stop = min(start + VERIFY_CHUNK_BYTES, shard["size_bytes"])
        part = source.files.bytes_of(shard["file"], start, stop)
        digest.update(part)
        sums.update(part)
        content.look(np.frombuffer(part, source.dtype))
    if digest.hexdigest() != shard["sha256"]:
        blocks = ""
        if "sums" in written and not problems:
            differ = np.frombuffer(written["sums"], "<u8") != np.frombuffer(sums.content(), "<u8")
            wrong = np.flatnonzero(differ).tolist()
            blocks = f" in block {', '.join(map(str, wrong[:8]))} of 64 KiB" if wrong else ""
        where = source.directory / shard["file"]
        problems.append(_another_sum(where, digest.hexdigest(), shard["sha256"], blocks))
    return problems or content.problems()  # ids that are as they were written, but were they right?


def _another_sum(where: Any, actual: str, expected: str, blocks: str = "") -> str:
    return (
        f"{where}: SHA-256 {actual}, the manifest says {expected}. The file is damaged{blocks}: "
        f"restore it, or tokenize again."
    )


class _Content:
    """What is wrong with the ids of a shard, which come in order."""

    def __init__(self, source: Source, number: int, ends: np.ndarray):
        self.source, self.shard, self.ends = source, source.manifest["shards"][number], ends
        self.largest, self.seen, self.ended = 0, 0, True

    def look(self, tokens: np.ndarray) -> None:
        reach = [self.seen, self.seen + len(tokens)]
        first, last = np.searchsorted(self.ends, reach, side="right")
        inside = self.ends[first:last] - 1 - self.seen
        inside = inside[(inside >= 0) & (inside < len(tokens))]  # whatever a damaged index says
        self.ended &= bool((tokens[inside] == self.source.eos_id).all())
        self.largest = max(self.largest, int(tokens.max()))
        self.seen += len(tokens)

    def problems(self) -> list[str]:
        ends, index = self.ends, self.source.directory / self.shard["index"]
        if ends[-1] != self.seen or ends[0] < 1 or (np.diff(ends) < 1).any():
            return [f"{index}: document ends do not ascend to {self.seen}. Tokenize again."]
        eos_id, vocab_size, problems = self.source.eos_id, self.source.vocab_size, []
        if not self.ended:
            problems.append(f"{index}: a document does not end in id {eos_id}. Tokenize again.")
        if self.largest >= vocab_size:
            problems.append(
                f"{self.source.directory / self.shard['file']}: token id {self.largest} is not "
                f"below the vocabulary size {vocab_size}. Tokenize again."
            )
        return problems
