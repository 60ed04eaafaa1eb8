"""The campaign of faults on several hosts: each is tried on hosts of its own, and logged.

    python -m tests.cluster --log benchmarks/results/host_faults.jsonl --trials 100 --minutes 50
    python -m tests.cluster --log benchmarks/results/host_faults.jsonl --table host_faults.md

The same command again goes on after the last trial of the log. With `--stages` each host has a
stage of a pipeline, which messages must name.
"""

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.cluster.hosts import missing
from tests.cluster.trial import KINDS, Outcome, Trial, draw

HEAD = (
    "| fault | trials | under | hosts | to blame | seconds to the end | seconds to done | wrong "
    "| differ | left |"
)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.cluster", description=__doc__)
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--minutes", type=float, default=50.0)
    parser.add_argument("--stages", action="store_true", help="a pipeline stage on each host")
    parser.add_argument("--table", type=Path, help="write the log's table, and try nothing")
    given = parser.parse_args(argv)
    logged = [json.loads(line) for line in given.log.read_text().splitlines()] if (
        given.log.exists()) else []  # fmt: skip
    if given.table:
        given.table.write_text(table(logged))
        return 0
    if reason := missing():
        print(reason)
        return 2
    deadline = time.monotonic() + 60 * given.minutes
    references: dict[tuple[int, int], Any] = {}
    for number in range(len(logged), given.trials):
        if time.monotonic() > deadline:
            break
        directory = Path(tempfile.mkdtemp(prefix="zerolm-cluster-")) / "hosts"
        outcome = Trial(draw(number, given.stages), directory, references).run()
        with given.log.open("a") as log:
            log.write(json.dumps({"number": number, **asdict(outcome)}) + "\n")
        print(number, "right" if outcome.is_right else "WRONG", *outcome.draw.values(), "|",
              *outcome.endings, outcome.seconds, outcome.total_seconds, *outcome.blamed,
              flush=True)  # fmt: skip
        if outcome.is_right:
            shutil.rmtree(directory.parent)
        else:
            print(directory, outcome, flush=True)
    return 0


def table(logged: list[dict[str, Any]]) -> str:
    """Return the table of a log, one row for each kind of fault."""
    lines = [HEAD, "|---" * (HEAD.count("|") - 1) + "|"]
    for kind in KINDS:
        rows = [row for row in logged if row["draw"]["kind"] == kind]
        if not rows:
            continue
        modes = Counter(row["draw"]["mode"] for row in rows)
        ended = [row["seconds"] for row in rows if row["seconds"] is not None]
        done = [row["total_seconds"] for row in rows]
        cells = [
            kind, len(rows), ", ".join(f"{mode} {count}" for mode, count in modes.items()),
            ", ".join(sorted({str(row["draw"]["hosts"]) for row in rows})), KINDS[kind].blame,
            _span(ended), _span(done), sum(bool(row["wrong"]) for row in rows),
            sum(bool(row["differences"] or row["problem"]) for row in rows),
            sum(row["left"] for row in rows),
        ]  # fmt: skip
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    right = sum(Outcome(**{k: v for k, v in row.items() if k != "number"}).is_right
                for row in logged)  # fmt: skip
    return "\n".join([*lines, "", f"{len(logged)} trials, {right} right.", ""])


def _span(values: list[float]) -> str:
    return f"{min(values):.0f} to {max(values):.0f}" if values else "-"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
