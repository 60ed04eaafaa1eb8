"""A fake pretrain.py whose launches end as a test plans, under the real supervisor."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from tests.launching import ROOT
from zerolm.common import processes

SECONDS = 60


class FakeRun:
    """A run directory, a fake pretrain.py, and a mark by which the test finds its processes."""

    def __init__(self, directory: Path):
        self.directory, self.run_dir = directory, directory / "run"
        self.script = shutil.copy(
            ROOT / "tests/launch/supervise/fake_pretrain.py", directory / "pretrain.py"
        )
        self.mark = f"ZEROLM_TEST={directory}"

    def start(self, plan: str, *flags: str, launcher=(), **more: str) -> subprocess.Popen:
        command = [sys.executable, "-m", "launch", "supervise", "--backoff", "0.02s", *flags, "--"]
        command += [sys.executable, self.script, *launcher, "--run_dir", str(self.run_dir)]
        variables = {"PLAN": plan, "ZEROLM_TEST": str(self.directory), **more}
        return subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, **variables}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def supervise(self, plan: str, *flags: str, launcher=(), **more: str) -> tuple[int, str]:
        process = self.start(plan, *flags, launcher=launcher, **more)
        output, _ = process.communicate(timeout=SECONDS)
        return process.returncode, output

    def num_starts(self) -> int:
        return len((self.run_dir / "starts").read_text().split())

    def wait_for_start(self) -> None:
        deadline = time.monotonic() + SECONDS
        while not (self.run_dir / "starts").exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        time.sleep(0.3)  # until it has started its child

    def processes(self) -> list[int]:
        return processes.marked_pids(self.mark)


def write_program(directory: Path, name: str, text: str) -> None:
    path = directory / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def fake_slurm(directory: Path, answer: str) -> tuple[dict[str, str], Path]:
    """Write a `squeue` that runs `answer` after noting its arguments, and a `scontrol`.

    Returns:
        Variables of a job that finds them, and the file to which `scontrol` appends its arguments.
    """
    tools = directory / "tools"
    tools.mkdir()
    write_program(tools, "squeue", f'echo "$@" >> {tools}/asked; {answer}')
    write_program(tools, "scontrol", f'echo "$@" >> {tools}/called')
    path = f"{tools}:{os.environ['PATH']}"
    return {"PATH": path, "SLURM_JOB_ID": "4711"}, tools / "called"
