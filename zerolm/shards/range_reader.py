"""`RangeReader`: read objects in a store, completely or in byte ranges, with retries.

A read is retried with growing pauses, up to a time limit, while the store returns errors, too few
bytes, damaged content or nothing. A reader may be used by several threads, and in a forked process
even if the parent has used it. Independent of the shard format.
"""

import os
from collections import Counter
from collections.abc import Callable
from typing import Any

from zerolm.common.errors import reason
from zerolm.common.store import (
    CONNECT_SECONDS,
    READ_SECONDS,
    RETRY_SECONDS,
    Mismatch,
    StoreError,
    call_within,
    retried,
    store_options,
)
from zerolm.common.url import Url

ATTEMPT_SECONDS = 60.0  # time allowed for one response, however slowly it arrives
MAX_MISMATCHES = 4  # content that arrives damaged this many times is damaged in the store
CONNECTIONS = 32


class RangeReader:
    """Reads objects under a URL.

    Args:
        url: URL of the directory, without credentials.
        retry_seconds: time limit for retrying a read.

    Attributes:
        counts: numbers of `requests`, received `bytes` and `repeated` requests in this process.
    """

    def __init__(self, url: Url, retry_seconds: float = RETRY_SECONDS):
        self.url, self.retry_seconds = url, retry_seconds
        self.counts: Counter[str] = Counter(requests=0, bytes=0, repeated=0)
        self._pid = -1
        self._fs: Any = None
        self._root = ""

    def __getstate__(self) -> dict[str, Any]:
        return {"url": self.url, "retry_seconds": self.retry_seconds}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def read(
        self,
        name: str,
        start: int | None = None,
        stop: int | None = None,
        find_problem: Callable[[bytes], str | None] = lambda content: None,
        started_at: float | None = None,
    ) -> bytes:
        """Return the content of an object, or its bytes at [start, stop).

        Args:
            find_problem: function that returns a problem with the content read, or None.
            started_at: start of the retry period, in time.monotonic() seconds; None means now.

        Raises:
            Missing: there is no such object.
            StoreError: it could not be read within the retry period. The message states the last
                problem.
        """
        num_tries, num_mismatches = 0, 0

        def attempt() -> bytes:
            nonlocal num_tries, num_mismatches
            num_tries += 1
            self.counts["repeated"] += num_tries > 1
            content = self._read(name, start, stop)
            if problem := self._length_problem(content, start, stop):
                raise StoreError(problem)
            if problem := find_problem(content):
                num_mismatches += 1
                raise (StoreError if num_mismatches < MAX_MISMATCHES else Mismatch)(problem)
            return content

        return retried(
            str(self.url / name), attempt, seconds=self.retry_seconds, started_at=started_at
        )

    def sizes(self) -> dict[str, int] | None:
        """Return {name: size in bytes} for the objects in the directory; None over HTTP.

        Raises:
            StoreError: the store cannot list them.
        """
        if self.url.scheme in ("http", "https"):
            return None
        try:
            fs, root = self._file_system()
            entries = call_within(self.retry_seconds, lambda: fs.ls(root, detail=True))
        except FileNotFoundError:
            return {}
        except Exception as error:
            raise StoreError(f"{self.url}: {reason(error)}") from None
        return {
            str(entry["name"]).rstrip("/").rpartition("/")[2]: int(entry["size"])
            for entry in entries
            if entry.get("type") == "file"
        }

    def _read(self, name: str, start: int | None, stop: int | None) -> bytes:
        fs, root = self._file_system()
        path = f"{root}/{name}"
        self.counts["requests"] += 1
        if getattr(fs, "async_impl", False):
            from fsspec.asyn import sync

            # By name, because s3fs has another positional argument before these.
            content = sync(fs.loop, fs._cat_file, path, timeout=ATTEMPT_SECONDS, start=start,
                           end=stop)  # fmt: skip
        else:
            content = call_within(ATTEMPT_SECONDS, lambda: fs.cat_file(path, start=start, end=stop))
        num_bytes = len(content)  # inside `+=` this could lose another thread's count
        self.counts["bytes"] += num_bytes
        return content

    def _length_problem(self, content: bytes, start: int | None, stop: int | None) -> str | None:
        if start is None or stop is None or len(content) == stop - start:
            return None
        if len(content) > stop - start:
            return (
                f"{len(content)} bytes arrived instead of {stop - start}: the server sends "
                f"complete objects instead of ranges"
            )
        return f"{len(content)} bytes arrived instead of the {stop - start} from {start}: truncated"

    def _file_system(self) -> tuple[Any, str]:
        """Return this process's file system and root; a forked process cannot use its parent's."""
        # Several threads may open a file system at the same time; the last one is kept.
        if self._pid != os.getpid():
            self._open()
        return self._fs, self._root

    def _open(self) -> None:
        import fsspec

        scheme = self.url.scheme
        options = store_options(scheme)
        if scheme in ("s3", "s3a"):  # `read` retries and counts the retries
            options["config_kwargs"] |= {
                "retries": {"mode": "standard", "total_max_attempts": 1},
                "max_pool_connections": CONNECTIONS,
            }
        if scheme in ("http", "https"):
            import aiohttp

            timeout = aiohttp.ClientTimeout(sock_connect=CONNECT_SECONDS, sock_read=READ_SECONDS)
            options["client_kwargs"] = {  # coded content has no ranges of the file
                "timeout": timeout,
                "headers": {"Accept-Encoding": "identity"},
                "auto_decompress": False,
            }
        fs, root = fsspec.core.url_to_fs(str(self.url), skip_instance_cache=True, **options)
        if hasattr(fs, "retries"):
            fs.retries = 1
        self._fs, self._root = fs, root.rstrip("/")
        self._pid = os.getpid()
