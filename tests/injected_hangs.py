"""Hangs of all kinds in real processes: is the rank at fault named, and no other one?

    python -m tests.injected_hangs [--output benchmarks/results/hangs.md] [--jobs 3]

Each run of `tests.hanging_ranks` hangs once, with 2 to 4 ranks of Gloo. Half of them queue their
collectives, as NCCL does. Then slow runs follow, in which nothing hangs. The results are appended
to `--state`, a file of JSON lines; a run that has a result there is not repeated.
"""

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests import hanging_ranks
from tests.hanging_ranks import Case
from zerolm.run_dir import jsonl

HANG_TIMEOUT = 3.0
CASE_SECONDS = 150.0

# kind: (acts, places)
HANGS: dict[str, list[tuple[str, str]]] = {
    "asleep in Python": [
        ("sleep", "forward"), ("sleep", "backward"), ("sleep", "optimizer"), ("sleep", "data"),
    ],
    "endless loop or garbage collection": [
        ("compute", "forward"), ("collect_garbage", "backward"), ("compute", "optimizer"),
    ],
    "native code that keeps the interpreter": [
        ("hold_interpreter", "forward"), ("compute_natively", "backward"),
        ("deadlock_natively", "optimizer"),
    ],
    "read that does not return": [("read", "data"), ("read", "evaluate")],
    "save that does not return": [("write", "checkpoint"), ("sleep", "checkpoint")],
    "stopped process": [("stop", "forward"), ("stop", "data"), ("stop", "checkpoint")],
    "skipped collective": [("skip", "gather"), ("skip", "scatter"), ("skip", "sums")],
    "other kind or order of collectives": [
        ("kind", "gather"), ("order", "gather"), ("kind", "sums"), ("kind", "scatter"),
    ],
    "evaluation on one rank only": [("alone", "evaluation")],
    "network down": [("cut_network", "forward"), ("cut_network", "optimizer")],
}  # fmt: skip
NUMBERS = {"evaluation on one rank only": 8, "network down": 6, "stopped process": 10}
NUMBER = 11  # of each other kind
SLOW = [
    ("pause", "forward"), ("pause", "data"), ("pause", "optimizer"), ("work_slowly", "evaluate"),
    ("write_slowly", "checkpoint"), ("compile_slowly", "forward"),
]  # fmt: skip
SLOW_KIND = "slow, but nothing hangs"


NUM_CASES = sum(NUMBERS.get(kind, NUMBER) for kind in HANGS) + 2 * len(SLOW)


@dataclass
class Result:
    """How one run ended.

    Attributes:
        kind: of the hang.
        case: the run.
        blamed: ranks that the watchdog named.
        events: of the watchdog.
        seconds: from the hang to the verdict; None without one.
        message: what the watchdog printed.
    """

    kind: str
    case: dict[str, Any]
    blamed: list[int]
    events: list[str]
    seconds: float | None
    message: str

    @property
    def right(self) -> bool:
        if self.kind == SLOW_KIND:
            return self.events == []
        if self.kind == "network down":
            return self.events == ["hang"] and self.blamed == []
        return self.events == ["hang"] and self.blamed == [self.case["victim"]]


def cases() -> Iterator[tuple[str, Case]]:
    """Yield (kind, case) of all runs, always the same ones."""
    for kind, places in HANGS.items():
        for number in range(NUMBERS.get(kind, NUMBER)):
            act, place = places[number % len(places)]
            ranks = 2 + number % 3
            yield kind, Case(
                act, place, queued=number % 2 == 1, ranks=ranks,
                victim=(number // 2) % ranks, step=step_of(act, place, number),
                timeout=HANG_TIMEOUT,
            )  # fmt: skip
    for number, (act, place) in enumerate(SLOW * 2):
        ranks, queued = 2 + number % 3, number >= len(SLOW)
        step = 1 if act == "compile_slowly" else step_of(act, place, number)
        yield SLOW_KIND, Case(act, place, queued, ranks, number % ranks, step, HANG_TIMEOUT)


def step_of(act: str, place: str, number: int) -> int:
    """Return a step in which that happens."""
    if place == "checkpoint":
        return (3, 6)[number % 2]
    if place == "evaluate":
        return (4, 8)[number % 2]
    return 3 + number % 3 if act != "alone" else 5 + number % 3


def run(kind: str, case: Case, run_dir: Path) -> Result:
    """Let the ranks of a run hang, and return who was blamed. Must be called in a fork."""
    if kind == "network down" and not hanging_ranks.isolate_network():
        raise SystemExit("a network of its own needs root and `ip`")
    pids = hanging_ranks.start(case, run_dir)
    running, deadline = set(pids), time.monotonic() + CASE_SECONDS
    while running and time.monotonic() < deadline:
        for pid in list(running):
            if os.waitpid(pid, os.WNOHANG)[0]:
                running.discard(pid)
        time.sleep(0.05)
    for pid in running:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    found = [json.loads(line) for line in lines_of(run_dir / "events.jsonl")]
    blamed = sorted({rank["rank"] for event in found for rank in event["ranks"]})
    seconds = None
    if (verdicts := list(run_dir.glob("ranks/verdict-*"))) and (run_dir / "hung").exists():
        seconds = verdicts[0].stat().st_mtime - (run_dir / "hung").stat().st_mtime
    printed = [line for line in lines_of(run_dir / "output") if line.startswith("watchdog:")]
    names = [event["event"] for event in found]
    if running:
        names.append("no end")
    return Result(kind, asdict(case), blamed, names, seconds, "\n".join(printed))


def lines_of(path: Path) -> list[str]:
    return path.read_text(errors="replace").splitlines() if path.exists() else []


def run_all(state: Path, directory: Path, jobs: int, numbers: range | list[int]) -> None:
    """Run the cases that have no result yet, some at a time, each forked from this process.

    Args:
        numbers: of the cases to run.
    """
    done = [json.loads(line) for line in lines_of(state)]
    finished = {(each["kind"], json.dumps(each["case"])) for each in done}
    waiting = [
        (number, kind, case)
        for number, (kind, case) in enumerate(cases())
        if number in numbers and (kind, json.dumps(asdict(case))) not in finished
    ]
    running: dict[int, int] = {}
    while waiting or running:
        if waiting and len(running) < jobs:
            number, kind, case = waiting.pop(0)
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    result = run(kind, case, directory / str(number))
                    jsonl.append_line(state, json.dumps(asdict(result)))
                    verdict = "right" if result.right else "WRONG"
                    print(f"{number} {verdict} {kind}: {case}\n  {result.message}", flush=True)
                    code = 0
                finally:
                    sys.stderr.flush()
                    os._exit(code)
            running[pid] = number
        else:
            pid, _ = os.wait()
            running.pop(pid, None)


def table(results: list[Result]) -> str:
    """Return the results as Markdown."""
    hangs = [each for each in results if each.kind != SLOW_KIND]
    named = sum(each.right for each in hangs)
    lines = [
        "# Injected hangs", "",
        f"`python -m tests.injected_hangs`: {named} of {len(hangs)} verdicts are right. Ranks are "
        f"real processes with 2 to 4 ranks of Gloo and the watchdog of real runs, and "
        f"`--hang_timeout {HANG_TIMEOUT:.0f}s`; the training is a stand-in "
        "(`tests/hanging_ranks.py`). Queued collectives are entered without waiting, and waited "
        "for outside of torch, as with NCCL. If the network is down, the right verdict names no "
        "rank. Seconds are from the hang to the verdict.", "",
        "| kind | collectives | hangs | right | guilty not named | others blamed | "
        "seconds, median | longest |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]  # fmt: skip
    for kind in [*HANGS, SLOW_KIND]:
        for queued in (False, True):
            found = [e for e in results if e.kind == kind and e.case["queued"] == queued]
            if not found:
                continue
            guilty = [set() if kind in ("network down", SLOW_KIND) else {e.case["victim"]}
                      for e in found]  # fmt: skip
            missed = sum(bool(g - set(e.blamed)) for g, e in zip(guilty, found, strict=True))
            others = sum(bool(set(e.blamed) - g) for g, e in zip(guilty, found, strict=True))
            times = [e.seconds for e in found if e.seconds is not None] or [0.0]
            right = sum(each.right for each in found)
            lines.append(
                f"| {kind} | {'queued' if queued else 'waited for'} | {len(found)} | {right} | "
                f"{missed} | {others} | {statistics.median(times):.0f} | {max(times):.0f} |"
            )
    lines += ["", "A message of each kind:", "", "```text"]
    for kind in HANGS:
        for found in [each for each in results if each.kind == kind and each.right][-1:]:
            lines += [f"{kind}:", f"  {found.message.partition('. The run was')[0]}"]
    return "\n".join([*lines, "```", ""])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, help="Markdown file to write (default: print)")
    parser.add_argument("--state", type=Path, help="results so far; continued if it exists")
    parser.add_argument("--jobs", type=int, default=3, help="runs at the same time (default 3)")
    parser.add_argument("--every", type=int, default=1, help="run each Nth case (default 1: all)")
    parser.add_argument("--cases", type=int, nargs="+", help="numbers of the cases to run")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        state = arguments.state or Path(directory) / "state.jsonl"
        numbers = arguments.cases or range(0, NUM_CASES, arguments.every)
        run_all(state, Path(directory), arguments.jobs, numbers)
        results = [Result(**json.loads(line)) for line in lines_of(state)]
    text = table(results)
    if arguments.output:
        arguments.output.write_text(text)
    print(text)
    return 0 if all(each.right for each in results) else 1


if __name__ == "__main__":
    sys.exit(main())
