"""`ShardWriter`: write documents to a shard directory (format: docs/formats.md).

Every file is written under a temporary name, synced and renamed, and the manifest is written last,
so a killed writer leaves nothing that could be mistaken for data. It leaves a file `.unfinished`,
which allows the next writer to remove the other files.
"""

import contextlib
import hashlib
import os
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from zerolm.common.errors import ShardError
from zerolm.shards.checksums import ShardChecksums, write_sidecars
from zerolm.shards.directory import ShardDirectory
from zerolm.shards.manifest import new_manifest, token_dtype
from zerolm.shards.origins import ORIGINS_SUFFIX

DEFAULT_SHARD_TOKENS = 1 << 27  # 256 MiB as uint16: few files, each quick to copy and verify


class ShardWriter:
    """Writes documents that end in `eos_id` to a new shard directory; `close()` publishes it.

    As a context manager it publishes on a clean exit. After an exception or `abort()` it removes
    everything that it wrote.

    Args:
        directory: created if absent; otherwise it must be empty, or left by a writer that was
            killed.
        tokenizer: manifest entry of the tokenizer: `name`, `fingerprint`, and `files`, a list of
            objects with `file` (inside tokenizer/), `size_bytes` and `sha256`.
        shard_tokens: maximum number of tokens in a shard. Documents are never split; a document
            longer than a shard gets a shard of its own.
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
        assert 0 <= eos_id < vocab_size
        self.directory = Path(directory)
        self.vocab_size, self.eos_id, self.tokenizer = vocab_size, eos_id, tokenizer
        self.shard_tokens = shard_tokens
        self.dtype = token_dtype(vocab_size)
        self.num_tokens = self.num_documents = 0
        self.shards: list[dict[str, Any]] = []
        self._file: BinaryIO | None = None
        self._shard_tokens = 0
        self._locked = ShardDirectory(self.directory)
        self._locked.clear()

    @property
    def published(self) -> bool:
        """Whether the manifest has been written."""
        return self._locked.published

    def add(
        self,
        token_ids: np.ndarray,
        document_ends: np.ndarray | None = None,
        origins: np.ndarray | None = None,
    ) -> None:
        """Append documents.

        Args:
            token_ids: (N,) integers; each document ends in the EOS id.
            document_ends: (D,) end of each document in `token_ids`, ascending, with N as the last;
                by default all ids form one document.
            origins: (D,) origins packed by `zerolm.shards.origins.pack_origins`. Pass
                them for all documents or for none.
        """
        tokens = np.asarray(token_ids)
        ends = np.asarray([len(tokens)] if document_ends is None else document_ends, np.int64)
        assert len(ends) and ends[-1] == len(tokens), "document_ends must cover the token ids"
        assert (np.diff(ends, prepend=0) > 0).all(), "every document needs its EOS id"
        largest, smallest = int(tokens.max()), int(tokens.min())
        if largest >= self.vocab_size or smallest < 0:
            raise ShardError(
                f"{self.directory}: token id {largest if smallest >= 0 else smallest} is outside "
                f"the vocabulary of {self.vocab_size} ids: the tokenizer does not match its "
                "declared size. Use the tokenizer that made the ids."
            )
        tokens = tokens.astype(self.dtype, copy=False)
        start = first = 0  # the next token and the next document to write
        while first < len(ends):
            if self._file is None:
                self._open_shard()
            room = self.shard_tokens - self._shard_tokens
            last = int(np.searchsorted(ends, start + room, side="right"))
            if last <= first:  # the next document does not fit into the shard
                if self._shard_tokens > 0:
                    self.finish_shard()
                    continue
                last = first + 1
            stop = int(ends[last - 1])
            self._append(tokens[start:stop], ends[first:last] - start)
            if origins is not None:
                self._origins.append(np.asarray(origins[first:last], "<u8"))
            start, first = stop, last

    def _open_shard(self) -> None:
        self._name = f"shard-{len(self.shards):05d}"
        self._file = open(self.directory / f"{self._name}.bin.tmp", "wb")
        self._digest = hashlib.sha256()
        self._checksums = ShardChecksums()
        self._shard_tokens = 0
        self._ends: list[np.ndarray] = []
        self._origins: list[np.ndarray] = []

    def _append(self, tokens: np.ndarray, ends: np.ndarray) -> None:
        assert self._file is not None
        data = np.ascontiguousarray(tokens).view(np.uint8).data
        self._file.write(data)
        self._digest.update(data)
        self._checksums.update(data)
        self._ends.append(ends + self._shard_tokens)
        self._shard_tokens += len(tokens)
        self.num_tokens += len(tokens)
        self.num_documents += len(ends)

    def finish_shard(self) -> None:
        """Sync and rename the open shard, if any, so all documents added so far are on disk.

        With several writers, call this on all of them before the first `close()`, so everything
        that can fail happens before the first manifest is published.
        """
        if self._file is None:
            return
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._file = None
        stem = self.directory / self._name
        binary = stem.with_suffix(".bin")
        os.replace(f"{binary}.tmp", binary)
        ends = np.concatenate(self._ends).astype("<u8").tobytes()
        contents = [("index", ".idx", ends), *self._checksums.contents()]
        if self._origins:
            contents.append(("origins", ORIGINS_SUFFIX, np.concatenate(self._origins).tobytes()))
        self.shards.append(
            {
                "file": binary.name,
                "num_tokens": self._shard_tokens,
                "num_documents": len(ends) // 8,
                "size_bytes": self._shard_tokens * self.dtype.itemsize,
                "sha256": self._digest.hexdigest(),
                **write_sidecars(stem, contents),
            }
        )

    def close(self, **provenance: Any) -> dict[str, Any]:
        """Finish the last shard, publish the manifest, and return it.

        Args:
            provenance: further manifest keys, such as inputs and filter statistics.

        Raises:
            ShardError: no document has been added.
        """
        self.finish_shard()
        if not self.shards:
            raise ShardError(f"{self.directory}: no documents to write. Check --input.")
        manifest = new_manifest(
            self.vocab_size, self.eos_id, self.tokenizer, self.shards, **provenance
        )
        self._locked.publish(manifest)
        return manifest

    def abort(self) -> None:
        """Unless the manifest has been published, remove everything that was written."""
        if self._file is not None:
            with contextlib.suppress(OSError):  # on a full disk, buffered data cannot be written
                self._file.close()
            self._file = None
        self._locked.remove()

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(self, kind, error, traceback) -> None:
        try:
            if kind is None and not self.published:
                self.close()
        finally:
            self.abort()
