"""Draw combinations of settings, and compare their runs with what they must equal.

    python -m tests.combinations --log combinations.jsonl --draws 200 --minutes 40
    python -m tests.combinations --log combinations.jsonl --table benchmarks/results/combinations.md
    python -m tests.combinations --log combinations.jsonl --only 17    # one draw again

Each draw is trained without interruption, killed and resumed, resumed on another topology, and,
without features, trained by a loop in plain PyTorch. A line for each draw is appended to the log.
The same command continues with the next draw; one that was interrupted is repeated, and the
directory of one with differences is kept. Exits with 0 if no draw in the log has differences.
"""

import argparse
import platform
import sys
import time
from pathlib import Path

from tests.combinations import table
from tests.combinations.draws import draw_number
from tests.combinations.runs import write_data
from tests.combinations.trial import Trial
from tests.soak import log
from tests.soak.campaign import machine
from zerolm.common.provenance import git_commit


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.combinations", description=__doc__.split("\n")[0]
    )
    add = parser.add_argument
    add("--log", type=Path, required=True, help="log of the campaign, JSON lines")
    add("--draws", type=int, default=0, help="number of draws that the log should have")
    add("--only", type=int, nargs="+", default=[], help="these draws, even if the log has them")
    add("--minutes", type=float, default=float("inf"), help="start no draw after that")
    add("--run_dir", type=Path, default=Path("runs/combinations"), help="directory of the runs")
    add("--table", type=Path, help="write the log as a Markdown table to this file")
    arguments = parser.parse_args(argv)
    base, until = arguments.run_dir.absolute(), time.monotonic() + 60 * arguments.minutes
    write_data(base / "data")
    known = {entry["number"] for entry in log.read(arguments.log)}
    wanted = arguments.only or [each for each in range(arguments.draws) if each not in known]
    for number in wanted:
        if time.monotonic() > until:
            break
        entry = Trial(draw_number(number), number, base).run()
        entry |= {
            "commit": git_commit(Path(__file__).parent), "date": time.strftime("%Y-%m-%d %H:%M"),
            "machine": machine(), "python": platform.python_version(),
        }  # fmt: skip
        log.append(arguments.log, entry)
        print(table.shown(entry), flush=True)
    entries = table.newest(log.read(arguments.log))
    if arguments.table:
        arguments.table.write_text(table.rendered(entries), encoding="utf-8")
    print(table.summary(entries))
    return 1 if any(entry["problems"] for entry in entries) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
