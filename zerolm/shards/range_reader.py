"""Objects of one directory in a store, whole or in ranges, for reading that has to go on.

Every call is repeated with growing pauses while the store answers with errors, with too little,
with something else than it should, or not at all, until its patience is at an end. May be called by
many threads, and in a process that was forked from one that called it. Knows no shards.
"""

import os
import random
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from zerolm.object_store import (
    CONNECT_SECONDS,
    READ_SECONDS,
    Missing,
    StoreError,
    is_final,
    shown_error,
    store_options,
    within,
)
from zerolm.url import Url

PATIENCE_SECONDS = 240.0  # a store that is down for a minute or two ends no run
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.2, 15.0
ATTEMPT_SECONDS = 60.0  # for one answer, however slowly it trickles
MISMATCHES = 4  # a content that is wrong so often is so in the store
CONNECTIONS = 32


class Ranges:
    """Reads objects below a URL.

    Args:
        url: without credentials.
        patience_seconds: how long a call is repeated before it fails.

    Attributes:
        counts: `requests`, `bytes` that came, and `repeated` requests, of this process.
    """

    def __init__(self, url: Url, patience_seconds: float = PATIENCE_SECONDS):
        self.url, self.patience_seconds = url, patience_seconds
        self.counts: Counter[str] = Counter()
        self._pid = -1
        self._fs: Any = None
        self._root = ""

    def __getstate__(self) -> dict[str, Any]:
        return {"url": self.url, "patience_seconds": self.patience_seconds}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def read(
        self,
        name: str,
        start: int | None = None,
        stop: int | None = None,
        wrong: Callable[[bytes], str | None] = lambda content: None,
        begun: float | None = None,
    ) -> bytes:
        """Return an object, or its bytes at [start, stop).

        Args:
            wrong: says what is wrong with a content, None when nothing is.
            begun: when the patience began, in time.monotonic(); None: now.

        Raises:
            Missing: there is no such object.
            StoreError: it was not to be had; says what the last answer was.
        """
        begun = time.monotonic() if begun is None else begun
        attempt, mismatches = 0, 0
        while True:
            attempt += 1
            try:
                content = self._read(name, start, stop)
                problem = self._length_problem(content, start, stop)
                if problem is None and (problem := wrong(content)) is not None:
                    mismatches += 1
                if problem is None:
                    return content
            except FileNotFoundError:
                raise Missing(f"{self.url / name}: not there") from None
            except Exception as error:
                problem = shown_error(error)
                if is_final(error):
                    raise StoreError(f"{self.url / name}: {problem}") from None
            pause = min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2.0 ** min(attempt - 1, 10))
            pause *= random.uniform(0.5, 1.0)
            seconds = time.monotonic() - begun + pause
            if mismatches >= MISMATCHES or seconds > self.patience_seconds:
                tries = f"{attempt} attempts in {time.monotonic() - begun:.0f} s"
                raise StoreError(f"{self.url / name}: {problem} ({tries})") from None
            self.counts["repeated"] += 1
            time.sleep(pause)

    def sizes(self) -> dict[str, int] | None:
        """Return {name: bytes} of the objects right below the URL; None where none are listed.

        Raises:
            StoreError: the store does not say.
        """
        if self.url.scheme in ("http", "https"):
            return None
        try:
            fs, root = self._opened()
            listed = within(self.patience_seconds, lambda: fs.ls(root, detail=True))
        except FileNotFoundError:
            return {}
        except Exception as error:
            raise StoreError(f"{self.url}: {shown_error(error)}") from None
        return {
            str(about["name"]).rstrip("/").rpartition("/")[2]: int(about["size"])
            for about in listed
            if about.get("type") == "file"
        }

    def _read(self, name: str, start: int | None, stop: int | None) -> bytes:
        fs, root = self._opened()
        path = f"{root}/{name}"
        self.counts["requests"] += 1
        if getattr(fs, "async_impl", False):
            from fsspec.asyn import sync

            where = {"start": start, "end": stop}  # s3fs has another argument before them
            content = sync(fs.loop, fs._cat_file, path, timeout=ATTEMPT_SECONDS, **where)
        else:
            content = within(ATTEMPT_SECONDS, lambda: fs.cat_file(path, start=start, end=stop))
        self.counts["bytes"] += len(content)
        return content

    def _length_problem(self, content: bytes, start: int | None, stop: int | None) -> str | None:
        if start is None or stop is None or len(content) == stop - start:
            return None
        if len(content) > stop - start:
            return (
                f"{len(content)} bytes came instead of {stop - start}: the server gives whole "
                f"objects instead of ranges"
            )
        return f"{len(content)} bytes came instead of the {stop - start} from {start}: cut off"

    def _opened(self) -> tuple[Any, str]:
        """Return this process's file system: a forked one has no use for its parent's."""
        if self._pid != os.getpid():  # threads that meet here open one each, and the last one stays
            self._open()
        return self._fs, self._root

    def _open(self) -> None:
        import fsspec

        scheme = self.url.scheme
        options = store_options(scheme)
        if scheme in ("s3", "s3a"):  # repeating is done here, where it can be seen
            options["config_kwargs"] |= {
                "retries": {"mode": "standard", "total_max_attempts": 1},
                "max_pool_connections": CONNECTIONS,
            }
        if scheme in ("http", "https"):
            import aiohttp

            timeout = aiohttp.ClientTimeout(sock_connect=CONNECT_SECONDS, sock_read=READ_SECONDS)
            options["client_kwargs"] = {"timeout": timeout}
        fs, root = fsspec.core.url_to_fs(str(self.url), skip_instance_cache=True, **options)
        if hasattr(fs, "retries"):
            fs.retries = 1
        self._fs, self._root = fs, root.rstrip("/")
        self._pid = os.getpid()
