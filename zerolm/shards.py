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
from pathlib import Path
from typing import Any

import numpy as np

from zerolm.errors import ShardError
from zerolm.files import sha256_file
from zerolm.manifest import (
    DTYPES,
    MANIFEST,
    TOKENIZER_DIRECTORY,
    files_of,
    read_manifest,
    token_dtype,
)
from zerolm.shard_directory import output_problems
from zerolm.shard_writer import DEFAULT_SHARD_TOKENS, ShardWriter

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

VERIFY_CHUNK_TOKENS = 1 << 22


@dataclass(frozen=True)
class Source:
    """One shard directory, opened for reading: a single stream of `num_tokens` ids.

    Token positions run over all shards in manifest order.
    """

    directory: Path
    manifest: dict[str, Any]
    starts: np.ndarray  # (S + 1,) int64: first token position of each shard, then num_tokens
    _maps: dict[int, np.ndarray]

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
    def fingerprint(self) -> str:
        """Hex SHA-256 of what the ids are: dtype, tokenizer and every shard's checksum."""
        what = [self.manifest["dtype"], self.manifest["tokenizer"]["fingerprint"]]
        what += [shard["sha256"] for shard in self.manifest["shards"]]
        return hashlib.sha256("\n".join(what).encode()).hexdigest()

    def shard(self, number: int) -> np.ndarray:
        """Return a shard's ids, memory-mapped, as a plain read-only array; opened on first use."""
        if number not in self._maps:
            path = self.directory / self.manifest["shards"][number]["file"]
            # A plain ndarray view: slicing np.memmap itself costs 2 us of subclass bookkeeping.
            self._maps[number] = np.memmap(path, self.dtype, mode="r").view(np.ndarray)
        return self._maps[number]

    def read(self, start: int, out: np.ndarray) -> None:
        """Copy the ids at [start, start + len(out)) into `out`, (N,) of any integer dtype.

        Raises:
            IndexError: the range is not inside the source.
        """
        stop = start + len(out)
        if start < 0 or stop > self.num_tokens:
            raise IndexError(f"tokens {start} to {stop} are outside of {self.num_tokens}")
        number = int(np.searchsorted(self.starts, start, side="right")) - 1
        while start < stop:
            first, end = int(self.starts[number]), int(self.starts[number + 1])
            upto = min(stop, end)
            filled = len(out) - (stop - start)
            out[filled : filled + upto - start] = self.shard(number)[start - first : upto - first]
            start, number = upto, number + 1

    def document_ends(self, number: int) -> np.ndarray:
        """Return the ends of one shard's documents, (D,) uint64, counted from the shard's start."""
        return np.fromfile(self.directory / self.manifest["shards"][number]["index"], "<u8")

    def __getstate__(self):  # maps are not sent to loader workers; each opens its own
        return {"directory": self.directory, "manifest": self.manifest, "starts": self.starts}

    def __setstate__(self, state):
        for name, value in {**state, "_maps": {}}.items():
            object.__setattr__(self, name, value)


def open_source(directory: str | Path) -> Source:
    """Open a shard directory after checking its manifest and the size of each file.

    Raises:
        ShardError: no manifest, another format, or a file that is missing or of another size;
            every problem is listed.
    """
    directory = Path(directory)
    manifest = read_manifest(directory)
    problems = []
    for shard in manifest["shards"]:
        for name, size, _ in files_of(shard):
            path = directory / name
            if not path.is_file():
                problems.append(
                    f"{path}: the manifest lists it, but it is missing. Restore it, or "
                    f"tokenize again."
                )
            elif path.stat().st_size != size:
                problems.append(
                    f"{path}: {path.stat().st_size} bytes, the manifest says {size}. "
                    f"The file was cut or overwritten: restore it, or tokenize again."
                )
    if problems:
        raise ShardError(problems)
    counts = [shard["num_tokens"] for shard in manifest["shards"]]
    starts = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
    return Source(directory, manifest, starts, {})


def verify(directory: str | Path) -> dict[str, Any]:
    """Check every checksum, id and document end of a shard directory and return its manifest.

    Raises:
        ShardError: each file whose content is not what the manifest says.
    """
    source = open_source(directory)
    problems = []
    expected = [
        (name, checksum)
        for shard in source.manifest["shards"]
        for name, _, checksum in files_of(shard)
    ]
    expected += [
        (f"{TOKENIZER_DIRECTORY}/{entry['file']}", entry["sha256"])
        for entry in source.manifest["tokenizer"].get("files", [])
    ]
    if "input_files" in source.manifest:  # what the origins of documents point into
        entry = source.manifest["input_files"]
        expected.append((entry["file"], entry["sha256"]))
    for name, checksum in expected:
        path = source.directory / name
        if not path.is_file():
            problems.append(f"{path}: the manifest lists it, but it is missing. Restore it.")
        elif (actual := sha256_file(path)) != checksum:
            problems.append(
                f"{path}: SHA-256 {actual}, the manifest says {checksum}. The file is damaged: "
                f"restore it, or tokenize again."
            )
    if not problems:  # ids that are as they were written, but were they right?
        for number in range(len(source.manifest["shards"])):
            problems += _wrong_content(source, number)
    if problems:
        raise ShardError(problems)
    return source.manifest


def _wrong_content(source: Source, number: int) -> list[str]:
    shard, tokens = source.manifest["shards"][number], source.shard(number)
    ends = source.document_ends(number).astype(np.int64)
    index = source.directory / shard["index"]
    if ends[-1] != len(tokens) or ends[0] < 1 or (np.diff(ends) < 1).any():
        return [f"{index}: document ends do not ascend to {len(tokens)}. Tokenize again."]
    problems = []
    if not (tokens[ends - 1] == source.eos_id).all():
        problems.append(f"{index}: a document does not end in id {source.eos_id}. Tokenize again.")
    chunks = range(0, len(tokens), VERIFY_CHUNK_TOKENS)
    largest = max(int(tokens[start : start + VERIFY_CHUNK_TOKENS].max()) for start in chunks)
    if largest >= source.vocab_size:
        problems.append(
            f"{source.directory / shard['file']}: token id {largest} is not below the vocabulary "
            f"size {source.vocab_size}. Tokenize again."
        )
    return problems
