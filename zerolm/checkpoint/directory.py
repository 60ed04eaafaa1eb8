"""The layout of checkpoints on disk: publish, find, verify and remove them.

A checkpoint is a directory `checkpoints/step-00001000`. Its `MANIFEST.json` is written last and
contains the size and checksum of every other file, and the run's progress; a directory without a
manifest is not a checkpoint. While a checkpoint is being written or removed, its name begins with
`.tmp-`. Links are never followed; a link with the name of a checkpoint is removed. Must not depend
on torch or DeepSpeed: `CheckpointWriter` writes the files, and zerolm/checkpoint/load.py loads
them.
"""

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerolm.checkpoint.checksums import piece_problem
from zerolm.checkpoint.file_lists import all_entries, pieces, with_lists
from zerolm.checkpoint.manifest import (
    ListedFile,
    Progress,
    SavedProgress,
    parse_manifest,
)
from zerolm.common.errors import CheckpointError
from zerolm.common.faults import fault_point
from zerolm.common.files import exists, is_dir, sync_directory, write_json
from zerolm.common.records import read_file, unreadable, with_digest
from zerolm.run_dir.files import (
    CHECKPOINT_NAME,
    DAMAGED,
    FOREIGN,
    MANIFEST,
    TEMPORARY,
    RunFiles,
    checkpoint_directories,
    checkpoint_name,
    checkpoint_step,
    split_step,
    traces_of_checkpoints,
)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk with a valid manifest. Its other files may still be damaged."""

    directory: Path
    manifest: dict[str, Any]

    @property
    def progress(self) -> Progress:
        return SavedProgress(**self.manifest["progress"]).read()

    @property
    def digest(self) -> str:
        """SHA-256 of the manifest, which covers the checksums of all files."""
        return self.manifest["digest"]

    @property
    def num_files(self) -> int:
        lists = self.manifest.get("lists", [])
        return len(self.manifest["files"]) + sum(one["num_files"] for one in lists)

    @property
    def size_bytes(self) -> int:
        """Total size of all files except the manifest."""
        size = sum(entry["size_bytes"] for entry in self.manifest["files"])
        return size + sum(one["files_bytes"] for one in self.manifest.get("lists", []))

    def entries(self) -> list[ListedFile]:
        """Return the entries of all files.

        Raises:
            CheckpointError: the list of files is damaged.
        """
        return all_entries(self.directory, self.manifest)


def publish(temporary: Path, manifest: dict[str, Any]) -> Path:
    """Publish a temporary directory as the newest checkpoint. Only rank 0 may call this.

    The order (manifest, rename, then the pointer in `rotate`) makes a crash at any point safe. An
    existing directory of that name (damaged or rolled back) is set aside.

    Raises:
        OSError: a write failed. The checkpoint is published completely or not at all.
    """
    step = manifest["progress"]["step"]
    fault_point("checkpoint.manifest", step)
    manifest = with_lists(temporary, manifest)
    write_json(temporary / MANIFEST, with_digest(manifest))
    final = temporary.with_name(temporary.name.removeprefix(TEMPORARY))
    make_way(final)
    fault_point("checkpoint.rename", step)
    os.replace(temporary, final)
    sync_directory(final.parent)
    return final


def make_way(path: Path) -> None:
    """Make a checkpoint's path available: remove a link, or set a directory or file aside."""
    if path.is_symlink():
        path.unlink()
    elif exists(path):
        set_aside(path, DAMAGED if is_dir(path) else FOREIGN)


def set_aside(directory: Path, prefix: str) -> Path:
    """Rename a directory so that it is no longer a checkpoint of the run; return the new path."""
    number, aside = 1, directory.with_name(prefix + directory.name)
    while os.path.lexists(aside):
        number += 1
        aside = directory.with_name(f"{prefix}{directory.name}-{number}")
    os.replace(directory, aside)
    sync_directory(directory.parent)
    return aside


def published_checkpoints(checkpoints: Path) -> list[Path]:
    """Return the published checkpoints, oldest first."""
    return [path for path in checkpoint_directories(checkpoints) if exists(path / MANIFEST)]


def read(directory: str | Path) -> Checkpoint:
    """Read and check the manifest of a checkpoint, without touching its other files.

    Raises:
        CheckpointError: there is no manifest, or it is damaged or has an unsupported version.
    """
    path = Path(directory) / MANIFEST
    try:
        content = read_file(path)
    except OSError as error:
        raise CheckpointError(unreadable(path, error, "It is damaged.")) from None
    if content is None:
        raise CheckpointError(_no_manifest(path.parent))
    return Checkpoint(path.parent, parse_manifest(content, path))


def _no_manifest(path: Path) -> str:
    """Return a message for a path given by the user that is not a checkpoint."""
    fact = "neither a run with checkpoints nor a checkpoint"
    if not is_dir(path):
        fact = "no such directory"
    elif CHECKPOINT_NAME.fullmatch(path.name):
        fact = f"no {MANIFEST}, so this is not a complete checkpoint"
    return f"{path}: {fact}. Name a run, RUN@STEP, or the directory of a checkpoint."


def verify_files(
    checkpoint: Checkpoint, rank: int = 0, world_size: int = 1, *, checksums: bool = True
) -> list[str]:
    """Compare a checkpoint's files with its manifest; return one line for each difference.

    Args:
        rank, world_size: select the files that this rank checks: its own, and a share of the
            others.
        checksums: whether to read the files and compare checksums; otherwise only names and sizes
            are compared.
    """
    directory = checkpoint.directory
    try:
        found = [
            piece_problem(directory / piece.entry["file"], piece, read=checksums)
            for piece in pieces(directory, checkpoint.manifest, rank, world_size)
        ]
        problems = [problem for problem in found if problem is not None]
        if rank == 0:
            present = set(_files_below(directory)) - {MANIFEST}
            # If the manifest has lists, read them only if the number of files differs;
            # `piece_problem` reports missing files.
            if "lists" not in checkpoint.manifest or len(present) != checkpoint.num_files:
                names = {entry["file"] for entry in checkpoint.entries()}
                problems += [
                    f"{directory / name}: the manifest does not list this file"
                    for name in sorted(present - names)
                ]
    except CheckpointError as error:
        return error.problems
    return problems


def _files_below(directory: Path, prefix: str = "") -> Iterator[str]:
    """Yield the relative paths of the files below a directory, without a system call per file."""
    with os.scandir(directory) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _files_below(directory / entry.name, f"{prefix}{entry.name}/")
                continue
            with contextlib.suppress(OSError):  # a link to itself
                if entry.is_file():
                    yield prefix + entry.name


def newest(run_dir: str | Path) -> Checkpoint | None:
    """Return the newest published checkpoint of a run, or None if none was ever published.

    Raises:
        CheckpointError: the newest manifest is damaged, or all checkpoints are lost (see
            `candidates`).
    """
    published = published_checkpoints(RunFiles(run_dir).checkpoints)
    try:
        if published:
            # Reads only this manifest, since every rank calls this function at each start.
            return read(published[-1])
    except CheckpointError:
        candidates(run_dir)
        raise
    candidates(run_dir)
    return None


def locate(reference: str | Path) -> Checkpoint:
    """Return the checkpoint that a reference selects.

    Args:
        reference: `RUN` (for its newest checkpoint), `RUN@STEP`, or the directory of a checkpoint.

    Raises:
        CheckpointError: there is no such checkpoint, or its manifest is damaged.
    """
    path, step = split_step(reference)
    files = RunFiles(path)
    if step is not None and is_dir(path):
        directory = files.checkpoint(checkpoint_name(step))
        if directory in (kept := published_checkpoints(files.checkpoints)):
            return read(directory)
        raise CheckpointError(_no_checkpoint(reference, path, step, kept))
    found = newest(path) if is_dir(files.checkpoints) else read(path)
    if found is None:
        raise CheckpointError(f"{path}: the run has no checkpoint yet.")
    return found


def locate_several(reference: str) -> list[Checkpoint]:
    """Return the checkpoints that a reference selects, oldest first.

    Args:
        reference: `RUN` (for all its checkpoints), `RUN@100,200`, `RUN@100:300` (steps 100 to 300),
            `RUN@100:`, or the directory of a checkpoint.
    """
    match = re.fullmatch(r"(.+)@([^@/]*)", reference)
    if match is None or Path(reference).exists():
        path, steps = Path(reference), ":"
        if not is_dir(RunFiles(path).checkpoints):
            return [read(path)]
    else:
        path, steps = Path(match[1]), match[2]
    directories = published_checkpoints(RunFiles(path).checkpoints)
    kept = {checkpoint_step(directory.name): directory for directory in directories}
    chosen: set[int] = set()
    problems = []
    for part in steps.split(","):
        bounds = re.fullmatch(r"([0-9]*):([0-9]*)|(?:step-)?([0-9]+)", part)
        if bounds is None:
            problems.append(
                f"{reference}: {part!r} is not a step or a range of steps. Write for example "
                f"{path}@100,200 or {path}@100:300."
            )
            continue
        low, high = (bounds[3], bounds[3]) if bounds[3] else (bounds[1], bounds[2])
        found = {step for step in kept if int(low or 0) <= step and (not high or step <= int(high))}
        chosen |= found
        if not found:
            problems.append(_no_checkpoint(reference, path, part, directories))
    checkpoints = []
    for step in sorted(chosen):
        try:
            checkpoints.append(read(kept[step]))
        except CheckpointError as error:
            problems += error.problems
    if problems:
        raise CheckpointError(problems)
    return checkpoints


def _no_checkpoint(reference: object, run_dir: Path, step: object, kept: list[Path]) -> str:
    steps = ", ".join(str(checkpoint_step(each.name)) for each in kept) or "none"
    return (
        f"{reference}: {run_dir} has no complete checkpoint of step {step}. It has checkpoints of "
        f"steps: {steps}."
    )


def candidates(run_dir: str | Path) -> tuple[list[Checkpoint], dict[Path, str]]:
    """Return a run's checkpoints with a valid manifest, newest first, and the damaged checkpoints.

    The file `latest` is only for people and tools; a checkpoint exists if it has a manifest.

    Returns:
        The valid checkpoints, from which a run may resume, and {directory: problem} for the others.
        Both are empty if the run never had a checkpoint.

    Raises:
        CheckpointError: the run had checkpoints, but none is left. Restarting at step 0 would hide
            their loss.
    """
    files = RunFiles(run_dir)
    found: list[Checkpoint] = []
    damaged: dict[Path, str] = {}
    for directory in reversed(published_checkpoints(files.checkpoints)):
        try:
            found.append(read(directory))
        except CheckpointError as error:
            damaged[directory] = str(error)
    lost = traces_of_checkpoints(files.checkpoints)
    if lost and not found:
        raise CheckpointError(
            [
                *damaged.values(),
                f"{files.checkpoints}: no complete checkpoint is left ({', '.join(lost)}). "
                f"Restore one, or choose another --run_dir to start over. Nothing was deleted.",
            ]
        )
    return found, damaged
