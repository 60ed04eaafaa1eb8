"""Whether this process is working or waiting, judged from outside its main thread.

The watchdog's thread reads it every few seconds from Linux's /proc, Python's stack frames and
torch's count of collectives. The training loop only records its progress.
"""

import contextlib
import sys
import threading
import time
import traceback
from pathlib import Path

from zerolm.watchdog.progress import CURRENT, PHASES

START_FACTOR = 3.0  # on the limit until the first step is done: building, compiling, loading
SLOW_FACTOR = 5.0  # a phase may take this many times its longest duration so far
PROGRESS_BYTES = 1 << 16  # read or written between two updates; a heartbeat has under 1 KiB


class ProgressMonitor:
    """Measures for how long the main thread has made no progress, and how long it may.

    Args:
        hang_timeout: limit in seconds during training; 0: none.
    """

    def __init__(self, hang_timeout: float):
        self.hang_timeout = hang_timeout
        self._bytes, self._progress_at = 0, time.monotonic()

    def reset(self) -> None:
        """Start counting from now, after the process was suspended."""
        self._progress_at = CURRENT.recorded_at = time.monotonic()

    def update(self) -> None:
        """Count file input and output as progress, in the phases where it is."""
        moved = bytes_moved()
        if PHASES[CURRENT.phase] and moved - self._bytes > PROGRESS_BYTES:
            self._progress_at = time.monotonic()
        self._bytes = moved

    def quiet_seconds(self) -> float:
        """Return the seconds since the last progress."""
        return max(0.0, time.monotonic() - max(self._progress_at, CURRENT.recorded_at))

    @property
    def is_starting(self) -> bool:
        """Whether this rank builds, compiles or loads, which may block all of its threads."""
        return "step" not in CURRENT.longest_seconds or CURRENT.phase in ("start", "load")

    def limit_seconds(self) -> float:
        """Return how long this phase may be quiet, from the setting and from its past durations."""
        limit = self.hang_timeout * (START_FACTOR if self.is_starting else 1.0)
        return max(limit, SLOW_FACTOR * CURRENT.longest_seconds.get(CURRENT.phase, 0.0))


def bytes_moved() -> int:
    """Return the bytes that this process has read and written, by calls or mapped files."""
    with contextlib.suppress(OSError, ValueError):
        lines = Path("/proc/self/io").read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if not line.startswith("sysc"))
    return 0


def in_collective() -> bool:
    """Return whether the main thread is inside a collective operation, by its Python frames."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        if "torch/distributed/" in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


def num_collectives() -> int | None:
    """Return the number of collectives that this rank has entered, over all process groups."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.distributed.is_initialized():
        return None
    try:
        groups = list(torch.distributed.distributed_c10d._world.pg_map)
        return sum(group._get_sequence_number_for_group() for group in groups)
    except Exception:  # private to torch, and not every backend counts
        return None


def raised_in_collective(error: BaseException) -> bool:
    """Return whether an error was raised by a collective: then another rank is the likely cause."""
    frames = traceback.extract_tb(error.__traceback__)
    # Only the innermost frame: a signal handler may raise something else while a rank waits.
    raised_there = bool(frames) and "torch/distributed/" in frames[-1].filename
    return raised_there or any(name in str(error) for name in ("gloo", "NCCL", "c10d"))
