"""`wandb-sync`: make a W&B run from a run directory, whatever W&B has received so far."""

import argparse
from pathlib import Path


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("run_dir", type=Path, help="a run directory; the run may still be training")
    add("--project", help="W&B project (default: that of the run)")
    add("--entity", help="W&B user or team (default: that of the run)")
    add(
        "--mode",
        choices=("auto", "online", "offline"),
        default="auto",
        help="auto: online if a key is configured, otherwise offline (default: auto)",
    )
    add(
        "--same_id",
        action="store_true",
        help="overwrite the W&B run that the run itself made, instead of making a new one",
    )


def run(arguments: argparse.Namespace) -> None:
    from zerolm.tracking.wandb_sync import wandb_sync

    given = {key: getattr(arguments, key) for key in ("mode", "project", "entity")}
    wandb_sync(arguments.run_dir, same_id=arguments.same_id, **given)
