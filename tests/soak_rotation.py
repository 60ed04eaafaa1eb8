"""The soak tests in turns: CI runs one of them, and the commit decides which.

    python -m tests.soak_rotation --list                        # the turns, with their minutes
    python -m tests.soak_rotation                               # the turn of this commit
    python -m tests.soak_rotation --turn 2 --table turn.md      # another one, with its outcomes
    python -m tests.soak_rotation --minutes 10                  # as much of it as fits
    python -m tests.soak_rotation --only tests/zerolm --record  # write the seconds that they took

tests/soak_seconds.json has the seconds of each test. The tests are divided into as few turns as fit
into MINUTES each. The number of commits decides, so that each test comes up within that many
commits; the hash does in a shallow clone, where commits cannot be counted.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import psutil

from tests import ROOT

SECONDS = ROOT / "tests" / "soak_seconds.json"
MINUTES = 15  # for the tests of a turn as recorded; none is started that would end later
MOST_MINUTES = 18  # then the test that runs is ended
HUNG = 3.0  # times the recorded seconds: a test that is ended after that has failed
SPARE_MINUTES = MOST_MINUTES - MINUTES
UNKNOWN_SECONDS = 60.0  # of a test that was never recorded
GROUP_SECONDS = 300.0  # tests of a file share fixtures, so they stay together up to this
START_SECONDS = 15.0  # of a process with pytest, and of its fork server


class Outcome(NamedTuple):
    """What became of one test."""

    name: str
    seconds: float
    outcome: str  # passed, failed, skipped, and the reason of a skip


# ---- Which tests


def groups(names: Sequence[str], seconds: Mapping[str, float]) -> list[list[str]]:
    """Return the tests in groups: in order, of one file, of about GROUP_SECONDS at most."""
    found: list[list[str]] = []
    for name in names:
        same_file = bool(found) and file_of(found[-1][0]) == file_of(name)
        if same_file and duration([*found[-1], name], seconds) <= GROUP_SECONDS:
            found[-1].append(name)
        else:
            found.append([name])
    return found


def file_of(name: str) -> str:
    return name.partition("::")[0]


def duration(group: Sequence[str], seconds: Mapping[str, float]) -> float:
    return START_SECONDS + sum(seconds.get(name, UNKNOWN_SECONDS) for name in group)


def turns(
    names: Sequence[str], seconds: Mapping[str, float], most_seconds: float
) -> list[list[list[str]]]:
    """Divide the groups of tests into as few turns of about equal length as do not take longer.

    A group that takes longer than a turn has one of its own.
    """
    longest_first = sorted(groups(names, seconds), key=lambda group: -duration(group, seconds))
    most = max([most_seconds, *(duration(group, seconds) for group in longest_first)])
    for number in range(1, len(longest_first) + 1):
        found: list[list[list[str]]] = [[] for _ in range(number)]
        for group in longest_first:
            min(found, key=lambda turn: length(turn, seconds)).append(group)
        if max(length(turn, seconds) for turn in found) <= most:
            return found
    return []


def length(turn: Sequence[Sequence[str]], seconds: Mapping[str, float]) -> float:
    return sum(duration(group, seconds) for group in turn)


def described(turn: Sequence[Sequence[str]], seconds: Mapping[str, float]) -> str:
    """Return a line with the files of a turn, and how many tests of each."""
    files = Counter(file_of(name) for group in turn for name in group)
    each = ", ".join(f"{file} ({number})" for file, number in sorted(files.items()))
    minutes = length(turn, seconds) / 60
    return f"{files.total()} tests, about {minutes:.0f} minutes: {each}"


def number_of_commit(checkout: Path) -> int:
    """Return the number that decides on the turn: of commits, or from the hash if it is shallow."""

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", *words], cwd=checkout, capture_output=True, text=True, check=True, timeout=60
        ).stdout.strip()

    if git("rev-parse", "--is-shallow-repository") == "true":
        return int(git("rev-parse", "HEAD")[:12], 16)
    return int(git("rev-list", "--count", "HEAD"))


def soak_tests(only: str = "") -> list[str]:
    """Return the names of all soak tests, in the order of pytest."""
    words = ["--collect-only", "-q", "-m", "soak", "-o", "addopts=--import-mode=importlib"]
    found = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *words],
        cwd=ROOT, capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    if found.returncode != 0:
        sys.exit(f"soak: pytest cannot collect the tests:\n{found.stdout}{found.stderr}")
    return [line for line in found.stdout.splitlines() if "::" in line and line.startswith(only)]


# ---- Run them


def run_group(group: Sequence[str], until: float) -> tuple[bool, list[Outcome]]:
    """Run tests in a process of their own, which is ended at `until`; all passed?"""
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "report.xml"
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", "soak", "-rs",
             f"--junitxml={report}", *group],
            cwd=ROOT, env={**os.environ, "HF_DATASETS_OFFLINE": "1"}, start_new_session=True,
        )  # fmt: skip
        try:
            code = process.wait(timeout=max(1.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            end(process)
            return False, ended(group)
        found = read_report(report.read_text(encoding="utf-8")) if report.exists() else []
        return code == 0, found


def ended(group: Sequence[str]) -> list[Outcome]:
    return [Outcome(name, 0, "ended: out of time") for name in group]


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill a process, and those that it started in sessions of their own."""
    for child in psutil.Process(process.pid).children(recursive=True):
        child.kill()
    process.kill()
    process.wait()


def read_report(text: str) -> list[Outcome]:
    """Return what a JUnit report of pytest says of each test."""
    found = []
    for case in ElementTree.fromstring(text).iter("testcase"):
        marks = {child.tag: child.get("message", "") for child in case}
        outcome = "failed" if {"failure", "error"} & set(marks) else "passed"
        if "skipped" in marks:
            outcome = f"skipped: {marks['skipped']}"
        path = case.get("classname", "").replace(".", "/") + ".py"
        name = f"{path}::{case.get('name')}"
        found.append(Outcome(name, float(case.get("time", 0)), outcome))
    return found


def table_of(outcomes: Sequence[Outcome]) -> str:
    rows = [f"| {each.name} | {each.seconds:.0f} | {each.outcome} |" for each in outcomes]
    return "\n".join(["| test | seconds | outcome |", "|---|---|---|", *rows, ""])


def run(
    turn: Sequence[Sequence[str]], seconds: Mapping[str, float], start_before: float, until: float
) -> tuple[bool, list[Outcome]]:
    """Run the groups of a turn, one after the other; times are of the monotonic clock.

    Most of these tests kill processes at some moment and wait for others with a limit, so a test
    that failed runs once more, alone, and is bad if it fails again. The table has both. On a slower
    machine than the one that recorded the seconds, fewer groups fit, and one that is ended for that
    has not failed.
    """
    good, outcomes = True, list[Outcome]()
    expected = spent = 0.0
    for group in turn:
        start = time.monotonic()
        pace = max(1.0, spent / expected) if expected else 1.0
        late = start + pace * duration(group, seconds) > start_before
        # A single test may be longer than a turn, which then has no other.
        if late and (outcomes or start + 2 * duration(group, seconds) > until):
            outcomes += [Outcome(name, 0, "waits: out of time") for name in group]
            continue
        print(f"\nsoak: {len(group)} of {file_of(group[0])}, "
              f"about {duration(group, seconds):.0f} s", flush=True)  # fmt: skip
        passed, found = run_group(group, until)
        took = time.monotonic() - start
        spent, expected = spent + took, expected + duration(group, seconds)
        outcomes += found
        if found == ended(group):
            passed = took < HUNG * duration(group, seconds)
        failed = {each.name.partition("::")[2] for each in found if each.outcome == "failed"}
        if failed:
            print(f"soak: again, what failed: {len(failed)} of {len(group)}", flush=True)
            names = [name for name in group if name.partition("::")[2] in failed]
            passed, again = run_group(names, until)
            outcomes += [
                each._replace(outcome=f"{each.outcome} at the second try") for each in again
            ]
        good = good and passed
    return good, outcomes


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak_rotation", description=__doc__)
    parser.add_argument("--list", action="store_true", help="print the turns and run nothing")
    parser.add_argument("--turn", type=int, help="this turn, from 1, instead of the commit's")
    parser.add_argument(
        "--minutes", type=float, default=MOST_MINUTES, help="limit of the turn (default, and most: "
        f"{MOST_MINUTES}); without {SPARE_MINUTES} of them nothing is run",
    )  # fmt: skip
    parser.add_argument("--only", help="all tests whose name begins so, and no limit of time")
    parser.add_argument("--record", action="store_true", help="write what they took")
    parser.add_argument("--table", type=Path, help="write the outcomes as Markdown")
    arguments = parser.parse_args(argv)
    seconds = json.loads(SECONDS.read_text(encoding="utf-8"))
    names = soak_tests(arguments.only or "")
    all_turns = turns(names, seconds, MINUTES * 60)
    if arguments.list:
        for number, turn in enumerate(all_turns, 1):
            print(f"turn {number}, about {length(turn, seconds) / 60:.0f} minutes")
            print(*(f"  {name}" for group in turn for name in group), sep="\n")
        return 0
    start = time.monotonic()
    if arguments.only is not None:
        turn, limits = groups(names, seconds), (float("inf"), 86400.0 + start)
    else:
        commit = number_of_commit(ROOT)
        number = (arguments.turn - 1 if arguments.turn else commit) % len(all_turns)
        minutes = min(arguments.minutes, MOST_MINUTES)
        if minutes < SPARE_MINUTES:
            print(f"soak: {minutes:.0f} minutes are left: nothing is run")
            return 0
        turn = all_turns[number]
        limits = (start + (minutes - SPARE_MINUTES) * 60, start + minutes * 60)
        print(f"soak: commit {commit} has turn {number + 1} of {len(all_turns)}")
        for later in range(len(all_turns)):
            place = (number + later) % len(all_turns)
            when = f"waits for {later} more commits" if later else "runs now"
            print(f"soak: turn {place + 1} {when}: {described(all_turns[place], seconds)}")
        sys.stdout.flush()
    good, outcomes = run(turn, seconds, *limits)
    print(f"\nsoak: {(time.monotonic() - start) / 60:.1f} minutes")
    print(table_of(outcomes), end="", flush=True)
    if arguments.table:
        arguments.table.write_text(table_of(outcomes), encoding="utf-8")
    if arguments.record:
        ran = [each for each in outcomes if each.outcome.startswith(("passed", "skipped"))]
        took = {each.name: round(each.seconds, 1) for each in ran}
        kept = {name: took.get(name, seconds.get(name)) for name in soak_tests()}
        text = json.dumps({name: took for name, took in kept.items() if took is not None}, indent=1)
        SECONDS.write_text(text + "\n", encoding="utf-8")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
