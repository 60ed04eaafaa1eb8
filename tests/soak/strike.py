"""Finds the processes that a kind of kill is aimed at, and signals them; fills the disk."""

import os
import random
import re
import signal
import time
from pathlib import Path

from tests.soak.kills import Kill
from tests.supervised import Supervised
from zerolm.common import processes

REPORT_SECONDS = 45.0  # at most, until a report is being written
POLL_SECONDS = 0.1
FULL = "full"  # the file that fills the disk


def strike(kill: Kill, run: Supervised, rng: random.Random) -> bool:
    """Cause a kill from outside of the run; return False if there is nothing to kill now."""
    if kill.kind in ("supervisor", "stop"):
        run.signal_supervisor(signal.SIGKILL if kill.kind == "supervisor" else signal.SIGTERM)
        return True
    if kill.kind == "machine":
        run.clean()
        return True
    if kill.kind == "full disk":
        return fill_disk(run.run_dir)
    beats = run.heartbeats()
    if kill.rank not in beats:
        return False
    if kill.kind == "all ranks":
        sent = [send(kill, run, beat["pid"]) for beat in beats.values()]
        return all(sent)
    victims = {
        "deepspeed": lambda: children(run.process.pid, "zerolm.engine.launcher"),
        "node launcher": lambda: [beats[kill.rank]["launcher_pid"]],
        "loader": lambda: children(beats[kill.rank]["pid"], *words(beats[kill.rank]["pid"])),
        "tracker": lambda: with_word(run, "mirror") + with_word(run, "wandb-core"),
        "report": lambda: awaited_report(run),
    }.get(kill.kind, lambda: [beats[kill.rank]["pid"]])()
    number = signal.SIGSTOP if kill.kind == "stopped rank" else signal.SIGKILL
    return bool(victims) and send(kill, run, rng.choice(victims), number)


def strike_the_start(kill: Kill, run: Supervised, rng: random.Random) -> None:
    """Kill a process of the launch that is starting, not the supervisor or its report."""
    pids = processes.marked_pids(run.mark)
    victims = [pid for pid in pids if processes.is_marked(pid, f"{processes.SUPERVISOR}=")]
    if victims:
        send(kill, run, rng.choice(victims))


def send(kill: Kill, run: Supervised, pid: int, number: int = signal.SIGKILL) -> bool:
    shown = " ".join(words(pid)).replace(str(run.run_dir.parent), "")
    kill.detail = re.sub(r"/\S*/", "", shown)[-80:]  # without directories of this machine
    return processes.signal_marked(pid, number, run.mark)


def kill_marked(mark: str) -> None:
    """Kill all processes with the mark of a run, never with a part of one."""
    assert re.fullmatch(r"ZEROLM_TEST=[0-9a-f]{32}", mark), mark
    while left := processes.marked_pids(mark):
        for pid in left:
            processes.signal_marked(pid, signal.SIGKILL, mark)
        time.sleep(0.05)


def words(pid: int) -> list[str]:
    """Return the arguments of a process, none if it has ended."""
    try:
        text = (processes.PROC / str(pid) / "cmdline").read_text(errors="replace")
    except OSError:
        return []
    return [word for word in text.split("\0") if word]


def children(parent: int, *some: str) -> list[int]:
    """Return the children of a process that have these arguments; a loader has those of a rank."""
    found = processes.children(parent)
    return [child.pid for child in found if set(some) <= set(words(child.pid))]


def with_word(run: Supervised, name: str) -> list[int]:
    """Return the processes with an argument that is this, or a path to it."""
    pids = processes.marked_pids(run.mark)
    return [pid for pid in pids if any(Path(word).name == name for word in words(pid))]


def awaited_report(run: Supervised) -> list[int]:
    """Return the process that writes the report, as soon as there is one."""
    deadline = time.monotonic() + REPORT_SECONDS
    while not (found := with_word(run, "report")) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    return found


def fill_disk(run_dir: Path) -> bool:
    """Fill the file system of the run directory, if it is one that may be filled."""
    if not os.path.ismount(run_dir):
        return False
    size = 1 << 20
    with open(run_dir / FULL, "ab", buffering=0) as file:
        while size:
            try:
                file.write(bytes(size))
            except OSError:
                size //= 2
    return True
