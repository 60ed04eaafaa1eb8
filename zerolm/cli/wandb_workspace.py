"""`wandb-workspace`: create a W&B workspace with panels for the metrics of a run."""

import argparse
from pathlib import Path


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("run_dir", type=Path, help="a run directory")
    add("--project", help="W&B project (default: as in the run's settings)")
    add("--entity", help="W&B user or team (default: as in the run's settings)")
    add(
        "--print",
        action="store_true",
        help="print the workspace as JSON, without sending it; needs no account",
    )


def run(arguments: argparse.Namespace) -> None:
    from zerolm.tracking.wandb_workspace import make

    print(make(arguments.run_dir, arguments.project, arguments.entity, arguments.print))
