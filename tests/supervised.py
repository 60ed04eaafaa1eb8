"""Runs under the supervisor: started, watched, hit, and cleaned up by a mark, whatever happens."""

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

from tests.launching import ROOT, command, environment
from zerolm import processes, pulse
from zerolm.events import EVENTS


class Supervised:
    """`python -m launch supervise -- deepspeed ... pretrain.py ...` of two ranks, with its log.

    Args:
        run_dir: that of `arguments`.
        arguments: of pretrain.py.
        flags: of the supervisor.
        variables: more of the environment: FAULT, ZEROLM_LEDGER.
    """

    def __init__(
        self,
        run_dir: Path,
        arguments: list[object],
        *flags: str,
        num_ranks: int = 2,
        **variables: str,
    ):
        self.run_dir, self.log = run_dir, run_dir.with_name(f"{run_dir.name}.log")
        self.mark = f"ZEROLM_TEST={uuid.uuid4().hex}"
        words = [sys.executable, "-m", "launch", "supervise", "--backoff", "0.2s", *flags, "--"]
        words += command(num_ranks, *arguments, launcher=("--log_level", "error"))
        self.start = len(self.text())
        with open(self.log, "a") as log:
            self.process = subprocess.Popen(
                words, env=environment(**dict([self.mark.split("=")]), **variables), cwd=ROOT,
                stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    def __enter__(self) -> "Supervised":
        return self

    def __exit__(self, *error: object) -> None:
        self.clean()

    def clean(self) -> None:
        """Kill whatever is left of it."""
        while left := processes.marked(self.mark):
            for pid in left:
                processes.send(pid, signal.SIGKILL, self.mark)
            time.sleep(0.05)
        self.process.wait(timeout=30)

    def text(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def output(self) -> str:
        """Return what this start has said so far."""
        return self.text()[self.start :]

    def wait(self, seconds: float) -> int:
        """Wait for the end and return the exit code; too late is a failure with the output."""
        try:
            return self.process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"no end after {seconds} s:\n{self.output()[-6000:]}") from None

    def wait_for(self, what: str, condition: Any, seconds: float) -> None:
        """Wait until `condition()`; an end before, or too late, is a failure with the output."""
        deadline = time.monotonic() + seconds
        while not condition():
            ended = self.process.poll() is not None
            assert not ended and time.monotonic() < deadline, f"{what}:\n{self.output()[-6000:]}"
            time.sleep(0.02)

    def wait_for_step(self, step: int, seconds: float = 120) -> None:
        """Wait until the metrics have a step: with `--log_interval 1`."""
        path = self.run_dir / "metrics.jsonl"
        self.wait_for(
            f"step {step} was not reached",
            lambda: path.exists() and f'"step": {step},' in path.read_text(),
            seconds,
        )

    def heartbeats(self) -> dict[int, dict[str, Any]]:
        """Return the heartbeats of this start's ranks that are alive."""
        found = pulse.read_heartbeats(self.run_dir)
        return {
            rank: beat for rank, beat in found.items() if processes.has_mark(beat["pid"], self.mark)
        }

    def hit(self, pid: int, number: int) -> None:
        """Send a signal to a process of this run."""
        assert processes.send(pid, number, self.mark), f"{pid} is not of this run"

    def ask(self, number: int) -> None:
        """Send a signal to the supervisor."""
        os.kill(self.process.pid, number)

    def events(self) -> list[dict[str, Any]]:
        path = self.run_dir / EVENTS
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines if line.strip()]
