"""Runs under the supervisor for tests: start, observe and signal them, and always clean up."""

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
from zerolm.common import processes
from zerolm.watchdog import progress


class Supervised:
    """A running `python -m launch supervise -- deepspeed ... pretrain.py ...`, with its log.

    Args:
        run_dir: the run directory in `arguments`.
        arguments: flags of pretrain.py.
        flags: flags of the supervisor.
        variables: additional environment variables, such as FAULT and ZEROLM_LEDGER.
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
        argv = [sys.executable, "-m", "launch", "supervise", "--backoff", "0.2s", *flags, "--"]
        argv += command(num_ranks, *arguments, launcher=("--log_level", "error"))
        self.start = len(self.text())
        with open(self.log, "a") as log:
            self.process = subprocess.Popen(
                argv, env=environment(**dict([self.mark.split("=")]), **variables), cwd=ROOT,
                stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    def __enter__(self) -> "Supervised":
        return self

    def __exit__(self, *error: object) -> None:
        self.clean()

    def clean(self) -> None:
        """Kill all processes of the run that are left."""
        while left := processes.marked_pids(self.mark):
            for pid in left:
                processes.signal_marked(pid, signal.SIGKILL, self.mark)
            time.sleep(0.05)
        self.process.wait(timeout=30)

    def text(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def output(self) -> str:
        """Return the output of this start so far."""
        return self.text()[self.start :]

    def wait(self, seconds: float) -> int:
        """Wait for the end and return the exit code; fail with the output after `seconds`."""
        try:
            return self.process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"not finished after {seconds} s:\n{self.output()[-6000:]}"
            ) from None

    def wait_for(self, failure: str, condition: Any, seconds: float) -> None:
        """Wait until `condition()`; fail with the output if the run ends first, or is too late."""
        deadline = time.monotonic() + seconds
        while not condition():
            ended = self.process.poll() is not None
            assert not ended and time.monotonic() < deadline, f"{failure}:\n{self.output()[-6000:]}"
            time.sleep(0.02)

    def wait_for_step(self, step: int, seconds: float = 120) -> None:
        """Wait until a step is in the metrics. Needs `--log_interval 1`."""
        path = self.run_dir / "metrics.jsonl"
        self.wait_for(
            f"step {step} was not reached",
            lambda: path.exists() and f'"step": {step},' in path.read_text(),
            seconds,
        )

    def heartbeats(self) -> dict[int, dict[str, Any]]:
        """Return the heartbeats of this start's living ranks."""
        beats = progress.read_heartbeats(self.run_dir)
        return {
            rank: beat
            for rank, beat in beats.items()
            if processes.is_marked(beat["pid"], self.mark)
        }

    def send(self, pid: int, number: int) -> None:
        """Send a signal to a process of this run."""
        assert processes.signal_marked(pid, number, self.mark), f"{pid} is not of this run"

    def signal_supervisor(self, number: int) -> None:
        """Send a signal to the supervisor."""
        os.kill(self.process.pid, number)

    def events(self) -> list[dict[str, Any]]:
        path = self.run_dir / "events.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines if line.strip()]
