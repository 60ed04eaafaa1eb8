"""A stand-in for training that hangs on purpose: real processes, collectives and watchdogs.

`start` forks the ranks of one run, which takes no time once torch is imported. Each has a process
group of Gloo and the watchdog of real runs, and repeats steps with the phases and the kinds of
collectives of ZeRO: weights gathered for the forward pass, gradients reduced in the backward pass,
sums over ranks, a save and an evaluation. With `queued` collectives it behaves as with NCCL: a
collective is entered without waiting for it, and the rank waits outside of torch's collectives
when it needs numbers, as `.tolist()` does. One rank, the victim, hangs in a given step.
"""

import ctypes
import gc
import os
import re
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from zerolm.watchdog import watchdog
from zerolm.watchdog.progress import record_progress

STEPS = 9
LAYERS = 2
SAVE_STEPS, EVALUATION_STEPS = 3, 4  # between two of them
CLONE_NEWNET = 0x40000000  # of unshare(2)
FOREVER = 3600.0


@dataclass(frozen=True)
class Case:
    """A run that hangs, or one that is only slow.

    Attributes:
        act: what the victim does: a key of `ACTS`.
        place: where: a phase, or a collective of the step.
        queued: collectives are queued as with NCCL.
        ranks: number of ranks.
        victim: the rank that hangs, is slow, or cuts the network.
        step: the step in which it hangs.
        timeout: `--hang_timeout`, in seconds.
    """

    act: str
    place: str
    queued: bool
    ranks: int
    victim: int
    step: int
    timeout: float


class Stop:
    reason = received = None

    def receive(self) -> None:
        """No signal asks these ranks to stop."""


class Rank:
    """One rank of a run: its collectives, and the steps that make use of them."""

    def __init__(self, case: Case, run_dir: Path, rank: int):
        self.case, self.run_dir, self.rank = case, run_dir, rank
        self.step, self.entered = 0, 0
        self.pending: list[Any] = []

    def run(self) -> None:
        dog = watchdog.Watchdog(self.run_dir, self.rank, self.case.timeout, Stop())
        dist.init_process_group(
            "gloo", f"file://{self.run_dir}/store", rank=self.rank, world_size=self.case.ranks
        )
        halves = [dist.new_group([first, first + 1]) for first in range(0, self.case.ranks - 1, 2)]
        self.half = halves[min(self.rank // 2, len(halves) - 1)]
        self.in_half = self.rank < 2 * len(halves)
        dog.connect(self.case.ranks)
        for step in range(1, STEPS + 1):
            self.train(step)
        dist.barrier()
        dog.close("done")

    def train(self, step: int) -> None:
        """Take one step as a run does."""
        self.step = step
        record_progress("data", step, (8 * step, 8))
        self.at("data")
        for _ in range(2):
            record_progress("forward")
            self.at("forward")
            for _ in range(LAYERS):
                self.enter("gather", 64)
                if self.in_half:
                    self.enter("half", 48)
            record_progress("backward")
            self.at("backward")
            for _ in range(LAYERS):
                self.enter("gather", 64)
                self.enter("scatter", 96)
        record_progress("reduce")
        self.enter("sums", 5)
        self.device_synchronize()
        record_progress("optimizer")
        self.at("optimizer")
        self.enter("norm", 1)
        self.device_synchronize()
        if step % SAVE_STEPS == 0:
            record_progress("checkpoint")
            self.at("checkpoint")
            (self.run_dir / f"saved-{self.rank}").write_bytes(b"x" * 4096)
            self.enter("sums", 3)
            self.device_synchronize()
        if step % EVALUATION_STEPS == 0 or (self.hangs("evaluation") and self.case.act == "alone"):
            self.evaluate()

    def evaluate(self) -> None:
        record_progress("evaluate")
        self.at("evaluate")
        self.enter("sums", 2)
        self.device_synchronize()

    def enter(self, name: str, size: int) -> None:
        """Enter a collective; the victim may skip it, or enter another one."""
        if self.hangs(name) and self.entered != self.step:
            self.entered = self.step  # once
            if self.case.act == "skip":
                return
            if self.case.act == "order":
                self.enter("sums", 7)
            if self.case.act == "kind":
                name = "broadcast"
        make: dict[str, Callable[[], Any]] = {
            "gather": lambda: dist.all_gather(
                [torch.empty(size) for _ in range(self.case.ranks)], torch.ones(size), async_op=True
            ),
            "half": lambda: dist.all_reduce(torch.ones(size), group=self.half, async_op=True),
            "broadcast": lambda: dist.broadcast(torch.ones(size), 0, async_op=True),
        }
        usual = lambda: dist.all_reduce(torch.ones(size), async_op=True)  # noqa: E731
        if self.case.queued:
            self.pending.append(make.get(name, usual)())
        elif name == "gather":
            dist.all_gather([torch.empty(size) for _ in range(self.case.ranks)], torch.ones(size))
        elif name == "half":
            dist.all_reduce(torch.ones(size), group=self.half)
        elif name == "broadcast":
            dist.broadcast(torch.ones(size), 0)
        else:
            dist.all_reduce(torch.ones(size))

    def device_synchronize(self) -> None:
        """Wait for the queued collectives, outside of torch's, like a copy from the device."""
        while not all(work.is_completed() for work in self.pending):
            time.sleep(0.005)
        self.pending.clear()

    def hangs(self, place: str) -> bool:
        case = self.case
        found = self.rank == case.victim and self.step == case.step and place == case.place
        if found and not (self.run_dir / "hung").exists():
            (self.run_dir / "hung").touch()
        return found

    def at(self, place: str) -> None:
        if self.hangs(place) and self.case.act in ACTS:
            ACTS[self.case.act](self)


# ---- What the victim does


def sleep(rank: Rank) -> None:
    time.sleep(FOREVER)


def compute(rank: Rank) -> None:
    while True:
        pass


def collect_garbage(rank: Rank) -> None:
    cycles = [[] for _ in range(100_000)]
    for cycle in cycles:
        cycle.append(cycles)
    while True:
        gc.collect()


def hold_interpreter(rank: Rank) -> None:
    ctypes.PyDLL(None).sleep(int(FOREVER))


def compute_natively(rank: Rank) -> None:
    re.match("(a*)*b", "a" * 60)


def deadlock_natively(rank: Rank) -> None:
    lock, library = ctypes.create_string_buffer(64), ctypes.PyDLL(None)
    library.pthread_mutex_lock(lock)
    library.pthread_mutex_lock(lock)


def read(rank: Rank) -> None:
    """Read a named pipe that nobody writes to, as from a mount that is gone."""
    path = rank.run_dir / "pipe"
    os.mkfifo(path)
    path.read_bytes()


def write(rank: Rank) -> None:
    """Write to a full pipe, as to a mount that is gone."""
    _, end = os.pipe()
    while True:
        os.write(end, b"x" * 4096)


def stop(rank: Rank) -> None:
    os.kill(os.getpid(), 19)


def cut_network(rank: Rank) -> None:
    subprocess.run(["ip", "link", "set", "lo", "down"], check=True)


def pause(rank: Rank) -> None:
    time.sleep(0.75 * rank.case.timeout)


def work_slowly(rank: Rank) -> None:
    for _ in range(8):
        time.sleep(0.4 * rank.case.timeout)
        record_progress("evaluate")


def write_slowly(rank: Rank) -> None:
    end = time.monotonic() + 3 * rank.case.timeout
    while time.monotonic() < end:
        (rank.run_dir / "slow").write_bytes(bytes(1 << 20))
        time.sleep(0.3)


def compile_slowly(rank: Rank) -> None:
    time.sleep(2.5 * rank.case.timeout)


ACTS: dict[str, Callable[[Rank], None]] = {
    function.__name__: function
    for function in (
        sleep, compute, collect_garbage, hold_interpreter, compute_natively, deadlock_natively,
        read, write, stop, cut_network, pause, work_slowly, write_slowly, compile_slowly,
    )
}  # fmt: skip


# ---- Processes


def isolate_network() -> bool:
    """Move this process to a network of its own, with a loopback interface; needs root."""
    if ctypes.CDLL(None).unshare(CLONE_NEWNET):
        return False
    return subprocess.run(["ip", "link", "set", "lo", "up"], check=False).returncode == 0


def start(case: Case, run_dir: Path) -> list[int]:
    """Fork the ranks of a run; return their process numbers. Their output goes to `output`."""
    run_dir.mkdir(parents=True, exist_ok=True)
    pids = []
    for rank in range(case.ranks):
        pid = os.fork()
        if pid == 0:
            try:
                out = os.open(run_dir / "output", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
                os.dup2(out, 1)
                os.dup2(out, 2)
                os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                os.environ["GLOO_SOCKET_IFNAME"] = "lo"
                Rank(case, run_dir, rank).run()
                sys.stderr.flush()
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                sys.stderr.flush()
                os._exit(1)
        pids.append(pid)
    return pids
