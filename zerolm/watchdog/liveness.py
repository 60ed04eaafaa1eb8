"""Determines from outside the main thread whether this process is working or waiting.

Every few seconds the watchdog's thread reads Linux's /proc and Python's stack frames. The training
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

START_FACTOR = 3.0  # multiplies the limit until the first step is done
SLOW_FACTOR = 5.0  # a phase may take this many times its longest duration so far
STALL_SHARE = 1 / 3  # share of the limit after which heartbeats contain more details
LIBRARIES = ("site-packages", "<frozen", sysconfig.get_path("stdlib"), "torch/")
PROGRESS_BYTES = 1 << 16  # minimum read or written between updates


class ProgressMonitor:
    """Measures the time without progress in the main thread, and its limit.

    The watchdog's thread calls `update`; that thread's own I/O does not count.

    Args:
        hang_timeout: limit in seconds during training; 0 means no limit.
    """

    def __init__(self, hang_timeout: float):
        self.hang_timeout = hang_timeout
        self._bytes, self._progress_at = 0, time.monotonic()

    def reset(self) -> None:
        """Restart the count, after the process was suspended."""
        self._progress_at = CURRENT.recorded_at = time.monotonic()

    def update(self) -> None:
        """Count file I/O as progress in phases that consist of I/O.

        During a start, building an operator also counts: one rank compiles, the others wait for it.
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
        """Whether this rank is building, compiling or loading, which may block all threads."""
        return "optimizer" not in CURRENT.longest_seconds or CURRENT.phase in ("start", "load")

    @property
    def is_stalled(self) -> bool:
        """Whether this rank may hang, which justifies a few milliseconds for an explanation."""
        stall_seconds = STALL_SHARE * self.limit_seconds()
        return self.hang_timeout > 0 and self.quiet_seconds() > stall_seconds

    def limit_seconds(self) -> float:
        """Return how long this phase may be quiet, given the setting and its past durations."""
        limit = self.hang_timeout * (START_FACTOR if self.is_starting else 1.0)
        return max(limit, SLOW_FACTOR * CURRENT.longest_seconds.get(CURRENT.phase, 0.0))


def bytes_moved() -> int:
    """Return the bytes that other threads have read and written, through calls or mapped files.

    The heartbeats and stacks that a hanging rank writes do not count as progress.
    """
    own = f"/proc/self/task/{threading.get_native_id()}/io"
    with contextlib.suppress(OSError, ValueError):
        return _bytes_in("/proc/self/io") - _bytes_in(own)
    return 0


def _bytes_in(path: str) -> int:
    lines = Path(path).read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if not line.startswith("sysc"))


def in_collective() -> bool:
    """Return whether the main thread is inside a collective, judging by its Python frames."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        if "torch/distributed/" in frame.f_code.co_filename:
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
    """Return why a process's watchdog does not run, judging by the state of its main thread."""
    held = "without releasing Python's interpreter lock"
    return {
        "R": f"its native code is computing {held}",
        "S": f"its native code is sleeping or waiting {held}",
        "D": "it is waiting for a disk or a network file system",
        "T": "it is stopped",
    }.get(process.state, "")


def raised_in_collective(error: BaseException) -> bool:
    """Return whether a collective raised an error: another rank is then the likely cause."""
    frames = traceback.extract_tb(error.__traceback__)
    # Check only the innermost frame: a signal handler may raise another error while a rank waits.
    raised_there = bool(frames) and "torch/distributed/" in frames[-1].filename
    return raised_there or any(name in str(error) for name in ("gloo", "NCCL", "c10d"))
