"""Random faults for as long as it is told, then a comparison with a run that had none.

    python -m tests.soak --minutes 30 --run_dir runs/soak --output benchmarks/results/soak.md

A tiny model is trained under the supervisor on two ranks of this machine. Each launch gets one
fault by itself, at a point of zerolm/faults.py, or from outside: SIGKILL or SIGSTOP of a rank, of a
loader worker, or of the node launcher. Once the time is over the run goes on without faults until
its budget is spent, and everything it learned and every sequence it saw is compared with the run
that nothing happened to, bit for bit. Ends with 0 if they are equal, and every fault was named.
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

sys.path.insert(0, str(Path(__file__).parent / "end_to_end"))

import oracle
from recipe import profile, recipe

from tests.launching import LLAMA, launch, write_json, write_shards
from tests.supervised import Supervised
from zerolm import processes

SAVE = 25
HANG_SECONDS = 30
NAMED_SECONDS = 90.0  # hangs have their time-out first, and a loaded machine is slow
INSIDE = {  # at points of the code, with what may happen there
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
class Strike:
    """One fault and what came of it. Seconds are from the fault on."""

    what: str
    step: int
    named: str = ""
    named_seconds: float | None = None
    recovered_seconds: float | None = None


class Soak:
    """One run that faults are thrown at."""

    def __init__(self, base: Path, seed: int, minutes: float, steps: int):
        self.base, self.run_dir, self.random = base, base / "run", random.Random(seed)
        self.minutes, self.steps = minutes, steps
        base.mkdir(parents=True)
        for name in ("ledger", "oracle-ledger"):
            (base / name).mkdir()
        self.corpus = write_shards(base / "corpus", num_documents=2000)
        self.llama = write_json(base / "llama.json", LLAMA)
        self.ds_json = profile(base / "ds.json", self.random.choice((2, 3)), bf16=True)
        self.strikes: list[Strike] = []
        self.starts = 0

    def arguments(self, run_dir: Path) -> list[object]:
        words = recipe(self.llama, self.corpus, run_dir, self.ds_json, self.steps, micro=2)
        words += ["--checkpoint_interval", SAVE, "--wandb", "off", "--num_workers", 1]
        return [*words, "--hang_timeout", f"{HANG_SECONDS}s"]

    def oracle(self) -> dict[str, Any]:
        variables = {"ZEROLM_LEDGER": str(self.base / "oracle-ledger")}
        arguments = self.arguments(self.base / "oracle")
        done = launch(2, *arguments, timeout=3600, **variables)
        assert done.returncode == 0, done.stdout[-4000:]
        return oracle.digest(self.base / "oracle", self.base / "oracle-ledger")

    def step(self) -> int:
        """Return the last step in the metrics, 0 before there is one."""
        path = self.run_dir / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        found = [re.search(r'"step": (\d+),', line) for line in lines[-3:]]
        return max((int(match[1]) for match in found if match), default=0)

    def one(self, fault: bool) -> bool:
        """Start the supervisor once, with a fault or without; tell whether the run is done."""
        self.starts += 1
        variables = {"ZEROLM_LEDGER": str(self.base / "ledger")}
        inside = fault and self.random.random() < 0.5
        strike = Strike("", self.step() + self.random.randrange(2, 3 * SAVE))
        if inside:
            point = self.random.choice(sorted(INSIDE))
            action = self.random.choice(INSIDE[point])
            rank = 0 if point in RANK_0_ONLY else self.random.randrange(2)
            if point.startswith("checkpoint."):
                strike.step = -(-strike.step // SAVE) * SAVE
            strike.what = f"{point}:{rank}:{strike.step}:{action}"
            once = self.base / f"once-{self.starts}"
            once.mkdir()
            variables |= {"FAULT": strike.what, "FAULT_ONCE": str(once)}
        elif fault:
            strike.what = self.random.choice(OUTSIDE)
        flags = ["--backoff", "1s", "--max_restarts", "5"]
        with Supervised(self.run_dir, self.arguments(self.run_dir), *flags, **variables) as run:
            if fault:
                self.strikes.append(strike)
                self.observe(run, strike, inside)
                print(strike, flush=True)
            if run.process.poll() is None and fault:
                self.settle(run)
            code = run.wait(3600)
            assert processes.marked(run.mark) == [], "a process was left behind"
        assert code in (0, 75), f"exit code {code}: {strike}\n{run.output()[-5000:]}"
        return code == 0

    def observe(self, run: Supervised, strike: Strike, inside: bool) -> None:
        """Wait for the fault, or do it; then for what is said of it, and for the next start."""

        def struck() -> bool:
            return "FAULT" in run.output() if inside else self.step() >= strike.step

        try:
            run.wait_for("no fault", struck, 600)
            began = time.monotonic()
            if not inside:
                self.strike(run, strike.what)
            signs = ("watchdog: ", "supervise:   ", "stopped on request")
            run.wait_for(
                "not named", lambda: any(sign in run.output() for sign in signs), NAMED_SECONDS
            )
            strike.named_seconds = time.monotonic() - began
            resumed = len([e for e in run.events() if e["event"] in ("resume", "start")])
            if "stopped on request" not in run.output():
                run.wait_for("not resumed", lambda: len(
                    [e for e in run.events() if e["event"] in ("resume", "start")]) > resumed, 300
                )  # fmt: skip
                strike.recovered_seconds = time.monotonic() - began
        except AssertionError:
            if run.process.poll() is None:
                raise
            if not inside and self.step() < strike.step:
                strike.what = f"none: the run was done before {strike.what}"
        lines = [line for line in run.output().splitlines() if line.startswith("supervise:   ")]
        strike.named = (
            lines[0].removeprefix("supervise:").strip() if lines else "stopped on request"
        )

    def strike(self, run: Supervised, what: str) -> None:
        beats = run.heartbeats()
        if len(beats) < 2:
            return
        rank = beats[self.random.randrange(2)]
        if what == "SIGTERM to the supervisor":
            run.ask(signal.SIGTERM)
        elif what == "SIGKILL the node launcher":
            run.hit(rank["launcher_pid"], signal.SIGKILL)
        elif what == "SIGKILL a loader":
            run.hit(processes.children(rank["pid"])[0].pid, signal.SIGKILL)
        else:
            run.hit(rank["pid"], signal.Signals[what.split()[0]])

    def settle(self, run: Supervised) -> None:
        """Let the run get ahead by a checkpoint after a fault, then ask it to stop."""
        target = self.step() + SAVE
        while run.process.poll() is None and self.step() < target:
            time.sleep(0.2)
        if run.process.poll() is None:
            run.ask(signal.SIGTERM)


def report(soak: Soak, found: list[str], began: float, words: list[str]) -> str:
    with open("/proc/cpuinfo") as file:
        cpu = next((line.split(":")[1].strip() for line in file if "model name" in line), "?")
    lines = [
        "# Soak: random faults, then the same bits", "",
        "```bash", f"python -m tests.soak {' '.join(words)}", "```", "",
        f"{time.strftime('%Y-%m-%d')}, {cpu}, {os.cpu_count()} cores, Linux {platform.release()}, "
        f"two ranks with Gloo. {(time.monotonic() - began) / 60:.0f} minutes, {soak.steps} steps, "
        f"{len(soak.strikes)} faults, {soak.starts} starts of the supervisor.", "",
        "Result: " + ("equal to the uninterrupted run in every bit: losses, sequences, weights, "
                      "optimizer." if not found else f"{len(found)} differences:"), "",
        *[f"- {line}" for line in found[:20]],
        "| fault | step | named after | going on after | what the supervisor said |",
        "|---|---|---|---|---|",
    ]  # fmt: skip
    for strike in soak.strikes:
        times = [
            "-" if seconds is None else f"{seconds:.1f} s"
            for seconds in (strike.named_seconds, strike.recovered_seconds)
        ]
        said = strike.named.replace("|", "\\|").replace(str(soak.base), "...")
        lines.append(f"| {strike.what} | {strike.step} | {times[0]} | {times[1]} | {said} |")
    return "\n".join(lines) + "\n"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, required=True, help="of faults")
    parser.add_argument("--run_dir", type=Path, required=True, help="does not exist yet")
    parser.add_argument("--seed", type=int, default=0, help="of the faults (default: 0)")
    parser.add_argument("--steps", type=int, default=4000, help="of the run (default: 4000)")
    parser.add_argument("--output", type=Path, help="a markdown file for the log")
    arguments = parser.parse_args(argv)
    began = time.monotonic()
    soak = Soak(arguments.run_dir.absolute(), arguments.seed, arguments.minutes, arguments.steps)
    done, until = False, began + 60 * arguments.minutes
    while not done:
        done = soak.one(fault=time.monotonic() < until)
    found = oracle.differences(oracle.digest(soak.run_dir, soak.base / "ledger"), soak.oracle())
    text = report(soak, found, began, argv)
    print(text)
    if arguments.output:
        arguments.output.write_text(text)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
