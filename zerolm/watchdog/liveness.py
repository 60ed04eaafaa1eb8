"""Determine from outside the main thread whether this process is working or waiting.

Every few seconds, the watchdog's thread reads Linux's /proc and Python's stack frames. The training
loop only records its progress.
"""

import contextlib
import os
import sys
import sysconfig
import threading
import time
import traceback
from pathlib import Path

from zerolm.common import machine, processes
from zerolm.watchdog.progress import CURRENT, PHASES

START_FACTOR = 3.0  # factor for the time limit until the first step is done
SLOW_FACTOR = 5.0  # a phase may take this many times its longest duration so far
STALL_SHARE = 1 / 3  # share of the time limit after which heartbeats contain more details
TRANSFER = "wait_for_neighbours"  # in zerolm.distributed.pipeline
LIBRARIES = ("site-packages", "<frozen", sysconfig.get_path("stdlib"), "torch/")
PROGRESS_BYTES = 1 << 16  # less data read or written between updates is not progress


class ProgressMonitor:
    """Measures the time without progress in the main thread, and how much of it is allowed.

    The watchdog's thread calls `update`; the I/O of that thread does not count as progress.

    Args:
        hang_timeout: time limit in seconds during training; 0 means no limit.
    """

    def __init__(self, hang_timeout: float):
        self.hang_timeout = hang_timeout
        self._bytes, self._progress_at = 0, time.monotonic()

    def reset(self) -> None:
        """Restart the measurement after the process was suspended."""
        self._progress_at = CURRENT.recorded_at = time.monotonic()

    def update(self) -> None:
        """Count file I/O as progress in phases that consist of I/O.

        During a start, building an operator also counts, since the other ranks wait for the rank
        that compiles it.
        """
        moved = bytes_moved()
        has_moved = PHASES[CURRENT.phase] and moved - self._bytes > PROGRESS_BYTES
        may_wait = self.is_starting and self.is_stalled
        if has_moved or (may_wait and machine.running_builds(os.environ)):
            self._progress_at = time.monotonic()
        self._bytes = moved

    def quiet_seconds(self) -> float:
        """Return the seconds since the last progress."""
        return max(0.0, time.monotonic() - max(self._progress_at, CURRENT.recorded_at))

    @property
    def is_starting(self) -> bool:
        """Whether this rank may be building, compiling or loading, which can block all threads."""
        return "optimizer" not in CURRENT.longest_seconds or CURRENT.phase in ("start", "load")

    @property
    def is_stalled(self) -> bool:
        """Whether this rank may hang, so heartbeats should spend a few milliseconds on details."""
        stall_seconds = STALL_SHARE * self.limit_seconds()
        return self.hang_timeout > 0 and self.quiet_seconds() > stall_seconds

    def limit_seconds(self) -> float:
        """Return how long the current phase may last without progress.

        This depends on `hang_timeout` and on the longest duration of the phase so far.
        """
        limit = self.hang_timeout * (START_FACTOR if self.is_starting else 1.0)
        return max(limit, SLOW_FACTOR * CURRENT.longest_seconds.get(CURRENT.phase, 0.0))


def bytes_moved() -> int:
    """Return the bytes that other threads have read and written, including memory-mapped files.

    This thread's own I/O is excluded: the heartbeats and stacks that it writes are not progress.
    """
    own = f"/proc/self/task/{threading.get_native_id()}/io"
    with contextlib.suppress(OSError, ValueError):
        return _bytes_in("/proc/self/io") - _bytes_in(own)
    return 0


def _bytes_in(path: str) -> int:
    lines = Path(path).read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if not line.startswith("sysc"))


def in_collective() -> bool:
    """Return whether the main thread's Python frames show that it is inside a collective, or waits
    for a neighbour in a pipeline.
    """
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        if "torch/distributed/" in frame.f_code.co_filename or frame.f_code.co_name == TRANSFER:
            return True
        frame = frame.f_back
    return False


def doing() -> str:
    """Return the main thread's current function and its nearest caller outside libraries."""
    thread = threading.main_thread()
    frame = sys._current_frames().get(thread.ident or 0)
    places: list[str] = []
    while frame is not None:
        code = frame.f_code
        places.append(f"{code.co_name} in {Path(code.co_filename).name}:{frame.f_lineno}")
        if not any(part in code.co_filename for part in LIBRARIES):
            break
        frame = frame.f_back
    text = ", called by ".join(dict.fromkeys(places[:1] + places[-1:]))
    with contextlib.suppress(OSError):
        status = Path(f"/proc/self/task/{thread.native_id}/stat").read_text()
        if status.rpartition(")")[2].split()[0] == "D":
            text += ", waiting for a disk or a network file system"
    return text


def why_silent(process: processes.Process) -> str:
    """Return why a process's watchdog thread does not run, based on its main thread's state."""
    held = "without releasing Python's interpreter lock"
    return {
        "R": f"its native code is computing {held}",
        "S": f"its native code is sleeping or waiting {held}",
        "D": "it is waiting for a disk or a network file system",
        "T": "it is stopped",
    }.get(process.state, "")


def raised_in_collective(error: BaseException) -> bool:
    """Return whether an error was raised by a collective, so another rank is the likely cause."""
    frames = traceback.extract_tb(error.__traceback__)
    # Check only the innermost frame: a signal handler may raise another error while a rank waits.
    last = frames[-1] if frames else None
    raised_there = last is not None and (
        "torch/distributed/" in last.filename or last.name == TRANSFER
    )
    return raised_there or any(name in str(error) for name in ("gloo", "NCCL", "c10d"))
