"""`Store`: a run's copy in an object store, with checkpoints at `URL/step-00001000/`.

A checkpoint is complete once its manifest exists. `Store` is a thin layer over fsspec, which
supports s3://, gs://, hf:// and file://. Files are hashed while they are streamed in pieces, so
memory use does not grow with the checkpoint. Failed calls are retried a few times. The store's own
library finds the credentials, which are refused in URLs and removed from messages.
"""

import contextlib
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypedDict

from zerolm.checkpoint.checksums import HASHERS, Checksum
from zerolm.common.errors import RecordError
from zerolm.common.records import Count, parse_record
from zerolm.common.store import (
    ATTEMPTS,
    CHUNK_BYTES,
    MAX_PIECES,
    PIECE_BYTES,
    Mismatch,
    Missing,
    T,
    retried,
    store_options,
)
from zerolm.config.settings import TRACKERS
from zerolm.evaluate import OUTCOMES
from zerolm.run_dir.files import CHECKPOINT_NAME, MANIFEST, RunFiles, checkpoint_step
from zerolm.tracking.tracker import tracker_class

RECORD_DIRECTORY = "record"  # contains run.json and the logs from when the checkpoint was sent
CHECKSUMS = f"{RECORD_DIRECTORY}/CHECKSUMS.json"
LISTING_STREAMS = 16
UNREADABLE = 1 << 62  # sorts after any number of rollbacks


class _Progress(TypedDict, total=False):
    rollbacks: Count


class _Marker(TypedDict):
    """The part of a checkpoint's manifest that this module reads."""

    progress: _Progress


def record_files(directory: Path) -> list[str]:
    """Return the names of all files that a run's record may contain.

    Args:
        directory: run directory, or a copy of a run's record; searched for archived metrics.
    """
    files = RunFiles(directory)
    state = [
        files.tracker(name) / file for name in TRACKERS for file in tracker_class(name).state_files
    ]
    logs = files.earlier_console, files.console
    written = (*files.record_files(OUTCOMES), *logs, *state)
    return [str(path.relative_to(directory)) for path in written]


class Store:
    """A run's copy in an object store.

    Args:
        url: URL with a scheme and without credentials; no other run may use it.
        progress: called whenever data is transferred, so the caller can detect a hang.
        attempts: number of attempts for each call before it raises a StoreError.
    """

    def __init__(
        self, url: str, progress: Callable[[], None] = lambda: None, attempts: int = ATTEMPTS
    ):
        import fsspec

        self.url, self.attempts = url.rstrip("/"), attempts
        self._progress = progress
        scheme = url.partition("://")[0]
        self._has_directories = scheme in ("file", "local", "memory")
        self._fs, self._root = fsspec.core.url_to_fs(self.url, **store_options(scheme))
        if hasattr(self._fs, "retries"):
            self._fs.retries = 1  # for s3fs, as botocore's and our own retries suffice

    # ---- List and read

    def steps(self) -> list[str]:
        """Return the names of all step directories, complete or incomplete, ordered by step.

        Raises:
            StoreError: the store or its bucket cannot be read.
        """
        names = [name for name in self._names() if CHECKPOINT_NAME.fullmatch(name)]
        return sorted(names, key=checkpoint_step)

    def _names(self) -> list[str]:
        def names() -> list[str]:
            self._fs.invalidate_cache()
            try:
                listed = self._fs.ls(self._root, detail=False)
            except FileNotFoundError:  # an empty prefix or a missing bucket
                bucket = self._root.strip("/").split("/")[0]
                if not self._has_directories:
                    self._fs.ls(bucket, detail=False)
                return []
            return [str(path).rstrip("/").rpartition("/")[2] for path in listed]

        return self._tried(self.url, names)

    def files(self, step: str) -> dict[str, int]:
        """Return {name: size in bytes} for the files in a step directory."""

        def files() -> dict[str, int]:
            self._fs.invalidate_cache()
            try:
                found = self._fs.find(f"{self._root}/{step}", detail=True)
            except FileNotFoundError:
                return {}
            start = f"{self._root}/{step}/".lstrip("/")
            return {
                path.lstrip("/").removeprefix(start): int(entry["size"])
                for path, entry in found.items()
            }

        return self._tried(f"{self.url}/{step}", files)

    def read(self, name: str) -> bytes:
        """Return the contents of a small object.

        Raises:
            Missing: the object does not exist.
        """
        return self._tried(f"{self.url}/{name}", lambda: self._fs.cat_file(self._path(name)))

    def complete(self, damaged: bool = True) -> list[str]:
        """Return the names of the complete steps, in training order.

        After a rollback, this order differs from the order of the step numbers.

        Args:
            damaged: whether to include steps with an unreadable manifest, at the end.
        """
        steps = self.steps()
        with ThreadPoolExecutor(LISTING_STREAMS) as pool:
            markers = list(pool.map(self.marker, steps))
        found = [
            (_num_rollbacks(marker), number, step)
            for number, (step, marker) in enumerate(zip(steps, markers, strict=True))
            if marker is not None
        ]
        return [step for count, _, step in sorted(found) if damaged or count != UNREADABLE]

    def marker(self, step: str) -> bytes | None:
        """Return a step's manifest, or None if the step is not complete."""
        try:
            return self.read(f"{step}/{MANIFEST}")
        except Missing:
            return None

    # ---- Send, fetch and delete

    def send(self, source: Path, name: str, checksum: Checksum) -> None:
        """Copy a file into the store.

        Raises:
            Mismatch: the file is damaged, as its checksum differs from `checksum`.
        """
        size = source.stat().st_size
        piece = max(PIECE_BYTES, -(-size // MAX_PIECES))

        def send() -> str:
            digest = HASHERS[checksum.kind]()
            with open(source, "rb") as file:
                target = self._fs.open(self._path(name), "wb", block_size=piece)
                try:
                    while chunk := file.read(CHUNK_BYTES):
                        digest.update(chunk)
                        target.write(chunk)
                        self._progress()
                    target.close()
                except BaseException:
                    _discard(target)
                    raise
            return digest.hexdigest()

        actual = checksum._replace(digest=self._tried(f"{self.url}/{name}", send))
        if actual != checksum:
            raise Mismatch(f"{source}: {actual}, but the manifest says {checksum.digest}")

    def write(self, name: str, content: bytes) -> None:
        """Write a small object in one call."""
        self._tried(f"{self.url}/{name}", lambda: self._fs.pipe_file(self._path(name), content))

    def fetch(self, name: str, target: Path, checksum: Checksum, size: int) -> None:
        """Copy an object to a new file, and sync the file to disk.

        Raises:
            Mismatch: the object is missing, or has a different size or checksum.
        """

        def fetch() -> tuple[int, str]:
            digest, count = HASHERS[checksum.kind](), 0
            with (
                self._fs.open(self._path(name), "rb", block_size=PIECE_BYTES) as source,
                open(target, "wb") as file,
            ):
                while chunk := source.read(CHUNK_BYTES):
                    digest.update(chunk)
                    file.write(chunk)
                    count += len(chunk)
                    self._progress()
                file.flush()
                os.fsync(file.fileno())
            return count, digest.hexdigest()

        where = f"{self.url}/{name}"
        try:
            count, found = self._tried(where, fetch)
        except Missing as error:
            raise Mismatch(f"{where}: missing; the manifest lists {size} bytes") from error
        if count != size:
            raise Mismatch(f"{where}: {count} bytes, but the manifest says {size}")
        if (actual := checksum._replace(digest=found)) != checksum:
            raise Mismatch(f"{where}: {actual}, but the manifest says {checksum.digest}")

    def remove(self, step: str) -> None:
        """Delete a step, starting with its manifest so a partial step never counts as complete."""
        files = self.files(step)
        for name in sorted(files, key=lambda name: name != MANIFEST):
            self.remove_file(f"{step}/{name}")
        if self._has_directories:
            self._tried(f"{self.url}/{step}", lambda: self._fs.rm(self._path(step), True))

    def remove_file(self, name: str) -> None:
        """Delete an object if it exists."""

        def remove() -> None:
            with contextlib.suppress(FileNotFoundError):  # deleted by an earlier attempt
                self._fs.rm_file(self._path(name))

        self._tried(f"{self.url}/{name}", remove)

    # ---- Attempts

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _tried(self, where: str, call: Callable[[], T]) -> T:
        """Return the result of a call, retrying it a few times.

        Raises:
            Missing: the object does not exist.
            StoreError: the last attempt failed, or the failure is permanent.
        """

        def attempt() -> T:
            self._progress()
            return call()

        return retried(where, attempt, attempts=self.attempts, first_pause_seconds=1.0)


def _num_rollbacks(marker: bytes) -> int:
    """Return the number of rollbacks before a checkpoint, or UNREADABLE for a damaged manifest."""
    try:
        return parse_record(marker, MANIFEST, _Marker)["progress"].get("rollbacks", 0)
    except RecordError:
        return UNREADABLE


def _discard(target: Any) -> None:
    """Abort a partial upload; otherwise the file's finalizer would store it as an object."""
    with contextlib.suppress(Exception):
        target.discard()
    with contextlib.suppress(Exception):
        target.closed = True
