"""`wandb-sync`: send a run directory to W&B as a new W&B run."""

import argparse
from pathlib import Path


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("run_dir", type=Path, help="a run directory; the run may be in progress")
    add("--project", help="W&B project (default: as in the run's settings)")
    add("--entity", help="W&B user or team (default: as in the run's settings)")
    add(
        "--mode",
        choices=("auto", "online", "offline"),
        default="auto",
        help="auto: online if a key is configured, otherwise offline (default: auto)",
    )
    add(
        "--same_id",
        action="store_true",
        help="overwrite the run's own W&B run instead of creating a new one",
    )


def run(arguments: argparse.Namespace) -> None:
    from zerolm.tracking.wandb_sync import wandb_sync

    given = {key: getattr(arguments, key) for key in ("mode", "project", "entity")}
    wandb_sync(arguments.run_dir, same_id=arguments.same_id, **given)
