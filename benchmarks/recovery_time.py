"""Seconds from the fault of a rank to the end of the next step that had not been done before.

    python -m benchmarks.recovery_time [--kills 5] [--fault kill] [--before COMMIT] [--output FILE]

A toy Llama on two ranks runs under `python -m launch supervise`. A rank gets SIGKILL, or SIGSTOP
with `--fault stop`, three steps after a checkpoint; medians of the recoveries, by part. Parts are
timed from outside, by the supervisor's output, the kernel's start times of the processes, the event
`startup` and metrics.jsonl, so that `--before COMMIT` times an earlier commit with the same ruler.
Two quiet cores are needed; the machine's own speed is the last line.
"""

import argparse
import json
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import ROOT
from tests.launching import LLAMA, environment, free_port, write_json, write_shards
from zerolm.common import processes
from zerolm.watchdog import progress

SAVE, AFTER_SAVE, SECONDS = 10, 3, 600.0
STEP_SECONDS = 0.1  # added to each step, since a toy step is shorter than a kill takes
SEQ_LEN, BATCH = 32, 8
TICKS = os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=5, help="faults a run (default: 5)")
    parser.add_argument("--fault", choices=("kill", "stop"), default="kill")
    parser.add_argument("--before", metavar="COMMIT", help="also time this commit")
    parser.add_argument("--output", type=Path, help="also write the table to this file")
    parser.add_argument("--tree", type=Path, default=ROOT, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    columns = {}
    with tempfile.TemporaryDirectory(prefix="recovery-") as directory:
        if arguments.before:
            tree = checkout(arguments.before, Path(directory, "before"))
            columns["before"] = measure(tree, Path(directory, "a"), arguments)
        columns["now"] = measure(arguments.tree, Path(directory, "b"), arguments)
    text = table(columns, arguments)
    print(text)
    if arguments.output:
        arguments.output.write_text(text)


def checkout(commit: str, tree: Path) -> Path:
    """Write the files of a commit to a directory."""
    tree.mkdir()
    archive = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True, check=True)
    subprocess.run(["tar", "-x", "-C", str(tree)], input=archive.stdout, check=True)
    return tree


def table(columns: dict[str, list[dict[str, float]]], arguments: argparse.Namespace) -> str:
    names = list(columns["now"][0])
    number = len(columns["now"])
    lines = [
        "# Time of a recovery", "",
        f"`python -m benchmarks.recovery_time --fault {arguments.fault}`, "
        f"{time.strftime('%Y-%m-%d')}, {platform.machine()}, {os.cpu_count()} cores, Python "
        f"{platform.python_version()}. Seconds, medians of {number}; largest of the sum.", "",
        "| part | " + " | ".join(columns) + " |", "|---|" + "---|" * len(columns),
    ]  # fmt: skip
    for name in names:
        values = [median(row[name] for row in rows) for rows in columns.values()]
        lines.append(f"| {name} | " + " | ".join(f"{value:.2f}" for value in values) + " |")
    worst = [max(row["sum"] for row in rows) for rows in columns.values()]
    lines.append("| largest sum | " + " | ".join(f"{value:.2f}" for value in worst) + " |")
    return "\n".join([*lines, "", f"`import torch`: {import_seconds():.2f} s.", ""])


def import_seconds() -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return time.perf_counter() - start


def measure(tree: Path, base: Path, arguments: argparse.Namespace) -> list[dict[str, float]]:
    """Run a tree with faults; return the parts of each recovery."""
    base.mkdir()
    with Run(tree, base) as run:
        return [run.recovery(arguments.fault) for _ in range(arguments.kills)]


class Run:
    """A supervised run of a tree, whose output lines are kept with the time of their arrival."""

    def __init__(self, tree: Path, base: Path):
        self.run_dir = base / "run"
        self.mark = f"ZEROLM_BENCHMARK={random.getrandbits(64):x}"
        profile = write_json(base / "ds.json", {"zero_optimization": {"stage": 2}})
        llama = write_json(base / "llama.json", LLAMA)
        corpus = write_shards(base / "corpus")
        argv = [
            sys.executable, "-m", "launch", "supervise", "--", "deepspeed", "--num_gpus", 2,
            "--master_port", free_port(), "pretrain.py", "--deepspeed_config", profile,
            "--model_config", llama, "--data", corpus, "--run_dir", self.run_dir,
            "--seq_len", SEQ_LEN, "--batch_tokens", BATCH * SEQ_LEN, "--micro_batch_size", 2,
            "--total_tokens", 100_000 * BATCH * SEQ_LEN, "--learning_rate", 1e-3,
            "--log_interval", 1, "--checkpoint_interval", SAVE, "--wandb", "off",
        ]  # fmt: skip
        name, value = self.mark.split("=")
        fault = f"step.begin:*:*:sleep={STEP_SECONDS}"
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        variables = environment(FAULT=fault, PATH=path, PYTHONPATH=str(tree), **{name: value})
        self.lines: list[tuple[float, str]] = []
        self.process = subprocess.Popen(
            list(map(str, argv)), cwd=tree, env=variables, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append((clock(), line.rstrip()))

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *error: object) -> None:
        while left := processes.marked_pids(self.mark):
            for pid in left:
                processes.signal_marked(pid, signal.SIGKILL, self.mark)
            time.sleep(0.05)
        self.process.wait(timeout=30)

    def recovery(self, fault: str) -> dict[str, float]:
        """Inject a fault; return the seconds of each part of the recovery."""
        begun = self.step()
        self.wait(lambda: self.step() >= max(begun, 1) + SAVE + AFTER_SAVE)
        self.wait(lambda: self.step() % SAVE == AFTER_SAVE)
        self.wait(lambda: self.saved() >= self.step() - AFTER_SAVE)
        pid, first = self.rank()["pid"], len(self.starts())
        number = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[fault]
        at = clock()
        assert processes.signal_marked(pid, number, self.mark), "the rank runs"
        time.sleep(0.05)
        last = self.step()
        noticed = self.line_after("watchdog: rank", at)
        ended = self.line_after("supervise: attempt", noticed)
        restarted = self.line_after("supervise: attempt", ended)
        self.wait(lambda: len(self.starts()) > first)
        rank = self.rank()
        launcher, created = (started(rank[key]) for key in ("launcher_pid", "pid"))
        parts = self.starts()[-1]["parts"]
        inside = {key: parts[key] for key in list(parts) if key not in OUTSIDE}
        self.wait(lambda: self.step() > last)
        end = clock()
        cpu = cpu_seconds(rank["pid"])
        launchers = sum(cpu_seconds(pid) for pid in ancestors(rank["pid"]))
        first_step = created + sum(inside.values())
        return {
            "noticed": noticed - at, "ended": ended - noticed, "pause": restarted - ended,
            "deepspeed": launcher - restarted, "node launcher": created - launcher, **inside,
            "repeated steps": end - first_step, "sum": end - at,
            "CPU seconds of the launchers": launchers, "CPU seconds of a rank": cpu,
        }  # fmt: skip

    # ---- Files and output of the run

    def step(self) -> int:
        rows = read_lines(self.run_dir / "metrics.jsonl")
        return int(rows[-1]["step"]) if rows else 0

    def saved(self) -> int:
        names = [path.parent.name for path in self.run_dir.glob("checkpoints/step-*/MANIFEST.json")]
        return max((int(name.rpartition("-")[2]) for name in names), default=0)

    def starts(self) -> list[dict[str, Any]]:
        rows = read_lines(self.run_dir / "events.jsonl")
        return [row for row in rows if row["event"] == "startup"]

    def rank(self) -> dict[str, Any]:
        beats = progress.read_heartbeats(self.run_dir)
        return dict(beats[random.choice(sorted(beats))])

    def line_after(self, text: str, after: float) -> float:
        """Return when the first line with a text arrived after a time."""

        def found() -> list[float]:
            return [at for at, line in list(self.lines) if at > after and text in line]

        self.wait(lambda: bool(found()))
        return found()[0]

    def wait(self, condition: Callable[[], bool]) -> None:
        deadline = clock() + SECONDS
        while not condition():
            ended = self.process.poll() is not None
            if ended or clock() > deadline:
                lines = [line for _, line in self.lines if "FAULT" not in line]
                sys.exit("the run does not go on:\n" + "\n".join(lines[-60:]))
            time.sleep(0.01)


OUTSIDE = ("noticed", "ended", "pause", "deepspeed", "launcher", "node launcher")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a file."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.split("\n")[:-1] if line.strip()]


def started(pid: int) -> float:
    """Return when a process was started, on the clock of `clock`."""
    process = processes.inspect_process(pid)
    assert process is not None, f"process {pid} runs"
    return process.start_ticks / TICKS


def cpu_seconds(pid: int) -> float:
    """Return the user and system time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def ancestors(pid: int) -> list[int]:
    """Return the node launcher of a rank and the `deepspeed` that started it."""
    found = []
    for _ in range(2):
        process = processes.inspect_process(pid)
        assert process is not None, f"process {pid} runs"
        pid = process.parent
        found.append(pid)
    return found


def clock() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


if __name__ == "__main__":
    main()
