"""Writes token shards: documents in, a shard directory out. zerolm/shards.py has the format.

Every file is written under a temporary name, synced and renamed, and the manifest comes last, so a
killed writer leaves nothing that could be taken for data. It leaves `.unfinished`, which tells the
next writer that what lies there may be removed.
"""

import hashlib
import os
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from zerolm.block_sums import SUMS_SUFFIX, BlockSums
from zerolm.errors import ShardError
from zerolm.files import write_atomically
from zerolm.manifest import FORMAT, VERSION, token_dtype
from zerolm.shard_directory import ShardDirectory

DEFAULT_SHARD_TOKENS = 1 << 27  # 256 MiB of uint16: few files, still quick to copy and to verify


class ShardWriter:
    """Write documents to a new shard directory; `close()` publishes the manifest.

    Args:
        directory: created if absent; it must be empty, or left by a writer that was killed.
        vocab_size: decides the dtype of the ids.
        eos_id: the id that ends every document.
        tokenizer: what the manifest says of the tokenizer: `name`, `fingerprint`, and `files`, a
            list of objects with `file` (inside tokenizer/), `size_bytes` and `sha256`.
        shard_tokens: a shard is closed before it would exceed this many tokens; a document is
            never split, so one longer than this has a shard of its own.

    As a context manager it publishes on a clean exit; after an exception, or `abort()`, nothing
    that it wrote is left.

    Raises:
        ShardError: the directory cannot be written, holds other files, or another process is
            writing to it.
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
        assert 0 <= eos_id < vocab_size and shard_tokens > 0
        self.directory = Path(directory)
        self.vocab_size, self.eos_id, self.tokenizer = vocab_size, eos_id, tokenizer
        self.shard_tokens = shard_tokens
        self.dtype = token_dtype(vocab_size)
        self.num_tokens = self.num_documents = 0
        self.shards: list[dict[str, Any]] = []
        self._file: BinaryIO | None = None
        self._shard_tokens = 0
        self._claim = ShardDirectory(self.directory)
        self._claim.clear()

    @property
    def published(self) -> bool:
        """Whether the manifest is there."""
        return self._claim.published

    def add(self, token_ids: np.ndarray, document_ends: np.ndarray | None = None) -> None:
        """Append documents.

        Args:
            token_ids: (N,) integers, each document ending in the EOS id.
            document_ends: (D,) ascending ends within `token_ids`, the last one N;
                by default the ids are one document.

        Raises:
            ShardError: an id below zero, or at or above `vocab_size`.
        """
        tokens = np.asarray(token_ids)
        ends = np.asarray([len(tokens)] if document_ends is None else document_ends, np.int64)
        assert len(ends) and ends[-1] == len(tokens), "document_ends must cover the token ids"
        assert ends[0] > 0 and (np.diff(ends) > 0).all(), "every document needs its EOS id"
        largest, smallest = int(tokens.max()), int(tokens.min())
        if largest >= self.vocab_size or smallest < 0:
            raise ShardError(
                f"{self.directory}: token id {largest if smallest >= 0 else smallest} is outside "
                f"of the vocabulary of {self.vocab_size}: the tokenizer does not match its "
                f"declared size. Use the tokenizer that made the ids."
            )
        tokens = tokens.astype(self.dtype, copy=False)
        start = first = 0  # the next token and the next document that are not written yet
        while first < len(ends):
            if self._file is None:
                self._open_shard()
            room = self.shard_tokens - self._shard_tokens
            last = int(np.searchsorted(ends, start + room, side="right"))
            if last <= first:  # not even one document fits
                if self._shard_tokens > 0:
                    self.finish_shard()
                    continue
                last = first + 1
            stop = int(ends[last - 1])
            self._append(tokens[start:stop], ends[first:last] - start)
            start, first = stop, last

    def _open_shard(self) -> None:
        self._name = f"shard-{len(self.shards):05d}"
        self._file = open(self.directory / f"{self._name}.bin.tmp", "wb")
        self._digest = hashlib.sha256()
        self._sums = BlockSums()
        self._shard_tokens = 0
        self._ends: list[np.ndarray] = []

    def _append(self, tokens: np.ndarray, ends: np.ndarray) -> None:
        assert self._file is not None
        data = tokens.tobytes()
        self._file.write(data)
        self._digest.update(data)
        self._sums.update(data)
        self._ends.append(ends + self._shard_tokens)
        self._shard_tokens += len(tokens)
        self.num_tokens += len(tokens)
        self.num_documents += len(ends)

    def finish_shard(self) -> None:
        """Sync and rename the open shard, so that all documents so far are on disk; or do nothing.

        Before `close()` of several writers: what can fail has then happened before the first
        manifest is published.
        """
        if self._file is None:
            return
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._file = None
        binary, index = self.directory / f"{self._name}.bin", self.directory / f"{self._name}.idx"
        os.replace(f"{binary}.tmp", binary)
        ends = np.concatenate(self._ends).astype("<u8").tobytes()
        write_atomically(index, lambda file: file.write(ends))
        self.shards.append(
            {
                "file": binary.name,
                "num_tokens": self._shard_tokens,
                "num_documents": len(ends) // 8,
                "size_bytes": self._shard_tokens * self.dtype.itemsize,
                "sha256": self._digest.hexdigest(),
                "index": index.name,
                "index_size_bytes": len(ends),
                "index_sha256": hashlib.sha256(ends).hexdigest(),
                **self._sums.write(self.directory / f"{self._name}{SUMS_SUFFIX}"),
            }
        )

    def close(self, **provenance: Any) -> dict[str, Any]:
        """Finish the last shard and publish the manifest, which is returned.

        Args:
            provenance: further keys of the manifest: the inputs, what was filtered, and so on.

        Raises:
            ShardError: no document was added.
        """
        self.finish_shard()
        if not self.shards:
            raise ShardError(f"{self.directory}: no documents to write. Check --input.")
        manifest = {
            "format": FORMAT,
            "version": VERSION,
            "dtype": self.dtype.name,
            "vocab_size": self.vocab_size,
            "eos_id": self.eos_id,
            "num_tokens": self.num_tokens,
            "num_documents": self.num_documents,
            "tokenizer": self.tokenizer,
            "shards": self.shards,
            **provenance,
        }
        self._claim.publish(manifest)
        return manifest

    def abort(self) -> None:
        """Remove everything that was written, unless the manifest is published."""
        if self._file is not None:
            self._file.close()
            self._file = None
        self._claim.remove()

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(self, kind, error, traceback) -> None:
        try:
            if kind is None and not self.published:
                self.close()
        finally:
            self.abort()
