"""Writes token shards: documents in, a shard directory out. zerolm/shards.py has the format.

Every file is written under a temporary name, synced and renamed, and the manifest comes last, so a
killed writer leaves nothing that could be taken for data. It leaves `.unfinished`, which tells the
next writer that what lies there may be removed.
"""

import errno
import fcntl
import hashlib
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from zerolm.errors import ShardError
from zerolm.files import sync_directory, write_atomically, write_json
from zerolm.manifest import (
    FORMAT,
    MANIFEST,
    TOKENIZER_DIRECTORY,
    VERSION,
    token_dtype,
)

DEFAULT_SHARD_TOKENS = 1 << 27  # 256 MiB of uint16: few files, still quick to copy and to verify
UNFINISHED = ".unfinished"

_OUR_FILE = re.compile(r"shard-\d{5,}\.(bin|idx)(\.tmp)?|manifest\.json\.tmp")


def output_problems(directory: str | Path) -> list[str]:
    """Say why a new shard directory cannot be written there; an empty list when it can.

    Absent, empty, and left by a killed writer are all fine. Leaves nothing behind.
    """
    directory = Path(directory)
    if (directory / MANIFEST).exists():
        return [
            f"{directory}: already holds token shards. Choose another directory, or remove this "
            f"one to make them again."
        ]
    existing = directory
    while not os.path.lexists(existing):
        existing = existing.parent
    if not existing.is_dir():
        return [f"{directory}: {existing} is not a directory. Choose another directory."]
    try:  # os.access says yes to root, and on read-only mounts of some kinds
        Path(tempfile.mkdtemp(prefix=".zerolm-", dir=existing)).rmdir()
    except OSError as error:
        return [
            f"{directory}: {existing} is not writable ({error.strerror}). Choose another directory."
        ]
    if existing == directory and not (directory / UNFINISHED).exists():
        others = sorted(path.name for path in directory.iterdir())
        if others:
            return [
                f"{directory}: is not empty (it holds {others[0]!r}), and shards need a directory "
                f"of their own. Choose another directory."
            ]
    return []


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
        self.published = False
        self._file: BinaryIO | None = None
        self._shard_tokens = 0
        if problems := output_problems(self.directory):
            raise ShardError(problems)
        ladder = [self.directory, *self.directory.parents]
        self._created = [path for path in ladder if not path.exists()]
        self.directory.mkdir(parents=True, exist_ok=True)
        self._lock = _lock(self.directory)
        self._remove_unpublished()

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
        self._shard_tokens = 0
        self._ends: list[np.ndarray] = []

    def _append(self, tokens: np.ndarray, ends: np.ndarray) -> None:
        assert self._file is not None
        data = tokens.tobytes()
        self._file.write(data)
        self._digest.update(data)
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
        sync_directory(self.directory)
        write_json(self.directory / MANIFEST, manifest)
        self.published = True
        (self.directory / UNFINISHED).unlink()
        self._lock.close()
        return manifest

    def abort(self) -> None:
        """Remove everything that was written, unless the manifest is published."""
        if self.published or self._lock.closed:
            return
        if self._file is not None:
            self._file.close()
            self._file = None
        self._remove_unpublished()
        (self.directory / UNFINISHED).unlink(missing_ok=True)
        self._lock.close()
        for path in self._created:
            if any(path.iterdir()):  # somebody else's by now
                break
            path.rmdir()

    def _remove_unpublished(self) -> None:
        for path in self.directory.iterdir():
            if _OUR_FILE.fullmatch(path.name) and not path.is_dir():
                path.unlink()
        shutil.rmtree(self.directory / TOKENIZER_DIRECTORY, ignore_errors=True)

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(self, kind, error, traceback) -> None:
        try:
            if kind is None and not self.published:
                self.close()
        finally:
            self.abort()


def _lock(directory: Path) -> BinaryIO:
    """Mark a directory as unfinished and lock the mark; the kernel unlocks it if we are killed."""
    mark = open(directory / UNFINISHED, "ab")
    try:
        fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        mark.close()
        raise ShardError(
            f"{directory}: another process is writing shards there now. Wait for it, stop it, or "
            f"choose another directory."
        ) from None
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK):
            raise
        # A file system without locks: nothing keeps a second writer out, as on most of them.
    return mark
