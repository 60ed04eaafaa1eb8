"""`restore`: restore a run from an object store."""

import argparse
from pathlib import Path

from zerolm.cli.upload import refuse_bad_url
from zerolm.common.command_line import count_from_zero
from zerolm.common.errors import CheckpointError


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("url", help="the URL that was passed to `upload` or --upload_to")
    add("run_dir", type=Path, help="run directory to restore to; may already exist")
    add(
        "--step",
        type=count_from_zero,
        metavar="N",
        help="restore the checkpoint of this step (default: the newest complete one)",
    )


def run(arguments: argparse.Namespace) -> None:
    """Restore the run, unless another process is using the run directory."""
    from zerolm.train import run_directory
    from zerolm.upload.restore import complete_steps, restore

    refuse_bad_url(arguments.url)
    restored = None
    # Checked first, because `claim` creates the run directory.
    if complete_steps(arguments.url, arguments.step):
        with run_directory.claim(arguments.run_dir):
            restored = restore(arguments.url, arguments.run_dir, arguments.step)
    if restored is None:
        raise CheckpointError(f"{arguments.url}: contains no complete checkpoint. Correct the URL.")
