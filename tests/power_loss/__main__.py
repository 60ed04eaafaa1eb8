"""Record real writers, cut their power after each operation, and start the next one on the rest.

    python -m tests.power_loss                       # all writers, every operation
    python -m tests.power_loss --minutes 5 --seed 3  # other patterns of what is kept
    python -m tests.power_loss --table benchmarks/results/power_loss.md

Exits with 1 if some disk is not what it must be.
"""

import argparse
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.launching import one_rank
from tests.power_loss import campaign
from tests.power_loss.recording import KINDS
from tests.power_loss.scenarios import Divided, Run, Scenario, Shards

SCENARIOS: tuple[type[Scenario], ...] = (Run, Shards, Divided)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.power_loss", description=__doc__.split("\n")[0]
    )
    add = parser.add_argument
    add("--minutes", type=float, default=60.0, help="limit of each writer (default: 60)")
    add("--seed", type=int, default=1, help="of the patterns (default: 1)")
    add("--share", type=float, default=1.0, help="part of the random patterns (default: 1)")
    add("--writers", default="Run,Shards,Divided", help="some of: Run,Shards,Divided")
    add("--table", type=Path, help="write the results as Markdown to this file")
    arguments = parser.parse_args(argv)
    rows, findings = [], []
    with tempfile.TemporaryDirectory(prefix="power-") as work, one_rank(Path(work) / "store"):
        for kind in SCENARIOS:
            if kind.__name__ not in arguments.writers.split(","):
                continue
            began = time.monotonic()
            scenario = kind(Path(work) / kind.__name__)
            result = campaign.cut(
                scenario, arguments.seed, share=arguments.share, seconds=60 * arguments.minutes
            )
            rows.append(row(scenario, result, time.monotonic() - began))
            findings += [f"{scenario.name}: {text}" for text in result.findings.values()]
            print(rows[-1], flush=True)
    table = "\n".join([HEAD, *rows, ""])
    print(f"\n{table}")
    print(*findings, sep="\n\n")
    if arguments.table:
        arguments.table.write_text(table, encoding="utf-8")
    return 1 if findings else 0


HEAD = (
    "| writer | operations | power cut after | disks tried | what the next start finds "
    "| findings |\n|---|---|---|---|---|---|"
)


def row(scenario: Scenario, result: campaign.Result, seconds: float) -> str:
    kinds = Counter(KINDS[each.kind] for each in scenario.operations)
    counts = ", ".join(f"{kind} {number}" for kind, number in kinds.most_common())
    outcomes = ", ".join(f"{what} {number:,}" for what, number in sorted(result.outcomes.items()))
    return (
        f"| {scenario.name} | {len(scenario.operations):,}: {counts} | {result.points:,} | "
        f"{result.states:,} of {result.seen:,} | {outcomes} | {len(result.findings)} |"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
