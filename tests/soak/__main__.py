"""Kill a run a thousand times, and compare it in every bit with one without faults.

    python -m tests.soak --kills 1000 --log benchmarks/results/kills.jsonl --minutes 40
    python -m tests.soak --log benchmarks/results/kills.jsonl --table benchmarks/results/kills.md

Tiny models are trained under the supervisor, in chunks: each is a run of another configuration with
some fifty kills at random steps, one every 2.5 s of training on average. It is compared with an
uninterrupted run in every metric row, every tensor and number of the last checkpoint, and every
sequence of every step. A line per chunk is appended to the log. The same command continues with the
next chunk until the log has that many kills; a chunk that was interrupted is repeated. The
directory of a chunk that differs is kept. Exits with 0 if every chunk in the log is equal.
"""

import argparse
import sys
import time
from pathlib import Path

from tests.soak import log
from tests.soak.campaign import Campaign
from tests.soak.configurations import ROTATION
from tests.soak.kills import KINDS


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.soak", description=__doc__.split("\n")[0]
    )
    add = parser.add_argument
    add("--log", type=Path, required=True, help="log of the campaign, JSON lines")
    add("--kills", type=int, default=0, help="number of kills that the log should have")
    add("--minutes", type=float, help="start no chunk that is not expected to be done by then")
    add("--run_dir", type=Path, default=Path("runs/soak"), help="directory of the runs")
    add("--parallel", type=int, default=1, help="chunks side by side (default: 1)")
    add("--steps", type=int, default=1000, help="steps of a run (default: 1000)")
    add("--kinds", type=kinds, default=(), help=f"only these, with commas: {', '.join(KINDS)}")
    add("--configurations", help="only these, with commas (default: all in turn)")
    add("--table", type=Path, help="write the log as a Markdown table to this file")
    arguments = parser.parse_args(argv)
    names = (arguments.configurations or "").split(",")
    rotation = [each for each in ROTATION if each.name in names or names == [""]]
    if not rotation:
        parser.error(f"--configurations: one of {', '.join(each.name for each in ROTATION)}")
    if arguments.kills:
        campaign = Campaign(
            arguments.run_dir.absolute(), arguments.log, arguments.kills, arguments.steps,
            arguments.kinds, rotation,
        )  # fmt: skip
        if arguments.minutes is not None:
            campaign.until = time.monotonic() + 60 * arguments.minutes
        campaign.run(arguments.parallel)
    chunks = log.read(arguments.log)
    if arguments.table:
        command = f"python -m tests.soak --kills 1000 --log {arguments.log}"
        arguments.table.write_text(log.table(chunks, command))
    different = [each["chunk"] for each in chunks if not log.is_equal(each)]
    print(
        f"{log.num_kills(chunks)} kills in {len(chunks)} chunks, not equal: {different or 'none'}"
    )
    return 1 if different else 0


def kinds(text: str) -> list[str]:
    names = text.split(",")
    if unknown := set(names) - set(KINDS):
        raise argparse.ArgumentTypeError(f"no such kind: {', '.join(sorted(unknown))}")
    return names


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
