"""Options, limits and errors shared by readers and writers of object stores (fsspec).

fsspec is imported only where it is needed.
"""

import itertools
import math
import random
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from zerolm.common.errors import reason
from zerolm.common.secrets import masked

# Part size of multipart uploads. S3 accepts up to 10,000 parts of at least 5 MiB. A few parts of
# each file being sent are held in memory.
PIECE_BYTES = 16 << 20
MAX_PIECES = 9000
CHUNK_BYTES = 4 << 20
ATTEMPTS = 3
FIRST_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 0.2, 15.0  # between attempts
RETRY_SECONDS = 240.0  # a run survives a store that is down for a minute or two
CONNECT_SECONDS, READ_SECONDS = 10, 30
OFF = "off"
T = TypeVar("T")

_SAID: set[str] = set()  # stores for which this process has already printed a notice about retries


class StoreError(Exception):
    """An operation failed after all attempts. The message is one line without secrets."""

    def __init__(self, message: str = ""):
        super().__init__(masked(message))


class Missing(StoreError):
    """The object does not exist."""


class Mismatch(StoreError):
    """A file's content differs from its manifest. Another attempt would not help."""


def call_within(seconds: float, call: Callable[[], T]) -> T:
    """Run `call` with a time limit and return its result.

    A call that hangs inside a library cannot be interrupted, so its daemon thread is left running.

    Raises:
        StoreError: the call takes longer than `seconds`.
        Exception: any exception that `call` raises.
    """
    results: list[T] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            results.append(call())
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise StoreError(f"no answer within {seconds:.0f} s")
    return results[0]


def retried(
    where: str,
    call: Callable[[], T],
    *,
    attempts: int | None = None,
    seconds: float = math.inf,
    missing_seconds: float = 0.0,
    first_pause_seconds: float | None = None,
    started_at: float | None = None,
) -> T:
    """Retry a call until it succeeds, with growing random pauses between attempts.

    Args:
        where: prefix for messages.
        seconds: how long to retry after errors.
        missing_seconds: how long to retry after a FileNotFoundError; at most `seconds`.
        started_at: start of the retry period as a `time.monotonic()` value; None: now.

    Raises:
        Missing: there is no such object.
        StoreError: the last attempt failed, or one failed permanently.
    """
    started_at = time.monotonic() if started_at is None else started_at
    pause = FIRST_PAUSE_SECONDS if first_pause_seconds is None else first_pause_seconds
    until = f" for up to {seconds:.0f} s" if math.isfinite(seconds) else ""
    for attempt in itertools.count(1):
        try:
            return call()
        except Exception as error:
            is_missing = isinstance(error, FileNotFoundError)
            limit = min(seconds, missing_seconds) if is_missing else seconds
            wait = pause * random.uniform(0.5, 1.0)
            spent = time.monotonic() - started_at
            why = reason(error, named=not isinstance(error, StoreError))
            if _is_permanent(error) or attempt == attempts or spent + wait > limit:
                if is_missing:
                    raise Missing(f"{where}: not there ({why})") from None
                tries = f"{attempt} attempts" + (f" in {spent:.0f} s" if attempts is None else "")
                raise StoreError(f"{where}: {why}" + f" ({tries})" * (attempt > 1)) from None
        if (store := "/".join(where.split("/")[:3])) not in _SAID:
            _SAID.add(store)
            print(f"{where}: {why}; trying again{until}", file=sys.stderr, flush=True)
        time.sleep(wait)
        pause = min(MAX_PAUSE_SECONDS, 2 * pause)
    raise AssertionError("the last attempt returns or raises")


def _is_permanent(error: Exception) -> bool:
    """Return whether retrying is useless, for example because permissions are missing."""
    return isinstance(error, (PermissionError, NotADirectoryError, Mismatch)) or (
        "Credential" in type(error).__name__
    )


def store_options(scheme: str) -> dict[str, Any]:
    """Return arguments for a scheme's fsspec file system: short timeouts, no stale listings.

    Values for S3's `config_kwargs` in the user's fsspec configuration take precedence.
    """
    import fsspec

    options: dict[str, Any] = {"use_listings_cache": False}
    if scheme in ("s3", "s3a"):
        theirs = fsspec.config.conf.get("s3", {}).get("config_kwargs", {})
        ours = {
            "connect_timeout": CONNECT_SECONDS,
            "read_timeout": READ_SECONDS,
            # Makes the client retry single parts; otherwise a failed part would restart the whole
            # file.
            "retries": {"mode": "standard", "total_max_attempts": ATTEMPTS},
        }
        options["config_kwargs"] = {**ours, **theirs}
    if scheme in ("file", "local"):
        options["auto_mkdir"] = True
    return options
