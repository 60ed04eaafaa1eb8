"""Processes on this machine: inspect them, find marked ones, and signal exactly the right one.

A process is identified by its number and start time, or by a mark in its environment; never by its
name, which other runs' processes share. Reads Linux's /proc. Standard library only.
"""

import contextlib
import os
import signal
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
SUPERVISOR = "ZEROLM_SUPERVISOR"  # variable that marks all processes started by the supervisor
# Each of these signals makes a run save and stop. A closing terminal sends SIGHUP.
STOP_SIGNALS = (
    signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGHUP,
)  # fmt: skip


def stop_signals() -> list[signal.Signals]:
    """Return the `STOP_SIGNALS` to handle: all but SIGHUP if it is ignored, as under `nohup`."""
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [number for number in STOP_SIGNALS if number != signal.SIGHUP or not ignored]


@dataclass(frozen=True)
class Process:
    """The state of a process at the time of `inspect_process`.

    Attributes:
        state: `R` running, `S` and `D` waiting, `T` stopped, `t` traced by a debugger, `Z` exited.
        parent: process number of the parent.
        start_ticks: start time in clock ticks since the machine booted.
        wait_status: the status that `os.waitpid` returns for a process that has exited.
    """

    pid: int
    state: str
    parent: int
    start_ticks: int
    wait_status: int


# ---- State


def inspect_process(pid: int) -> Process | None:
    """Return the state of a process, or None if no process has that number."""
    try:
        fields = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return Process(pid, fields[0], int(fields[1]), int(fields[19]), int(fields[49]))


def alive(process: Process) -> bool:
    """Return whether a process inspected earlier still exists and has not exited."""
    now = inspect_process(process.pid)
    return now is not None and now.start_ticks == process.start_ticks and now.state not in "ZX"


def exit_reason(wait_status: int) -> str:
    """Return why a process exited: for example `SIGKILL` or `exit code 1`."""
    if os.WIFSIGNALED(wait_status):
        number = os.WTERMSIG(wait_status)
        with contextlib.suppress(ValueError):
            return signal.Signals(number).name
        return f"signal {number}"
    return f"exit code {os.WEXITSTATUS(wait_status)}"


def machine_id() -> str:
    """Return an identifier of this boot and PID namespace, which make process numbers unique."""
    with contextlib.suppress(OSError):
        boot = (PROC / "sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {(PROC / 'self/ns/pid').readlink()}"
    return os.uname().nodename


def all_pids() -> list[int]:
    return [int(entry.name) for entry in PROC.iterdir() if entry.name.isdigit()]


def children(parent: int) -> list[Process]:
    """Return the direct children of a process."""
    processes = (inspect_process(pid) for pid in all_pids())
    return [process for process in processes if process is not None and process.parent == parent]


def handles_signal(pid: int, number: int) -> bool:
    """Return whether a process handles a signal; SIGQUIT would kill one without a handler."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        text = (PROC / str(pid) / "status").read_text()
        caught = int(text.partition("SigCgt:")[2].split()[0], 16)
        return bool(caught >> (number - 1) & 1)
    return False


def files_in_use(paths: Collection[Path]) -> set[Path]:
    """Return the given files that some process of this user has mapped or opened."""
    used = set()
    for pid in all_pids() if paths else ():
        with contextlib.suppress(OSError):  # the process has exited, or belongs to another user
            maps = (PROC / str(pid) / "maps").read_text(errors="replace")
            used |= {path for path in paths if str(path) in maps}
            for descriptor in (PROC / str(pid) / "fd").iterdir():
                with contextlib.suppress(OSError):
                    used.add(descriptor.readlink())
    return used & set(paths)


def is_working_directory(directory: Path) -> bool:
    """Return whether a directory is the working directory of a process of this user."""
    directory = directory.resolve()
    for pid in all_pids():
        with contextlib.suppress(OSError):  # the process has exited, or belongs to another user
            if (PROC / str(pid) / "cwd").readlink() == directory:
                return True
    return False


# ---- Marks


def is_marked(pid: int, mark: str) -> bool:
    """Return whether the environment of a process contains an entry that begins with `mark`.

    Args:
        mark: `NAME=value`, or `NAME=` and the beginning of a value.
    """
    try:
        environment = (PROC / str(pid) / "environ").read_bytes()
    except OSError:
        return False
    return any(entry.startswith(mark.encode()) for entry in environment.split(b"\0"))


def marked_pids(mark: str) -> list[int]:
    """Return the marked processes on this machine, except this process."""
    return [pid for pid in all_pids() if pid != os.getpid() and is_marked(pid, mark)]


# ---- Signals


def signal_marked(pid: int, number: int, mark: str) -> bool:
    """Send a signal to a process if it is marked; return whether it was sent."""
    return _signal_if(lambda: is_marked(pid, mark), pid, number)


def signal_process(process: Process, number: int) -> bool:
    """Send a signal to a process inspected earlier if it exists; return whether it was sent."""

    def is_the_same() -> bool:
        now = inspect_process(process.pid)
        return now is not None and now.start_ticks == process.start_ticks

    return _signal_if(is_the_same, process.pid, number)


def _signal_if(condition: Callable[[], bool], pid: int, number: int) -> bool:
    try:
        # Keeps the process number from being reused between the check and the signal.
        descriptor = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        if not condition():
            return False
        signal.pidfd_send_signal(descriptor, number)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True
