"""The copy of a run in an object store: `URL/step-00001000/`, whole once its manifest is there.

A thin layer over fsspec, so that s3://, gs://, hf:// and file:// are all the same here. Files are
streamed in pieces, with their SHA-256 taken on the way, so memory does not grow with a checkpoint.
Every call may fail and is repeated a few times; none may hang for ever. Credentials come from where
the store's own library looks for them; a URL that carries some is refused, and messages are cleared
of them. Knows nothing of runs: zerolm/uploads.py fills a store, zerolm/restore.py reads it.
"""

import contextlib
import hashlib
import json
import os
import random
import re
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from zerolm.checkpoint_directory import MANIFEST, PREFIX

RECORD_DIRECTORY = "record"  # run.json and the logs, as they were when the checkpoint was sent
CHECKSUMS = f"{RECORD_DIRECTORY}/CHECKSUMS.json"
RECORD_FILES = (
    "run.json", "rollbacks.json", "metrics.jsonl", "events.jsonl", "samples.jsonl",
    "hellaswag.json", "wandb/run.json",
)  # fmt: skip
RECORD_PATTERN = "metrics-rolled-back-*.jsonl"
# Pieces of a multipart upload: S3 takes 10,000 of at least 5 MiB. A few of them are in memory for
# each file that is being sent.
PIECE_BYTES = 16 << 20
MOST_PIECES = 9000
CHUNK_BYTES = 4 << 20
ATTEMPTS = 3
LONGEST_PAUSE_SECONDS = 30.0
LISTING_STREAMS = 16
CONNECT_SECONDS, READ_SECONDS = 10, 30
OFF = "off"
UNREADABLE = 1 << 62
STEP = re.compile(rf"^{PREFIX}\d{{8,}}$")
SECRET_NAMES = re.compile(r"SECRET|TOKEN|PASSWORD|CREDENTIAL|API_KEY|ACCESS_KEY|ACCOUNT_KEY|SAS")

T = TypeVar("T")


class StoreError(Exception):
    """A store that did not do what it was asked, after every attempt. One line, without secrets."""


class Missing(StoreError):
    """There is no such object."""


class Mismatch(StoreError):
    """A file's content is not what the manifest says. Another attempt would not help."""


def shown_error(error: BaseException, environment: Mapping[str, str] = os.environ) -> str:
    """Return an error as one short line from which the environment's secrets are removed."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    for name, value in environment.items():
        if len(value) >= 8 and SECRET_NAMES.search(name.upper()):
            text = text.replace(value, "***")
    return text if len(text) <= 300 else text[:297] + "..."


def within(seconds: float, call: Callable[[], T]) -> T:
    """Return what `call` returns, or raise a StoreError when it takes longer.

    A library that hangs cannot be interrupted: its thread is left behind, as a daemon.
    """
    answer: list[T] = []
    failure: list[Exception] = []

    def run() -> None:
        try:
            answer.append(call())
        except Exception as error:
            failure.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if failure:
        raise failure[0]
    if not answer:
        raise StoreError(f"no answer within {seconds:.0f} s")
    return answer[0]


class Store:
    """One run's place in an object store.

    Args:
        url: with a scheme, without credentials; it holds nothing but this run.
        pulse: called whenever something moved, so that a caller can tell slow from dead.
        attempts: how often a call is tried before it is a StoreError.
    """

    def __init__(
        self, url: str, pulse: Callable[[], None] = lambda: None, attempts: int = ATTEMPTS
    ):
        import fsspec

        self.url, self.attempts = url.rstrip("/"), attempts
        self._pulse = pulse
        scheme = url.partition("://")[0]
        self._has_directories = scheme in ("file", "local", "memory")
        self._fs, self._root = fsspec.core.url_to_fs(self.url, **store_options(scheme))
        if hasattr(self._fs, "retries"):
            self._fs.retries = 1  # s3fs: those of botocore and ours are known in time

    # ---- What is there

    def steps(self) -> list[str]:
        """Return the names of the step directories, oldest first, whole or not.

        Raises:
            StoreError: the store, or its bucket, cannot be read.
        """
        names = [name for name in self._names() if STEP.match(name)]
        return sorted(names, key=lambda name: int(name.removeprefix(PREFIX)))

    def _names(self) -> list[str]:
        def names() -> list[str]:
            self._fs.invalidate_cache()
            try:
                listed = self._fs.ls(self._root, detail=False)
            except FileNotFoundError:  # an empty prefix, or not even a bucket
                bucket = self._root.strip("/").split("/")[0]
                if not self._has_directories:
                    self._fs.ls(bucket, detail=False)
                return []
            return [str(path).rstrip("/").rpartition("/")[2] for path in listed]

        return self._tried(self.url, names)

    def files(self, step: str) -> dict[str, int]:
        """Return {name: bytes} of what is below a step."""

        def files() -> dict[str, int]:
            self._fs.invalidate_cache()
            try:
                found = self._fs.find(f"{self._root}/{step}", detail=True)
            except FileNotFoundError:
                return {}
            start = f"{self._root}/{step}/".lstrip("/")
            return {
                path.lstrip("/").removeprefix(start): int(about["size"])
                for path, about in found.items()
            }

        return self._tried(f"{self.url}/{step}", files)

    def read(self, name: str) -> bytes:
        """Return a small object.

        Raises:
            Missing: there is none.
        """
        return self._tried(f"{self.url}/{name}", lambda: self._fs.cat_file(self._path(name)))

    def whole(self, damaged: bool = True) -> list[str]:
        """Return the names of the whole steps in the order of time, which rollbacks turn back.

        Args:
            damaged: also those whose manifest cannot be read, as the newest.
        """
        steps = self.steps()
        with ThreadPoolExecutor(LISTING_STREAMS) as pool:
            markers = list(pool.map(self.marker, steps))
        found = [
            (_rollbacks(marker), number, step)
            for number, (step, marker) in enumerate(zip(steps, markers, strict=True))
            if marker is not None
        ]
        return [step for back, _, step in sorted(found) if damaged or back != UNREADABLE]

    def marker(self, step: str) -> bytes | None:
        """Return the manifest of a step, None when the step is not whole."""
        try:
            return self.read(f"{step}/{MANIFEST}")
        except Missing:
            return None

    # ---- Moving files

    def send(self, source: Path, name: str, sha256: str | None = None) -> str:
        """Copy a file into the store and return its SHA-256.

        Raises:
            Mismatch: the file's own content is not `sha256`; what was sent of it is not whole.
        """
        size = source.stat().st_size
        piece = max(PIECE_BYTES, -(-size // MOST_PIECES))

        def send() -> str:
            digest = hashlib.sha256()
            with open(source, "rb") as file:
                target = self._fs.open(self._path(name), "wb", block_size=piece)
                try:
                    while chunk := file.read(CHUNK_BYTES):
                        digest.update(chunk)
                        target.write(chunk)
                        self._pulse()
                    target.close()
                except BaseException:
                    _discard(target)
                    raise
            return digest.hexdigest()

        actual = self._tried(f"{self.url}/{name}", send)
        if sha256 is not None and actual != sha256:
            raise Mismatch(f"{source}: SHA-256 {actual}, the manifest says {sha256}")
        return actual

    def write(self, name: str, content: bytes) -> None:
        """Write a small object in one call."""
        self._tried(f"{self.url}/{name}", lambda: self._fs.pipe_file(self._path(name), content))

    def fetch(self, name: str, target: Path, sha256: str, size: int) -> None:
        """Copy an object to a new file, synced to disk.

        Raises:
            Mismatch: its content has another size or SHA-256, or there is no such object.
        """

        def fetch() -> tuple[int, str]:
            digest, count = hashlib.sha256(), 0
            with (
                self._fs.open(self._path(name), "rb", block_size=PIECE_BYTES) as source,
                open(target, "wb") as file,
            ):
                while chunk := source.read(CHUNK_BYTES):
                    digest.update(chunk)
                    file.write(chunk)
                    count += len(chunk)
                    self._pulse()
                file.flush()
                os.fsync(file.fileno())
            return count, digest.hexdigest()

        where = f"{self.url}/{name}"
        try:
            count, actual = self._tried(where, fetch)
        except Missing as error:
            raise Mismatch(f"{where}: missing; the manifest lists {size} bytes") from error
        if count != size:
            raise Mismatch(f"{where}: {count} bytes, the manifest says {size}")
        if actual != sha256:
            raise Mismatch(f"{where}: SHA-256 {actual}, the manifest says {sha256}")

    def remove(self, step: str) -> None:
        """Delete a step; its manifest first, so that it never looks whole half-way."""
        files = self.files(step)
        for name in sorted(files, key=lambda name: name != MANIFEST):
            self.remove_file(f"{step}/{name}")
        if self._has_directories:
            self._tried(f"{self.url}/{step}", lambda: self._fs.rm(self._path(step), True))

    def remove_file(self, name: str) -> None:
        """Delete an object, if it is there."""

        def remove() -> None:
            with contextlib.suppress(FileNotFoundError):  # an attempt before has done it
                self._fs.rm_file(self._path(name))

        self._tried(f"{self.url}/{name}", remove)

    # ---- Attempts

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _tried(self, where: str, call: Callable[[], T]) -> T:
        """Call until it works, with growing pauses; say at last why it did not."""
        for attempt in range(1, self.attempts + 1):
            self._pulse()
            try:
                return call()
            except FileNotFoundError as error:
                raise Missing(f"{where}: not there ({shown_error(error)})") from None
            except Exception as error:
                if is_final(error) or attempt == self.attempts:
                    tries = f" ({attempt} attempts)" if attempt > 1 else ""
                    raise StoreError(f"{where}: {shown_error(error)}{tries}") from None
            pause = min(LONGEST_PAUSE_SECONDS, 2.0 ** (attempt - 1))
            time.sleep(pause * random.uniform(0.5, 1.0))
        raise AssertionError("the last attempt returns or raises")


def is_final(error: Exception) -> bool:
    """Tell errors that another attempt cannot change: no rights, no credentials, no such bucket."""
    name = type(error).__name__
    return isinstance(error, (PermissionError, NotADirectoryError)) or "Credential" in name


def _rollbacks(marker: bytes) -> int:
    """Return how many rollbacks a checkpoint has behind it, UNREADABLE when it cannot say."""
    try:
        return int(json.loads(marker)["progress"].get("rollbacks", 0))
    except (ValueError, KeyError, TypeError, AttributeError):
        return UNREADABLE


def _discard(target: Any) -> None:
    """Forget a file that was sent in part; its finalizer would make an object of what there is."""
    with contextlib.suppress(Exception):
        target.discard()
    with contextlib.suppress(Exception):
        target.closed = True


def store_options(scheme: str) -> dict[str, Any]:
    """Return what fsspec's own configuration does not say: short timeouts, no stale listings."""
    import fsspec

    options: dict[str, Any] = {"use_listings_cache": False}
    if scheme in ("s3", "s3a"):
        theirs = fsspec.config.conf.get("s3", {}).get("config_kwargs", {})
        ours = {
            "connect_timeout": CONNECT_SECONDS,
            "read_timeout": READ_SECONDS,
            # Of one piece; else a file of many would begin again for each that fails.
            "retries": {"mode": "standard", "total_max_attempts": ATTEMPTS},
        }
        options["config_kwargs"] = {**ours, **theirs}
    if scheme in ("file", "local"):
        options["auto_mkdir"] = True
    return options
