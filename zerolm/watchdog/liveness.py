"""What can be told of this process from outside its main thread: is it at work, or does it wait?

Read by the watchdog's thread every few seconds. Linux's /proc, Python's frames, and torch's count
of collectives; nothing is asked of the training loop but its beats (pulse.py).
"""

import contextlib
import sys
import threading
import time
import traceback
from pathlib import Path

from zerolm.pulse import PHASES, PULSE

START_FACTOR = 3.0  # more time until the first step is done: building, compiling, loading
SLOW_FACTOR = 5.0  # a phase may take this many times the longest one that did end
PROGRESS_BYTES = 1 << 16  # read or written between two looks; a heartbeat has under 1 KiB


class VitalSigns:
    """How long the main thread has shown no progress, and how long it may.

    Args:
        hang_timeout: seconds without progress that are too many, in the middle of training.
    """

    def __init__(self, hang_timeout: float):
        self.hang_timeout = hang_timeout
        self._bytes, self._progress = 0, time.monotonic()

    def forgive(self) -> None:
        """Start counting anew: the process was suspended."""
        self._progress = PULSE.since = time.monotonic()

    def look(self) -> None:
        """Count bytes as progress in the phases that read and write files."""
        moved = bytes_moved()
        if PHASES[PULSE.phase] and moved - self._bytes > PROGRESS_BYTES:
            self._progress = time.monotonic()
        self._bytes = moved

    def quiet_seconds(self) -> float:
        """Return the seconds since the last progress."""
        return max(0.0, time.monotonic() - max(self._progress, PULSE.since))

    @property
    def starting(self) -> bool:
        """Whether this rank builds, compiles or loads, which may keep all threads from running."""
        return "step" not in PULSE.longest or PULSE.phase in ("start", "load")

    def limit_seconds(self) -> float:
        """Return how long this phase may be quiet: as set, or by what it has taken in this run."""
        limit = self.hang_timeout * (START_FACTOR if self.starting else 1.0)
        return max(limit, SLOW_FACTOR * PULSE.longest.get(PULSE.phase, 0.0))


def bytes_moved() -> int:
    """Return the bytes that this process has read and written, through calls or mapped files."""
    with contextlib.suppress(OSError, ValueError):
        lines = Path("/proc/self/io").read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if not line.startswith("sysc"))
    return 0


def waits_in_collective() -> bool:
    """Tell whether the main thread is inside a collective operation, by its Python frames."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        if "torch/distributed/" in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


def collectives() -> int | None:
    """Return how many collectives this rank has entered, over all process groups."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.distributed.is_initialized():
        return None
    try:
        groups = list(torch.distributed.distributed_c10d._world.pg_map)
        return sum(group._get_sequence_number_for_group() for group in groups)
    except Exception:  # torch's own affair: not every backend counts
        return None


def from_collective(error: BaseException) -> bool:
    """Tell whether an error came out of a collective: then another rank is its likely cause."""
    frames = traceback.extract_tb(error.__traceback__)
    # The innermost one: a handler of signals may raise something else while a rank waits.
    raised_there = bool(frames) and "torch/distributed/" in frames[-1].filename
    return raised_there or any(name in str(error) for name in ("gloo", "NCCL", "c10d"))
