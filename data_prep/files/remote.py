"""Lists and opens files in object stores and on web servers, through fsspec.

A failed read is retried. If it keeps failing, the command exits with an error, because documents
must not be skipped just because a store is down. Local paths are opened as usual.
"""

import io
import os
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from zerolm.common.errors import ConfigError, ZerolmError, reason
from zerolm.common.store import RETRY_SECONDS, StoreError, call_within, retried, store_options
from zerolm.common.url import Url, is_url, url_problem
from zerolm.shards.range_reader import RangeReader

READ_AHEAD_BYTES = 4 << 20  # per request
LIST_SECONDS = 300.0
MISSING_SECONDS = 5.0  # fsspec reports a file as missing if the server is too busy to respond
VERSION_KEYS = ("ETag", "etag", "generation", "LastModified", "mtime")  # in order of preference


class Entry(NamedTuple):
    """A file in a store."""

    url: str
    size_bytes: int
    version: str  # changes with the content; empty if the store has no versions


def list_files(url: str) -> list[Entry]:
    """List the files that a URL names, sorted.

    A URL may name a file, a "directory" or a glob; on web servers, which cannot list files, it must
    name a file.

    Raises:
        ConfigError: the URL cannot be listed, or matches no file.
    """
    problem = url_problem(url)
    if problem is not None:
        raise ConfigError(f"--input {url}: {problem}")
    try:
        entries = call_within(LIST_SECONDS, lambda: list(_list(url)))
    except FileNotFoundError:
        entries = []
    except Exception as error:
        raise ConfigError(
            f"--input {url}: cannot be listed ({reason(error)}). Check the URL, the "
            f"credentials and the network."
        ) from None
    if not entries:
        raise ConfigError(
            f"--input {url}: there is no such file or directory, or its server does not answer. "
            f"Check the URL."
        )
    return sorted(entries)


def list_directory(name: str) -> tuple[set[str], set[str]]:
    """Return the names of the directories and files in a local directory or one of a store.

    Both are empty if it cannot be listed: a later read of its files reports the reason.
    """
    if not is_url(name):
        try:
            with os.scandir(name) as entries:
                kinds = {each.name: each.is_dir() for each in entries}
        except OSError:
            kinds = {}
    elif name.startswith("http") or not name.partition("://")[2]:
        kinds = {}
    else:
        import fsspec

        fs, path = fsspec.core.url_to_fs(name, **store_options(name.partition("://")[0]))
        try:
            listed = call_within(LIST_SECONDS, lambda: fs.ls(path, detail=True))
        except (OSError, StoreError):
            listed = []
        kinds = {
            each["name"].rstrip("/").rpartition("/")[2]: each["type"] == "directory"
            for each in listed
        }
    return {key for key, is_dir in kinds.items() if is_dir}, {
        key for key, is_dir in kinds.items() if not is_dir
    }


def _list(url: str) -> Iterator[Entry]:
    import fsspec

    scheme = url.partition("://")[0]
    fs, path = fsspec.core.url_to_fs(url, **store_options(scheme))
    if scheme in ("http", "https"):
        found: Mapping[str, Any] = {url: fs.info(path)}
    elif any(character in path for character in "*?["):
        found = fs.glob(path, detail=True)
    else:
        found = fs.find(path, detail=True)
    for name, info in found.items():
        if info["type"] != "file":
            continue
        if info.get("size") is None:
            raise StoreError("the server does not report the size of the file")
        full = name if is_url(name) else fs.unstrip_protocol(name)
        yield Entry(full, int(info["size"]), _version(info))


def _version(info: Mapping[str, Any]) -> str:
    return next((str(info[key]) for key in VERSION_KEYS if info.get(key)), "")


def stat_file(url: str) -> Entry:
    """Return the current state of a file."""

    def entry() -> Entry:
        return call_within(LIST_SECONDS, lambda: next(iter(_list(url))))

    try:
        return retried(
            f"{url}: cannot be read", entry, seconds=RETRY_SECONDS, missing_seconds=MISSING_SECONDS
        )
    except StoreError as error:
        raise ZerolmError(f"{error}. Run the command again when the file can be read.") from None


def open_stored(name: str) -> BinaryIO:
    """Open a local file or a URL for reading.

    Raises:
        OSError: the local file cannot be opened.
    """
    if not is_url(name):
        return Path(name).open("rb")
    return io.BufferedReader(_RemoteFile(name), READ_AHEAD_BYTES)


@lru_cache(maxsize=16)
def _reader(directory: str) -> RangeReader:
    return RangeReader(Url(directory))


class _RemoteFile(io.RawIOBase):
    """A file in a store, read in requests of READ_AHEAD_BYTES, with retries."""

    def __init__(self, url: str):
        super().__init__()
        parent, _, self.name = url.rpartition("/")
        self.url, self.size = url, stat_file(url).size_bytes
        self.reader = _reader(parent)
        self.position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self.position = offset + (0, self.position, self.size)[whence]
        return self.position

    def readinto(self, buffer: Any) -> int:
        stop = min(self.position + len(buffer), self.size)
        if stop <= self.position:
            return 0
        try:
            content = self.reader.read(self.name, self.position, stop)
        except StoreError as error:
            raise ZerolmError(
                f"{error}. Check the network, and run the command again: it resumes."
            ) from None
        buffer[: len(content)] = content
        self.position = stop
        return len(content)
