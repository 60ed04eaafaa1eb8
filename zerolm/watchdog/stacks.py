"""What every thread of a rank is doing, written to a file, also from within an endless loop.

`faulthandler` writes it from the signal handler itself, without running any Python: SIGQUIT, as in
Java, to a rank appends to `ranks/rank-00000.stacks.txt`. Loader workers inherit this where they are
forked.
"""

import contextlib
import faulthandler
import os
import signal
import sys
import time
from pathlib import Path

from zerolm import processes

SIGNAL = signal.SIGQUIT
ANSWER_SECONDS = 2.0  # for another rank to write its stacks
WORKER_SECONDS = 0.2
MOST_BYTES = 1 << 20  # of earlier starts, that are kept
SHOWN_CHARACTERS = 4000


class StackFile:
    """The stack file of this rank, open for the signal. A full disk makes every method a no-op."""

    def __init__(self, path: Path):
        self.path = path
        try:
            path.parent.mkdir(exist_ok=True)
            keep = path.exists() and path.stat().st_size < MOST_BYTES
            self.file = open(path, "a" if keep else "w")
        except OSError:
            self.file = open(os.devnull, "w")
        faulthandler.register(SIGNAL, file=self.file, all_threads=True)
        faulthandler.enable(self.file)  # of a crash in a library, too

    def write(self, why: str, text: str = "") -> None:
        """Append the stacks of all threads of this process, and of its loader workers."""
        with contextlib.suppress(OSError, ValueError):
            stamp = time.strftime("%Y-%m-%dT%H:%M:%S%z")
            self.file.write(f"== {stamp} pid {os.getpid()}: {why}\n{text}")
            self.file.flush()
            faulthandler.dump_traceback(self.file, all_threads=True)
            for worker in processes.children(os.getpid()):
                state = {"T": "is stopped", "Z": "has ended"}.get(worker.state, "is at work")
                if worker.state == "Z":
                    state += f": {processes.how_it_ended(worker.wait_status)}"
                self.file.write(f"== process {worker.pid} of this rank {state}\n")
                self.file.flush()
                if worker.state not in "TZ" and processes.catches(worker.pid, SIGNAL):
                    processes.send_to(worker, SIGNAL)
                    time.sleep(WORKER_SECONDS)

    def end_after(self, seconds: float) -> None:
        """End this process with exit code 1 unless it has ended by then, and say where it was."""
        faulthandler.dump_traceback_later(seconds, exit=True, file=self.file)

    def close(self) -> None:
        """Remove the file if nothing was ever written to it."""
        faulthandler.unregister(SIGNAL)
        faulthandler.enable(sys.stderr)
        self.file.close()
        with contextlib.suppress(OSError):
            if self.path.stat().st_size == 0:
                self.path.unlink()


def collect(others: list[processes.Process]) -> None:
    """Have other ranks of this machine write theirs; a stopped one has to go on for that."""
    asked = False
    for process in others:
        if processes.catches(process.pid, SIGNAL):
            processes.send_to(process, SIGNAL)
            processes.send_to(process, signal.SIGCONT)
            asked = True
    if asked:
        time.sleep(ANSWER_SECONDS)


def written_since(path: Path, moment: float) -> bool:
    """Tell whether a rank has written stacks after `moment`, seconds since the epoch."""
    with contextlib.suppress(OSError):
        return path.stat().st_size > 0 and path.stat().st_mtime >= moment
    return False


def show(path: Path) -> None:
    """Print the end of a stack file, if there is one."""
    with contextlib.suppress(OSError):
        text = path.read_text(errors="replace")[-SHOWN_CHARACTERS:]
        print(text, end="", file=sys.stderr, flush=True)
