"""Token shards: the format on disk, its writer and its reader. Knows numpy, not torch.

A shard directory is one data source:

    manifest.json        published last; a directory without one is not data
    shard-00000.bin      little-endian token ids, uint16 when the vocabulary fits in it, else uint32
    shard-00000.idx      little-endian uint64: the end of each document in the shard, in tokens
    tokenizer/           the files of the tokenizer that made the ids

Every file is written under a temporary name, synced and renamed, so a killed writer leaves nothing
that could be taken for data. docs/formats.md describes each key.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from zerolm.errors import ShardError
from zerolm.files import sha256_file, sync_directory, write_atomically, write_json

FORMAT = "zerolm-shards"
VERSION = 1
MANIFEST = "manifest.json"
DEFAULT_SHARD_TOKENS = 1 << 27  # 256 MiB of uint16: few files, still quick to copy and to verify


def token_dtype(vocab_size: int) -> np.dtype:
    """Return the smallest of uint16 and uint32 that holds every id below `vocab_size`."""
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")


class ShardWriter:
    """Write documents to a new shard directory; `close()` publishes the manifest.

    Args:
        directory: created if absent; refused if it already holds a manifest.
        vocab_size: decides the dtype of the ids.
        eos_id: the id that ends every document.
        tokenizer: what the manifest says of the tokenizer: `name`, `fingerprint`, `files`.
        shard_tokens: a shard is closed before it would exceed this many tokens; a document is
            never split, so one longer than this has a shard of its own.

    As a context manager it publishes on a clean exit and leaves no manifest after an exception.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        vocab_size: int,
        eos_id: int,
        tokenizer: dict[str, Any],
        shard_tokens: int = DEFAULT_SHARD_TOKENS,
    ):
        self.directory = Path(directory)
        self.vocab_size, self.eos_id, self.tokenizer = vocab_size, eos_id, tokenizer
        self.shard_tokens = shard_tokens
        self.dtype = token_dtype(vocab_size)
        self.num_tokens = self.num_documents = 0
        self.shards: list[dict[str, Any]] = []
        if (self.directory / MANIFEST).exists():
            raise ShardError(
                f"{self.directory}: already holds token shards. Choose another --output, or remove "
                f"the directory to make them again."
            )
        self.directory.mkdir(parents=True, exist_ok=True)
        for debris in [*self.directory.glob("shard-*.bin*"), *self.directory.glob("shard-*.idx*")]:
            debris.unlink()  # a killed writer's; without a manifest they are not data
        self._file: BinaryIO | None = None

    def add(self, token_ids: np.ndarray, document_ends: np.ndarray | None = None) -> None:
        """Append documents.

        Args:
            token_ids: (N,) integers, each document ending in the EOS id.
            document_ends: (D,) ascending ends within `token_ids`, the last one N;
                by default the ids are one document.

        Raises:
            ShardError: an id at or above `vocab_size`.
        """
        tokens = np.asarray(token_ids)
        ends = np.asarray([len(tokens)] if document_ends is None else document_ends, np.uint64)
        assert len(ends) and ends[-1] == len(tokens), "document_ends must cover the token ids"
        if len(tokens) and (tokens.max() >= self.vocab_size or tokens.min() < 0):
            raise ShardError(
                f"{self.directory}: token id {tokens.max()} is not below the tokenizer's "
                f"vocabulary size {self.vocab_size}: it does not match its declared size."
            )
        tokens = tokens.astype(self.dtype, copy=False)
        start = 0
        for count in self._runs(ends):
            stop = int(ends[count - 1])
            self._append(tokens[start:stop], ends[:count] - np.uint64(start))
            start, ends = stop, ends[count:]

    def _runs(self, ends: np.ndarray) -> Iterator[int]:
        """Yield how many of the leading documents fit the open shard, rolling it when none do."""
        done = 0
        start = 0
        while done < len(ends):
            room = self.shard_tokens - self._shard_tokens_written()
            fits = int(np.searchsorted(ends[done:], np.uint64(start + max(room, 0)), side="right"))
            if fits == 0 and self._shard_tokens_written() > 0:
                self._finish_shard()
                continue
            fits = max(fits, 1)
            yield fits
            start = int(ends[done + fits - 1])
            done += fits

    def _shard_tokens_written(self) -> int:
        return self._shard_tokens if self._file is not None else 0

    def _append(self, tokens: np.ndarray, ends: np.ndarray) -> None:
        if self._file is None:
            self._name = f"shard-{len(self.shards):05d}"
            self._file = open(self.directory / f"{self._name}.bin.tmp", "wb")
            self._digest = hashlib.sha256()
            self._shard_tokens = 0
            self._ends: list[np.ndarray] = []
        data = tokens.tobytes()
        self._file.write(data)
        self._digest.update(data)
        self._ends.append(ends + np.uint64(self._shard_tokens))
        self._shard_tokens += len(tokens)
        self.num_tokens += len(tokens)
        self.num_documents += len(ends)

    def _finish_shard(self) -> None:
        if self._file is None:
            return
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._file = None
        binary, index = self.directory / f"{self._name}.bin", self.directory / f"{self._name}.idx"
        os.replace(f"{binary}.tmp", binary)
        ends = np.concatenate(self._ends).astype("<u8")
        write_atomically(index, lambda file: file.write(ends.tobytes()))
        self.shards.append(
            {
                "file": binary.name,
                "num_tokens": self._shard_tokens,
                "num_documents": len(ends),
                "size_bytes": self._shard_tokens * self.dtype.itemsize,
                "sha256": self._digest.hexdigest(),
                "index": index.name,
                "index_size_bytes": len(ends) * 8,
                "index_sha256": hashlib.sha256(ends.tobytes()).hexdigest(),
            }
        )

    def close(self, **provenance: Any) -> dict[str, Any]:
        """Finish the last shard and publish the manifest, which is returned.

        Args:
            provenance: further keys of the manifest: the inputs, what was filtered, and so on.

        Raises:
            ShardError: no document was added.
        """
        self._finish_shard()
        if not self.shards:
            raise ShardError(f"{self.directory}: no documents to write. Check --input.")
        manifest = {
            "format": FORMAT,
            "version": VERSION,
            "dtype": "uint16" if self.dtype.itemsize == 2 else "uint32",
            "vocab_size": self.vocab_size,
            "eos_id": self.eos_id,
            "num_tokens": self.num_tokens,
            "num_documents": self.num_documents,
            "tokenizer": self.tokenizer,
            "shards": self.shards,
            **provenance,
        }
        sync_directory(self.directory)
        write_json(self.directory / MANIFEST, manifest)
        return manifest

    def abort(self) -> None:
        """Close the open file without publishing anything."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(self, kind, error, traceback) -> None:
        if kind is not None:
            self.abort()
        elif not (self.directory / MANIFEST).exists():
            self.close()


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
    def vocab_size(self) -> int:
        return self.manifest["vocab_size"]

    @property
    def eos_id(self) -> int:
        return self.manifest["eos_id"]

    @property
    def dtype(self) -> np.dtype:
        return np.dtype("<u2" if self.manifest["dtype"] == "uint16" else "<u4")

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
    manifest = _read_manifest(directory)
    problems = []
    for shard in manifest["shards"]:
        for name, size in (
            (shard["file"], shard["size_bytes"]),
            (shard["index"], shard["index_size_bytes"]),
        ):
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


def _read_manifest(directory: Path) -> dict[str, Any]:
    path = directory / MANIFEST
    if not path.is_file():
        raise ShardError(
            f"{directory}: no {MANIFEST}, so this is not a token shard directory (or its "
            f"tokenization did not finish). Make one with: "
            f"python -m data_prep tokenize --output {directory} ..."
        )
    try:
        manifest = json.loads(path.read_text())
    except (ValueError, OSError) as error:
        raise ShardError(f"{path}: cannot be read as JSON ({error}). Tokenize again.") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise ShardError(f"{path}: format is not {FORMAT!r}. This is not a token shard directory.")
    if manifest.get("version") != VERSION:
        raise ShardError(
            f"{path}: version {manifest.get('version')!r}, this release reads version {VERSION}. "
            f"Tokenize again, or use the release that wrote it."
        )
    required = (
        "dtype",
        "vocab_size",
        "eos_id",
        "num_tokens",
        "num_documents",
        "tokenizer",
        "shards",
    )
    missing = [key for key in required if key not in manifest]
    if missing:
        raise ShardError(f"{path}: lacks {', '.join(missing)}. Tokenize again.")
    return manifest


def verify(directory: str | Path) -> dict[str, Any]:
    """Check every checksum and count of a shard directory and return its manifest.

    Raises:
        ShardError: each file whose content is not what the manifest says, with both hashes.
    """
    source = open_source(directory)
    problems = []
    for number, shard in enumerate(source.manifest["shards"]):
        for name, expected in (
            (shard["file"], shard["sha256"]),
            (shard["index"], shard["index_sha256"]),
        ):
            actual = sha256_file(source.directory / name)
            if actual != expected:
                problems.append(
                    f"{source.directory / name}: SHA-256 {actual}, the manifest says "
                    f"{expected}. The file is damaged: restore it, or tokenize again."
                )
        ends = source.document_ends(number)
        if len(ends) != shard["num_documents"] or int(ends[-1]) != shard["num_tokens"]:
            problems.append(
                f"{source.directory / shard['index']}: {len(ends)} documents ending at "
                f"token {int(ends[-1])}, the manifest says "
                f"{shard['num_documents']} and {shard['num_tokens']}. Tokenize again."
            )
    if source.num_tokens != sum(shard["num_tokens"] for shard in source.manifest["shards"]):
        problems.append(f"{source.directory / MANIFEST}: num_tokens is not the sum of its shards.")
    if problems:
        raise ShardError(problems)
    return source.manifest
