"""Write the stack traces of all threads of a rank to a file, even during an endless loop.

`faulthandler` writes the stacks in the signal handler itself, without running Python code. As in
Java, the signal is SIGQUIT. Stacks are appended to `ranks/rank-00000.stacks.txt`. Forked loader
workers inherit the handler.
"""

import contextlib
import faulthandler
import os
import signal
import sys
import time
from pathlib import Path

from zerolm.common import processes

SIGNAL = signal.SIGQUIT
RESPONSE_SECONDS = 2.0  # time for another rank to write its stacks
WORKER_SECONDS = 0.2  # time for a loader worker to write its stacks
MAX_KEPT_BYTES = 1 << 20  # stack files from earlier launches are kept up to this size
PRINTED_CHARACTERS = 4000


class StackFile:
    """This rank's stack file, which receives the stacks when the signal arrives.

    If the file cannot be opened, for example on a full disk, stacks are written to /dev/null.
    """

    def __init__(self, path: Path):
        self.path = path
        try:
            path.parent.mkdir(exist_ok=True)
            keep = path.exists() and path.stat().st_size < MAX_KEPT_BYTES
            self.file = open(path, "a" if keep else "w")
        except OSError:
            self.file = open(os.devnull, "w")
        self.start_bytes = size_bytes(path)  # size of the stacks from earlier launches
        faulthandler.register(SIGNAL, file=self.file, all_threads=True)
        faulthandler.enable(self.file)  # also write the stacks if a library crashes

    def write(self, why: str, text: str = "") -> None:
        """Append the stacks of all threads in this process and its loader workers."""
        with contextlib.suppress(OSError, ValueError):
            stamp = time.strftime("%Y-%m-%dT%H:%M:%S%z")
            self.file.write(f"== {stamp} pid {os.getpid()}: {why}\n{text}")
            self.file.flush()
            faulthandler.dump_traceback(self.file, all_threads=True)
            for worker in processes.children(os.getpid()):
                state = {"T": "is stopped", "Z": "has ended"}.get(worker.state, "is running")
                if worker.state == "Z":
                    state += f": {processes.exit_reason(worker.wait_status)}"
                self.file.write(f"== process {worker.pid} of this rank {state}\n")
                self.file.flush()
                if worker.state not in "TZ" and processes.handles_signal(worker.pid, SIGNAL):
                    processes.signal_process(worker, SIGNAL)
                    time.sleep(WORKER_SECONDS)

    def exit_after(self, seconds: float) -> None:
        """After `seconds`, write the stacks and exit with code 1 if this process still runs."""
        faulthandler.dump_traceback_later(seconds, exit=True, file=self.file)

    def close(self) -> None:
        """Unregister the signal, and remove the file if nothing was written to it."""
        faulthandler.unregister(SIGNAL)
        faulthandler.enable(sys.stderr)
        self.file.close()
        with contextlib.suppress(OSError):
            if self.path.stat().st_size == 0:
                self.path.unlink()


def request_stacks(ranks: list[processes.Process]) -> None:
    """Make other ranks on this machine write their stacks; stopped ranks are continued first."""
    requested = False
    for process in ranks:
        if processes.handles_signal(process.pid, SIGNAL):
            processes.signal_process(process, SIGNAL)
            processes.signal_process(process, signal.SIGCONT)
            requested = True
    if requested:
        time.sleep(RESPONSE_SECONDS)


def size_bytes(path: Path) -> int:
    """Return the size of a stack file, or 0 if the file is missing."""
    with contextlib.suppress(OSError):
        return path.stat().st_size
    return 0


def print_tail(path: Path) -> None:
    """Print the end of a stack file, if it exists."""
    with contextlib.suppress(OSError):
        text = path.read_text(errors="replace")[-PRINTED_CHARACTERS:]
        print(text, end="", file=sys.stderr, flush=True)
