"""Soak test: random faults for a given time, then a comparison with an uninterrupted run.

    python -m tests.soak --minutes 30 --run_dir runs/soak --output benchmarks/results/soak.md

A tiny model is trained under the supervisor on two ranks of this machine. Each launch has one
fault: inside the code, at a point of `zerolm.common.faults`, or from outside, a signal to a rank, a
loader worker, the node launcher or the supervisor. After the time is over, the run continues
without faults until its token budget is spent. Then everything it has learned and every sequence
that it was trained on is compared bit for bit with an uninterrupted run. Exits with 0 if they are
equal and every fault was reported.
"""

import argparse
import os
import platform
import random
import re
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.end_to_end import run_digest
from tests.end_to_end.recipe import profile, recipe
from tests.launching import LLAMA, launch, write_json, write_shards
from tests.supervised import Supervised
from zerolm.common import processes

SAVE_INTERVAL = 25
HANG_SECONDS = 30
REPORT_SECONDS = 90.0  # a hang is reported after its timeout, and a loaded machine is slow
INSIDE = {  # {point of the code: possible actions}
    "step.begin": ("kill", "exit", "raise", "hang", "stop"),
    "step.backward": ("kill", "raise"),
    "step.end": ("kill", "exit"),
    "checkpoint.begin": ("kill",),
    "checkpoint.snapshot": ("kill", "exit"),
    "checkpoint.write": ("kill",),
    "checkpoint.written": ("kill",),
    "checkpoint.manifest": ("kill",),
    "checkpoint.rename": ("kill",),
    "checkpoint.pointer": ("kill",),
}
RANK_0_ONLY = ("checkpoint.manifest", "checkpoint.rename", "checkpoint.pointer")
OUTSIDE = ("SIGKILL a rank", "SIGSTOP a rank", "SIGKILL the node launcher", "SIGKILL a loader",
           "SIGTERM to the supervisor", "SIGUSR2 to a rank")  # fmt: skip


@dataclass
class Fault:
    """One fault, and how the run responded. Times are in seconds after the fault."""

    action: str
    step: int
    report: str = ""
    report_seconds: float | None = None
    resume_seconds: float | None = None


class Soak:
    """One run with random faults, and an uninterrupted run for comparison."""

    def __init__(self, base: Path, seed: int, minutes: float, steps: int):
        self.base, self.run_dir, self.random = base, base / "run", random.Random(seed)
        self.minutes, self.steps = minutes, steps
        base.mkdir(parents=True)
        for name in ("ledger", "uninterrupted-ledger"):
            (base / name).mkdir()
        self.corpus = write_shards(base / "corpus", num_documents=2000)
        self.llama = write_json(base / "llama.json", LLAMA)
        self.ds_json = profile(base / "ds.json", self.random.choice((2, 3)), bf16=True)
        self.faults: list[Fault] = []
        self.starts = 0

    def arguments(self, run_dir: Path) -> list[object]:
        flags = recipe(self.llama, self.corpus, run_dir, self.ds_json, self.steps, micro=2)
        flags += ["--checkpoint_interval", SAVE_INTERVAL, "--wandb", "off", "--num_workers", 1]
        return [*flags, "--hang_timeout", f"{HANG_SECONDS}s"]

    def uninterrupted(self) -> dict[str, Any]:
        """Train without faults and return the digest of that run."""
        ledger = self.base / "uninterrupted-ledger"
        variables = {"ZEROLM_LEDGER": str(ledger)}
        arguments = self.arguments(self.base / "uninterrupted")
        done = launch(2, *arguments, timeout=3600, **variables)
        assert done.returncode == 0, done.stdout[-4000:]
        return run_digest.digest(self.base / "uninterrupted", ledger)

    def step(self) -> int:
        """Return the last logged step, 0 if there is none."""
        path = self.run_dir / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        matches = [re.search(r'"step": (\d+),', line) for line in lines[-3:]]
        return max((int(match[1]) for match in matches if match), default=0)

    def start_once(self, with_fault: bool) -> bool:
        """Start the supervisor once, with or without a fault; return whether the run is done."""
        self.starts += 1
        variables = {"ZEROLM_LEDGER": str(self.base / "ledger")}
        inside = with_fault and self.random.random() < 0.5
        fault = Fault("", self.step() + self.random.randrange(2, 3 * SAVE_INTERVAL))
        if inside:
            point = self.random.choice(sorted(INSIDE))
            action = self.random.choice(INSIDE[point])
            rank = 0 if point in RANK_0_ONLY else self.random.randrange(2)
            if point.startswith("checkpoint."):
                fault.step = -(-fault.step // SAVE_INTERVAL) * SAVE_INTERVAL
            fault.action = f"{point}:{rank}:{fault.step}:{action}"
            once = self.base / f"once-{self.starts}"
            once.mkdir()
            variables |= {"FAULT": fault.action, "FAULT_ONCE": str(once)}
        elif with_fault:
            fault.action = self.random.choice(OUTSIDE)
        flags = ["--backoff", "1s", "--max_restarts", "5"]
        with Supervised(self.run_dir, self.arguments(self.run_dir), *flags, **variables) as run:
            if with_fault:
                self.faults.append(fault)
                self.observe(run, fault, inside)
                print(fault, flush=True)
            if run.process.poll() is None and with_fault:
                self.stop_after_next_save(run)
            code = run.wait(3600)
            assert processes.marked_pids(run.mark) == [], "a process was left behind"
        assert code in (0, 75), f"exit code {code}: {fault}\n{run.output()[-5000:]}"
        return code == 0

    def observe(self, run: Supervised, fault: Fault, inside: bool) -> None:
        """Wait for the fault, or cause it; then wait for its report and for the next start."""

        def is_due() -> bool:
            return "FAULT" in run.output() if inside else self.step() >= fault.step

        try:
            run.wait_for("no fault", is_due, 600)
            start = time.monotonic()
            if not inside:
                self.cause(run, fault.action)
            signs = ("watchdog: ", "supervise:   ", "stopped on request")
            run.wait_for(
                "not reported", lambda: any(sign in run.output() for sign in signs), REPORT_SECONDS
            )
            fault.report_seconds = time.monotonic() - start
            starts = num_starts(run)
            if "stopped on request" not in run.output():
                run.wait_for("not resumed", lambda: num_starts(run) > starts, 300)
                fault.resume_seconds = time.monotonic() - start
        except AssertionError:
            if run.process.poll() is None:
                raise
            if not inside and self.step() < fault.step:
                fault.action = f"none: the run was done before {fault.action}"
        lines = [line for line in run.output().splitlines() if line.startswith("supervise:   ")]
        fault.report = (
            lines[0].removeprefix("supervise:").strip() if lines else "stopped on request"
        )

    def cause(self, run: Supervised, action: str) -> None:
        """Cause a fault from outside."""
        beats = run.heartbeats()
        if len(beats) < 2:
            return
        rank = beats[self.random.randrange(2)]
        if action == "SIGTERM to the supervisor":
            run.signal_supervisor(signal.SIGTERM)
        elif action == "SIGKILL the node launcher":
            run.send(rank["launcher_pid"], signal.SIGKILL)
        elif action == "SIGKILL a loader":
            run.send(processes.children(rank["pid"])[0].pid, signal.SIGKILL)
        else:
            run.send(rank["pid"], signal.Signals[action.split()[0]])

    def stop_after_next_save(self, run: Supervised) -> None:
        """Let the run save one checkpoint after a fault, then ask it to stop."""
        target = self.step() + SAVE_INTERVAL
        while run.process.poll() is None and self.step() < target:
            time.sleep(0.2)
        if run.process.poll() is None:
            run.signal_supervisor(signal.SIGTERM)


def num_starts(run: Supervised) -> int:
    return sum(event["event"] in ("resume", "start") for event in run.events())


def report(soak: Soak, differences: list[str], start: float, argv: list[str]) -> str:
    with open("/proc/cpuinfo") as file:
        cpu = next((line.split(":")[1].strip() for line in file if "model name" in line), "?")
    lines = [
        "# Soak: random faults, then the same bits", "",
        "```bash", f"python -m tests.soak {' '.join(argv)}", "```", "",
        f"{time.strftime('%Y-%m-%d')}, {cpu}, {os.cpu_count()} cores, Linux {platform.release()}, "
        f"two ranks with Gloo. {(time.monotonic() - start) / 60:.0f} minutes, {soak.steps} steps, "
        f"{len(soak.faults)} faults, {soak.starts} starts of the supervisor.", "",
        "Result: " + (f"{len(differences)} differences:" if differences else "equal to the "
                      "uninterrupted run in every bit: losses, sequences, weights, optimizer."), "",
        *[f"- {line}" for line in differences[:20]],
        "| fault | step | reported after | resumed after | message of the supervisor |",
        "|---|---|---|---|---|",
    ]  # fmt: skip
    for fault in soak.faults:
        times = [
            "-" if seconds is None else f"{seconds:.1f} s"
            for seconds in (fault.report_seconds, fault.resume_seconds)
        ]
        message = fault.report.replace("|", "\\|").replace(str(soak.base), "...")
        lines.append(f"| {fault.action} | {fault.step} | {times[0]} | {times[1]} | {message} |")
    return "\n".join(lines) + "\n"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, required=True, help="minutes of faults")
    parser.add_argument("--run_dir", type=Path, required=True, help="new run directory")
    parser.add_argument("--seed", type=int, default=0, help="seed of the faults (default: 0)")
    parser.add_argument("--steps", type=int, default=4000, help="steps of the run (default: 4000)")
    parser.add_argument("--output", type=Path, help="Markdown file for the result")
    arguments = parser.parse_args(argv)
    start = time.monotonic()
    soak = Soak(arguments.run_dir.absolute(), arguments.seed, arguments.minutes, arguments.steps)
    done, until = False, start + 60 * arguments.minutes
    while not done:
        done = soak.start_once(with_fault=time.monotonic() < until)
    differences = run_digest.differences(
        run_digest.digest(soak.run_dir, soak.base / "ledger"), soak.oracle()
    )
    text = report(soak, differences, start, argv)
    print(text)
    if arguments.output:
        arguments.output.write_text(text)
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
