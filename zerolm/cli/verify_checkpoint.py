"""`verify-checkpoint`: compare every file of a checkpoint with its manifest."""

import argparse
from pathlib import Path

from zerolm.checkpoint.directory import Checkpoint, locate, verify_files
from zerolm.common.errors import CheckpointError

CHECKPOINT_HELP = (
    "RUN, a run directory, for its newest checkpoint; RUN@STEP; or the directory of a checkpoint, "
    "such as runs/first/checkpoints/step-00001000"
)


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", type=Path, help=CHECKPOINT_HELP)


def run(arguments: argparse.Namespace) -> None:
    verified_checkpoint(arguments.checkpoint)


def verified_checkpoint(reference: str | Path) -> Checkpoint:
    """Find a checkpoint as `locate` does, verify every file, and print a summary."""
    checkpoint = locate(reference)
    if problems := file_problems(checkpoint):
        raise CheckpointError(problems)
    return checkpoint


def file_problems(checkpoint: Checkpoint) -> list[str]:
    """Verify every file of a checkpoint; return the problems. Print a summary if there are none."""
    problems, progress = verify_files(checkpoint), checkpoint.progress
    if not problems:
        print(
            f"{checkpoint.directory}: complete, {checkpoint.num_files} files, step "
            f"{progress.step:,}, {progress.tokens:,} tokens"
        )
    return problems
