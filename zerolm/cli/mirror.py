"""`mirror`: copy a run's metrics to a tracker. Started by the run, not by users."""

import argparse
from pathlib import Path

from zerolm.common.command_line import count
from zerolm.config.settings import TRACKERS


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("name", choices=tuple(TRACKERS))
    parser.add_argument("--of_process", type=count, required=True)


def run(arguments: argparse.Namespace) -> None:
    from zerolm.tracking.mirror import mirror

    mirror(arguments.run_dir, arguments.name, arguments.of_process)  # ends the process itself
