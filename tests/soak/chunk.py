"""One chunk: a run under the supervisor, with kills, until it is done."""

import dataclasses
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.launching import ROOT, environment
from tests.soak.kills import KINDS, SAVE_INTERVAL, Kill, named
from tests.soak.strike import FULL, POLL_SECONDS, kill_marked, strike, strike_the_start, words
from tests.supervised import Supervised
from zerolm.checkpoint import memory
from zerolm.common import processes
from zerolm.run_dir import jsonl
from zerolm.run_dir.jsonl import EventRow

START_SECONDS = 600.0  # until a start has done its first step: --compile on a loaded machine
REPORT_SECONDS = 300.0  # a hang is reported after its timeout
COINCIDENCE_SECONDS = 10.0  # between a kill and a fault of which only one is reported
QUIET_SECONDS = 45.0  # for what need not be reported
DONE_SECONDS = 3600.0
TAIL_BYTES = 1 << 14
DONE, STOPPED = 0, 75
IN_USE = "another run is writing to it now"
SMALL_DISK = "64m"


class Failed(Exception):
    """The run did something that it must not do after a kill."""


@dataclass(frozen=True)
class State:
    """What a run has shown until a moment: numbers of events, of faults, and bytes of output."""

    step: int
    printed_bytes: int
    startups: int
    resumes: int
    failures: int
    injected: int


class KilledRun:
    """A run with kills.

    Args:
        base: directory of the chunk, which has subdirectories `ledger`, `once` and `tmp`.
        arguments: flags of pretrain.py; the run directory is `base / "run"`.
        kills: in the order of their steps; what happens is written into them.
    """

    def __init__(
        self, base: Path, arguments: list[object], ranks: int, kills: list[Kill],
        rng: random.Random, **variables: str,
    ):  # fmt: skip
        self.base, self.run_dir, self.arguments, self.ranks = base, base / "run", arguments, ranks
        self.kills, self.rng = kills, rng
        self.once = base / "once"
        faults = ",".join(kill.detail for kill in kills if kill.is_injected)
        self.variables = {
            **variables, "FAULT": faults, "FAULT_ONCE": str(self.once),
            "ZEROLM_LEDGER": str(base / "ledger"), "TMPDIR": str(base / "tmp"),
        }  # fmt: skip
        self.problems: list[str] = []
        self.marks: list[str] = []
        self.training_seconds = 0.0
        self.starts = self.refused = 0
        self._supervised: Supervised | None = None

    @property
    def run(self) -> Supervised:
        assert self._supervised is not None
        return self._supervised

    def train(self) -> None:
        """Train to the end, with all kills.

        Raises:
            Failed: a start failed, hung, or was refused.
        """
        self.start()
        self.wait_for_training(0)
        for kill in list(self.kills):
            if not self.is_running():
                break
            if kill.is_injected and self.has_fired(kill):  # while the run responded to the last one
                kill.at_step = kill.step
                continue
            trained_since, before = time.monotonic(), self.state()
            if self.wait(lambda kill=kill: self.is_due(kill), DONE_SECONDS, "the next kill"):
                self.training_seconds += time.monotonic() - trained_since
                self.perform(kill, before if kill.is_injected else self.state())
        trained_since = time.monotonic()
        while (code := self.wait_for_end(DONE_SECONDS)) != DONE:
            if code != STOPPED:
                raise Failed(f"exit code {code}: {self.run.output()[-3000:]}")
            self.start()
        self.training_seconds += time.monotonic() - trained_since

    def clean(self) -> None:
        """Kill everything that is left, also of earlier starts of the supervisor."""
        for mark in self.marks:
            kill_marked(mark)
        if self._supervised is not None:
            self.run.clean()

    def left_processes(self) -> list[str]:
        """Return the processes that the run has left behind."""
        return [" ".join(words(pid)) for mark in self.marks for pid in processes.marked_pids(mark)]

    # ---- Starts and ends

    def start(self) -> None:
        self.starts += 1
        self._supervised = Supervised(
            self.run_dir, self.arguments, num_ranks=self.ranks, **self.variables
        )
        self.marks.append(self.run.mark)
        (self.base / "marks").write_text("\n".join(self.marks))

    def is_running(self) -> bool:
        """Return whether the run is not done; start the supervisor again if it has stopped."""
        code = self.run.process.poll()
        if code == STOPPED:
            self.start()
        return code in (None, STOPPED)

    def wait(self, condition: Callable[[], bool], seconds: float, what: str = "") -> bool:
        """Wait until `condition()`; return False if the supervisor ends before, or it is too late.

        Raises:
            Failed: it is too late for `what` the run cannot go on without.
        """
        deadline = time.monotonic() + seconds
        while not condition():
            if self.run.process.poll() is not None:
                return condition()
            if time.monotonic() > deadline:
                if what:
                    raise Failed(f"no {what} after {seconds:.0f} s: {self.run.output()[-3000:]}")
                return False
            time.sleep(POLL_SECONDS)
        return True

    def wait_for_end(self, seconds: float) -> int:
        self.wait(lambda: False, seconds, "end")
        return self.run.process.returncode

    def wait_for_training(self, startups: int) -> bool:
        """Wait until a start after the first `startups` has done its first step.

        A supervisor that is started while the ranks of a killed one still save is refused; then it
        is started again, as an operator would.

        Returns:
            False if the run was done before.
        """
        while not self.wait(
            lambda: len(self.events("startup")) > startups, START_SECONDS, "first step"
        ):
            code = self.run.process.returncode
            if code == DONE:
                return False
            if code == 2 and IN_USE in self.run.output():
                self.refused += 1
                time.sleep(1)
            elif code != STOPPED:
                raise Failed(f"exit code {code}: {self.run.output()[-3000:]}")
            self.start()
        return True

    # ---- What the run shows

    def step(self) -> int:
        """Return the last step in the metrics, 0 if there is none."""
        try:
            with open(self.run_dir / "metrics.jsonl", "rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - TAIL_BYTES))
                found = re.findall(rb'"step": (\d+),', file.read())
        except FileNotFoundError:
            return 0
        return int(found[-1]) if found else 0

    def events(self, name: str) -> list[dict[str, Any]]:
        rows = jsonl.read_rows(self.run_dir / "events.jsonl", EventRow)
        return [row for row in rows if row["event"] == name]

    def printed(self, pattern: str, before: State) -> str:
        """Return the first line of the output since then that matches, "" if none does."""
        with open(self.run.log, "rb") as file:
            file.seek(before.printed_bytes)
            lines = file.read().decode(errors="replace").replace(f"{self.base}/", "").splitlines()
        return next((line.strip()[:300] for line in lines if re.search(pattern, line)), "")

    def is_due(self, kill: Kill) -> bool:
        if not kill.is_injected:
            return self.step() >= kill.step
        return self.has_fired(kill) or self.step() > kill.step + 2 * SAVE_INTERVAL

    def has_fired(self, kill: Kill) -> bool:
        return (self.once / kill.detail.replace(":", "-")).exists()

    # ---- A kill

    def state(self) -> State:
        return State(
            self.step(), self.run.log.stat().st_size,
            *(len(self.events(name)) for name in ("startup", "resume", "attempt_failed")),
            len(list(self.once.iterdir())),
        )  # fmt: skip

    def perform(self, kill: Kill, before: State) -> None:
        """Cause a kill, and wait for its report and until the run trains again.

        Args:
            before: the kill; of one that is injected it may be some seconds old.
        """
        kind, began, struck_at = KINDS[kill.kind], time.monotonic(), time.time()
        if kill.is_injected and not self.has_fired(kill):
            return  # a fault before it has kept the save from getting there
        if not kill.is_injected and "\ndone: " in self.run.output():
            return  # a busy machine noticed the step when all was trained
        if not kill.is_injected and not strike(kill, self.run, self.rng):
            return
        kill.at_step = kill.step if kill.is_injected else before.step
        sign = kind.sign.format(rank=named(kill.rank, self.ranks))
        if kind.restarted_by == "us":
            self.run.process.wait(timeout=REPORT_SECONDS)
        if kind.sign:
            self.wait(lambda: self.is_reported(kill, sign, before, struck_at), REPORT_SECONDS)
            kill.report = self.printed(sign, before)
            kill.reported_seconds = round(time.monotonic() - began, 2)
            if not self.is_reported(kill, sign, before, struck_at):
                self.problems.append(f"{kill.kind} in step {kill.at_step}: not reported")
        if kill.kind == "while starting":
            self.kills.append(dataclasses.replace(kill, kind="one rank"))
            self.wait(lambda: bool(self.printed(r"supervise: attempt \d+:", before)), QUIET_SECONDS)
            time.sleep(self.rng.uniform(0, self.events("startup")[-1]["seconds"]))
            if len(self.events("startup")) == before.startups:  # a restart is shorter than a start
                strike_the_start(kill, self.run, self.rng)
        if kill.kind == "full disk":
            if kill.rank == 0:  # else it is free again before the next save
                self.wait(
                    lambda: bool(self.printed(r"FAILED:|supervise:  ", before)), QUIET_SECONDS
                )
            (self.run_dir / FULL).unlink()
        if kind.restarted_by == "us":
            self.start()
        if kind.restarted_by != "nobody" and self.wait_for_training(before.startups):
            kill.recovered_seconds = round(time.monotonic() - began, 2)
            kill.parts = self.events("startup")[-1]["parts"]
            resumed = self.events("resume")
            if len(resumed) > before.resumes:
                kill.lost_steps = kill.at_step - resumed[-1]["step"]
        self.check_failures(kill, before, self.state())

    def is_reported(self, kill: Kill, sign: str, before: State, struck_at: float) -> bool:
        """Return whether a kill is reported, or a fault that was injected at the same moment.

        Args:
            struck_at: when the kill happened, on the clock of `time.time`.
        """
        if self.printed(sign, before):
            return True
        own = kill.detail.replace(":", "-")
        fired = [path.stat().st_mtime for path in self.once.iterdir() if path.name != own]
        coincides = any(abs(at - struck_at) < COINCIDENCE_SECONDS for at in fired)
        return coincides and self.state().failures > before.failures

    def check_failures(self, kill: Kill, before: State, after: State) -> None:
        """Note failures that neither the kill nor a fault that was injected meanwhile explains."""
        allowed = {"while starting": 2, "full disk": 9}.get(kill.kind, 1)
        if (
            failed := after.failures - before.failures
        ) > allowed + after.injected - before.injected:
            reasons = [event["reasons"] for event in self.events("attempt_failed")[-failed:]]
            where = f"{kill.kind} in step {kill.at_step}"
            self.problems.append(f"{where}: {failed} failures: {reasons}")


def command_problems(run_dir: Path) -> list[str]:
    """Return what is wrong with `status` and `report` of a run that is done."""
    found = []
    for arguments in (["status"], ["report", "--output", str(run_dir.parent / "report.html")]):
        done = subprocess.run(
            [sys.executable, "-m", "zerolm", arguments[0], str(run_dir), *arguments[1:]], cwd=ROOT,
            env=environment(), capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        if done.returncode or (arguments == ["status"] and "done" not in done.stdout):
            found.append(f"{arguments[0]}: exit code {done.returncode}: {done.stderr[-500:]}")
    return found


def left_files(run_dir: Path) -> Iterator[str]:
    """Yield the temporary files and the copies in memory that a run that is done has left."""
    for path in sorted(run_dir.rglob("*")):
        if path.name.startswith(".tmp") or path.suffix == ".tmp":
            yield f"left behind: {path.relative_to(run_dir)}"
    if found := memory.bytes_on_host(run_dir):
        yield f"left behind: {found} bytes of copies in memory"


def seconds_of(event: dict[str, Any]) -> dict[str, Any]:
    """Return what an event `recovered` says about a recovery, up to the next new step."""
    return {key: event[key] for key in ("seconds", "repeated_steps", "parts")}


def performed(kills: list[Kill]) -> list[dict[str, Any]]:
    """Return the entries of the log for the kills that have happened."""
    return [dataclasses.asdict(kill) for kill in kills if kill.at_step is not None]
