"""`wandb-workspace`: make a W&B workspace with panels for the metrics of a run."""

import argparse
from pathlib import Path


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("run_dir", type=Path, help="a run directory")
    add("--project", help="W&B project (default: that of the run)")
    add("--entity", help="W&B user or team (default: that of the run)")
    add(
        "--print",
        action="store_true",
        help="print the workspace as JSON instead; needs no account and sends nothing",
    )


def run(arguments: argparse.Namespace) -> None:
    from zerolm.tracking.wandb_workspace import make

    print(make(arguments.run_dir, arguments.project, arguments.entity, arguments.print))
