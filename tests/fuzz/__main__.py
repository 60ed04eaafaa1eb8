"""Draw mutated inputs of every kind, and look for one that is neither accepted nor refused clearly.

    python -m tests.fuzz --minutes 30                          # all targets, with a new seed
    python -m tests.fuzz --minutes 2 --seed 17                 # the inputs of an earlier turn again
    python -m tests.fuzz --minutes 5 --targets flags,settings  # some of them

Prints a table, and for each finding the smallest input that has it and its traceback. Exits with 1
if there are findings. A seed draws the same inputs again in the same release.
"""

import argparse
import secrets
import sys
import time
from pathlib import Path

from tests.fuzz import campaign
from tests.fuzz.targets import TARGETS, bench


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz", description=__doc__.split("\n")[0]
    )
    add = parser.add_argument
    add("--minutes", type=float, default=2.0, help="time for all targets (default: 2)")
    add("--seed", type=int, help="draw the inputs of this seed (default: another at each start)")
    add("--targets", help=f"some of: {', '.join(TARGETS)} (default: all)")
    add("--table", type=Path, help="write the table as Markdown to this file")
    arguments = parser.parse_args(argv)
    names = arguments.targets.split(",") if arguments.targets else list(TARGETS)
    seed = secrets.randbelow(10**6) if arguments.seed is None else arguments.seed
    print(f"fuzz: seed {seed}", flush=True)
    began = time.monotonic()
    with bench() as made:
        targets = [TARGETS[name] for name in names]
        tallies = campaign.run(made, targets, seed, seconds=60 * arguments.minutes)
    table = campaign.table(tallies)
    print(f"fuzz: {(time.monotonic() - began) / 60:.1f} minutes\n{table}")
    print(campaign.findings_of(tallies), end="", flush=True)
    if arguments.table:
        arguments.table.write_text(table, encoding="utf-8")
    return 1 if any(tally.findings for tally in tallies.values()) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
