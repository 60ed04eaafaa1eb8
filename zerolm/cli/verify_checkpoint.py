"""`verify-checkpoint`: compare every file of a checkpoint with its manifest."""

import argparse
from pathlib import Path

from zerolm.checkpoint.directory import Checkpoint, newest, read, verify_files
from zerolm.common.errors import CheckpointError
from zerolm.common.run_files import RunFiles

CHECKPOINT_HELP = (
    "a checkpoint, such as runs/first/checkpoints/step-00001000; or a run directory, for its "
    "newest checkpoint"
)


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", type=Path, help=CHECKPOINT_HELP)


def run(arguments: argparse.Namespace) -> None:
    verified_checkpoint(arguments.checkpoint)


def verified_checkpoint(path: Path) -> Checkpoint:
    """Open a checkpoint, or the newest one of a run directory; verify every file; print a summary.

    Raises:
        CheckpointError: there is none, or it is not complete.
    """
    checkpoint = newest(path) if RunFiles(path).checkpoints.is_dir() else read(path)
    if checkpoint is None:
        raise CheckpointError(f"{path}: the run has no checkpoint yet.")
    problems = verify_files(checkpoint)
    if problems:
        raise CheckpointError(problems)
    progress = checkpoint.progress
    print(
        f"{checkpoint.directory}: complete, {len(checkpoint.manifest['files'])} files, step "
        f"{progress.step:,}, {progress.tokens:,} tokens"
    )
    return checkpoint
