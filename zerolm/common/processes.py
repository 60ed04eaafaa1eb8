"""Processes of this machine: alive, stopped or gone, whose they are, and signals to the right one.

A process is known by its number and its start time, or by a mark in its environment, never by its
name: another run of the same user looks the same. Linux's /proc; nothing beside the
standard library is needed.
"""

import contextlib
import os
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
SUPERVISOR = "ZEROLM_SUPERVISOR"  # the supervisor's mark on what it waits for, in the environment


@dataclass(frozen=True)
class Process:
    """One look at a process.

    Attributes:
        state: `R` running, `S` and `D` waiting, `T` stopped, `t` in a debugger, `Z` ended.
        parent: process number of its parent.
        start_ticks: when it began, in clock ticks since the machine's start.
        wait_status: of one that has ended, as os.waitpid gives it.
    """

    pid: int
    state: str
    parent: int
    start_ticks: int
    wait_status: int


def look(pid: int) -> Process | None:
    """Return how a process is, or None when there is none of that number."""
    try:
        fields = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return Process(pid, fields[0], int(fields[1]), int(fields[19]), int(fields[49]))


def alive(process: Process) -> bool:
    """Tell whether a process that was looked at before is there still and has not ended."""
    now = look(process.pid)
    return now is not None and now.start_ticks == process.start_ticks and now.state not in "ZX"


def machine() -> str:
    """Return what this machine and its process numbers are known by: containers differ in it."""
    with contextlib.suppress(OSError):
        boot = (PROC / "sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {(PROC / 'self/ns/pid').readlink()}"
    return os.uname().nodename


def how_it_ended(wait_status: int) -> str:
    """Return `SIGKILL` or `exit code 1`."""
    if os.WIFSIGNALED(wait_status):
        number = os.WTERMSIG(wait_status)
        with contextlib.suppress(ValueError):
            return signal.Signals(number).name
        return f"signal {number}"
    return f"exit code {os.WEXITSTATUS(wait_status)}"


def all_pids() -> list[int]:
    return [int(entry.name) for entry in PROC.iterdir() if entry.name.isdigit()]


def children(parent: int) -> list[Process]:
    """Return the direct children of a process."""
    found = (look(pid) for pid in all_pids())
    return [process for process in found if process is not None and process.parent == parent]


def catches(pid: int, number: int) -> bool:
    """Tell whether a process has a handler for a signal; without one SIGQUIT would end it."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        text = (PROC / str(pid) / "status").read_text()
        caught = int(text.partition("SigCgt:")[2].split()[0], 16)
        return bool(caught >> (number - 1) & 1)
    return False


def has_mark(pid: int, mark: str) -> bool:
    """Tell whether `mark`, `NAME=beginning of its value`, is in the environment of a process."""
    try:
        environment = (PROC / str(pid) / "environ").read_bytes()
    except OSError:
        return False
    return any(entry.startswith(mark.encode()) for entry in environment.split(b"\0"))


def marked(mark: str) -> list[int]:
    """Return the processes of this machine that have the mark, this one left out."""
    return [pid for pid in all_pids() if pid != os.getpid() and has_mark(pid, mark)]


def send(pid: int, number: int, mark: str) -> bool:
    """Send a signal to a process that has the mark; tell whether it was sent.

    The process is held by a descriptor while it is looked at, so that its number cannot have gone
    to another one in between.
    """
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        if not has_mark(pid, mark):
            return False
        signal.pidfd_send_signal(descriptor, number)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def send_to(process: Process, number: int) -> bool:
    """Send a signal to a process that was looked at before, unless its number is another's now."""
    try:
        descriptor = os.pidfd_open(process.pid)
    except OSError:
        return False
    try:
        now = look(process.pid)
        if now is None or now.start_ticks != process.start_ticks:
            return False
        signal.pidfd_send_signal(descriptor, number)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def observer_environment() -> dict[str, str]:
    """Return the environment of a process of `zerolm` that only observes a run.

    Without the supervisor's mark: no restart waits for an observer, which ends by itself.
    """
    root = str(Path(__file__).parent.parent)
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path}
    environment.pop(SUPERVISOR, None)
    return environment


def be_quiet() -> None:
    """Take only what is left over of processor and disk, and leave signals to the run."""
    os.nice(19)
    with contextlib.suppress(Exception):  # not every kernel or container has it
        import psutil

        psutil.Process().ionice(psutil.IOPRIO_CLASS_IDLE)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # the run saves first, and gives us time to send it


def serve(pid: int) -> None:
    """Be quiet, and end this process when the one that it serves is gone, whatever it is at.

    Args:
        pid: of the process that has started this one.
    """
    be_quiet()

    def watch() -> None:
        while os.getppid() == pid:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
