"""Removes checkpoints that are not retained, and incomplete ones that a killed run left behind.

This happens after a checkpoint is published, and before the next one is written. Rank 0 decides;
each rank deletes the files that it wrote. Must not depend on torch or DeepSpeed.
"""

import contextlib
import os
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerolm.checkpoint.directory import make_way, published_checkpoints, read
from zerolm.common.errors import CheckpointError
from zerolm.common.faults import fault_point
from zerolm.common.files import sync_directory, write_atomically
from zerolm.run_dir.files import (
    MANIFEST,
    TEMPORARY,
    RunFiles,
    checkpoint_step,
    unfinished_checkpoints,
)


@dataclass(frozen=True)
class Retention:
    """The rules that decide which checkpoints are kept when a new one is published.

    Attributes:
        last: number of newest checkpoints to keep.
        every_tokens: the first checkpoint after each multiple of this token count is kept
            permanently.
        best: number of checkpoints with the lowest validation loss to keep.
    """

    last: int
    every_tokens: int | None = None
    best: int = 0


def rotate(
    newest: Path,
    retention: Retention,
    ranked: Sequence[str] = (),
) -> tuple[list[Path], list[str]]:
    """After `publish`, update `latest` and retire the checkpoints that are not retained.

    Only rank 0 may call this. The new checkpoint exists even if this fails. Each rank deletes its
    own files of a retired checkpoint (`delete_own`); the next save deletes any remaining files.

    Args:
        newest: the checkpoint just published, which is always kept.
        ranked: checkpoint names for all evaluated steps, best first; some may not exist.

    Returns:
        The renamed directories to delete, and one line for each failure.
    """
    step, retired, problems = checkpoint_step(newest.name), [], []
    try:
        point_to(newest)
    except OSError as error:
        problems.append(f"{RunFiles(newest.parents[1]).latest} cannot be written: {error}")
    for directory in removable(published_checkpoints(newest.parent), retention, ranked):
        if directory != newest:
            try:
                fault_point("checkpoint.rotate", step)
                renamed = retire(directory)
                fault_point("checkpoint.rotated", step)
                (renamed / MANIFEST).unlink()
                retired.append(renamed)
            except OSError as error:
                problems.append(f"{directory} cannot be removed: {error}")
    return retired, problems


def removable(
    published: Sequence[Path], retention: Retention, ranked: Sequence[str] = ()
) -> list[Path]:
    """Return the published checkpoints that are not retained, oldest first."""
    every, passed, obsolete = retention.every_tokens, 0, []
    existing = {directory.name for directory in published}
    best = [name for name in ranked if name in existing][: retention.best]
    for number, directory in enumerate(published):
        kept = number >= len(published) - retention.last or directory.name in best
        if every is not None:
            try:
                milestones = read(directory).progress.tokens // every
            except CheckpointError:
                continue  # damaged: left for the user to inspect
            kept |= milestones > passed
            passed = max(passed, milestones)
        if not kept:
            obsolete.append(directory)
    return obsolete


def retire(directory: Path) -> Path:
    """Rename a checkpoint before its deletion, so it is never published but incomplete."""
    renamed = directory.with_name(TEMPORARY + directory.name)
    remove_unfinished(directory.parent, renamed)
    os.replace(directory, renamed)
    sync_directory(directory.parent)
    return renamed


def delete_own(retired: Iterable[Path], names: Sequence[str]) -> None:
    """Delete one rank's files of retired checkpoints; the last rank also removes the directories.

    Files that cannot be deleted now are deleted or reported before the next checkpoint is written.
    """
    for directory in retired:
        with contextlib.suppress(OSError):
            for name in names:
                (directory / name).unlink(missing_ok=True)
            directory.rmdir()


def remove_unfinished(checkpoints: Path, needed: Path | None = None) -> list[str]:
    """Delete checkpoints that a killed run was writing or removing, and links with such names.

    Args:
        needed: the temporary path of the checkpoint about to be written, if any. A regular file
            with such a name is set aside.

    Returns:
        One line for each path that cannot be deleted.

    Raises:
        OSError: `needed` cannot be deleted.
    """
    problems = []
    for path in unfinished_checkpoints(checkpoints):
        try:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, onerror=_unless_gone)
            elif path.is_symlink() or path == needed:
                make_way(path)
        except OSError as error:
            if path == needed:
                raise
            problems.append(f"{path} cannot be removed: {error}")
    return problems


def _unless_gone(function: Any, path: str, information: Any) -> None:
    """Handle an error of rmtree: ignore files that another rank has already deleted."""
    if not isinstance(information[1], FileNotFoundError):
        raise information[1]


def point_to(final: Path) -> None:
    """Write the name of the newest checkpoint to `latest`, for people and tools."""
    fault_point("checkpoint.pointer", checkpoint_step(final.name))
    pointer, name = RunFiles(final.parents[1]).latest, f"{final.name}\n"
    if not (pointer.is_file() and pointer.read_text(errors="replace") == name):
        write_atomically(pointer, name.encode())
