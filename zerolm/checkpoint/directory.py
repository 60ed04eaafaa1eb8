"""A run's checkpoints on disk: published by a rename, found by their manifests.

A checkpoint is a directory `checkpoints/step-00001000` with a `MANIFEST.json`, which is written
last and vouches for every other file; a directory without one does not exist for us. What is not
whole yet, or not any more, has a name that begins with `.tmp-`. Progress is in the manifest, as
plain JSON. Knows nothing of DeepSpeed or torch: zerolm/checkpoint/load.py fills and loads them.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zerolm.common.errors import CheckpointError
from zerolm.common.faults import fault_point
from zerolm.common.files import sha256_file, sync_directory, write_atomically, write_json
from zerolm.common.run_files import (
    DAMAGED,
    MANIFEST,
    STEP,
    TEMPORARY,
    RunFiles,
    checkpoint_directories,
    checkpoint_step,
)

FORMAT = "zerolm-checkpoint"
VERSION = 2


@dataclass
class Progress:
    """How far a run is. All counts are over the whole run, over all its starts.

    Attributes:
        step: optimizer steps attempted.
        position: sequences consumed, the run's position in the data order without the windows
            that it leaves out.
        tokens: tokens of the steps that were really taken; the learning rate counts these.
        skipped_steps: steps that were not taken: refused for a spike, or skipped by DeepSpeed.
        spikes: steps that were anomalies, see zerolm/optim/spikes.py.
        rollbacks: how often the run went back to a checkpoint by itself.
        skipped_windows: sequence numbers [start, end) that the data order leaves out since then.
        history: what the next steps are judged by, a `zerolm.optim.spikes.History` as JSON.
        health: what the next metrics take up, a `zerolm.train.health.Since` as JSON.
        clipping: gradient-norm statistics, `zerolm.optim.adaptive_clip.NormStatistics` as JSON.

    Lists and dicts are replaced, never changed: a copy that a writer holds stays as it is.
    """

    step: int = 0
    position: int = 0
    tokens: int = 0
    skipped_steps: int = 0
    spikes: int = 0
    rollbacks: int = 0
    skipped_windows: list[list[int]] = field(default_factory=list)
    history: dict[str, Any] = field(default_factory=dict)
    health: dict[str, Any] = field(default_factory=dict)
    clipping: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk whose manifest could be read."""

    directory: Path
    manifest: dict[str, Any]

    @property
    def progress(self) -> Progress:
        return Progress(**self.manifest["progress"])

    @property
    def digest(self) -> str:
        """SHA-256 of the manifest, which vouches for every file."""
        return self.manifest["digest"]

    @property
    def world_size(self) -> int:
        return self.manifest["world_size"]

    @property
    def zero_stage(self) -> int:
        return self.manifest["zero_stage"]


@dataclass(frozen=True)
class Retention:
    """Which checkpoints stay when a newer one is published.

    Attributes:
        last: how many of the newest.
        every_tokens: also the first one after every so many tokens, for good; None for none.
    """

    last: int
    every_tokens: int | None = None


def publish(temporary: Path, manifest: dict[str, Any]) -> Path:
    """Make a filled temporary directory the newest checkpoint. Rank 0 alone calls.

    The order is the safety: manifest, rename, pointer. Whatever has the name already (a damaged
    one, or one whose data is not wanted any more) is set aside.

    Raises:
        OSError: something could not be written. The checkpoint is published, or it is not.
    """
    step = manifest["progress"]["step"]
    fault_point("checkpoint.manifest", step)
    write_json(temporary / MANIFEST, {**manifest, "digest": digest_of(manifest)})
    final = temporary.with_name(temporary.name.removeprefix(TEMPORARY))
    if final.exists():
        set_aside(final, DAMAGED)
    fault_point("checkpoint.rename", step)
    os.replace(temporary, final)
    sync_directory(final.parent)
    fault_point("checkpoint.pointer", step)
    write_atomically(RunFiles(final.parents[1]).latest, f"{final.name}\n".encode())
    return final


def digest_of(manifest: Mapping[str, Any]) -> str:
    """Return the hex SHA-256 of a manifest, without the entry that holds it."""
    content = {key: value for key, value in manifest.items() if key != "digest"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def set_aside(directory: Path, prefix: str) -> Path:
    """Rename a checkpoint to a name under which it does not count; return that name."""
    number, aside = 1, directory.with_name(prefix + directory.name)
    while aside.exists():
        number += 1
        aside = directory.with_name(f"{prefix}{directory.name}-{number}")
    os.replace(directory, aside)
    sync_directory(directory.parent)
    return aside


def rotate(newest: Path, retention: Retention, best: Collection[str] = ()) -> None:
    """Remove the checkpoints that need not stay. Rank 0 alone calls, after a publication.

    Args:
        newest: the one just published, whose files were read back; it stays.
        best: names of further ones to spare.
    """
    step = checkpoint_step(newest.name)
    for directory in removable(by_step(newest.parent), retention, best):
        if directory != newest:
            fault_point("checkpoint.rotate", step)
            remove(directory, lambda: fault_point("checkpoint.rotated", step))


def removable(
    published: Sequence[Path], retention: Retention, best: Collection[str] = ()
) -> list[Path]:
    """Return which of the published checkpoints, oldest first, need not stay."""
    every, passed, doomed = retention.every_tokens, 0, []
    for number, directory in enumerate(published):
        kept = number >= len(published) - retention.last or directory.name in best
        if every is not None:
            try:
                milestones = read(directory).progress.tokens // every
            except CheckpointError:
                continue  # damaged: it is not ours to judge
            kept |= milestones > passed
            passed = max(passed, milestones)
        if not kept:
            doomed.append(directory)
    return doomed


def remove(directory: Path, half_way: Callable[[], object] = lambda: None) -> None:
    """Delete a checkpoint so that, killed half-way, it never looks whole."""
    doomed = directory.with_name(TEMPORARY + directory.name)
    os.replace(directory, doomed)
    sync_directory(directory.parent)
    half_way()
    shutil.rmtree(doomed)


def clear_debris(checkpoints: Path) -> None:
    """Delete what a killed run left of checkpoints that were not whole yet, or not any more."""
    for unfinished in checkpoints.glob(f"{TEMPORARY}*"):
        shutil.rmtree(unfinished)


def by_step(checkpoints: Path) -> list[Path]:
    """Return the published checkpoints, oldest first."""
    return [path for path in checkpoint_directories(checkpoints) if (path / MANIFEST).exists()]


def files_of(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file() and path.name != MANIFEST)


def read(directory: str | Path) -> Checkpoint:
    """Open a checkpoint by its manifest, without touching its other files.

    Raises:
        CheckpointError: there is no manifest, or it cannot be read.
    """
    directory = Path(directory)
    path = directory / MANIFEST
    if not path.is_file():
        raise CheckpointError(
            f"{directory}: no {MANIFEST}, so this is not a whole checkpoint. Name a directory "
            f"checkpoints/{STEP}... that has one."
        )
    try:
        manifest = json.loads(path.read_text())
        known = manifest["format"] == FORMAT and manifest["version"] == VERSION
        expected, actual = manifest.get("digest"), digest_of(manifest)
        if known:
            Progress(**manifest["progress"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error!r}. It is damaged.") from error
    if not known:
        raise CheckpointError(
            f"{path}: format {manifest['format']!r} version {manifest['version']!r}, this release "
            f"reads {FORMAT!r} version {VERSION}."
        )
    if expected != actual:
        raise CheckpointError(
            f"{path}: its content has SHA-256 {actual}, it says {expected}. It is damaged."
        )
    return Checkpoint(directory, manifest)


def problems_of(checkpoint: Checkpoint, rank: int = 0, world_size: int = 1) -> list[str]:
    """Compare every `world_size`-th file with the manifest; return a line for each difference."""
    problems = []
    listed = checkpoint.manifest["files"]
    for entry in listed[rank::world_size]:
        path = checkpoint.directory / entry["file"]
        if not path.is_file():
            problems.append(f"{path}: missing; the manifest lists {entry['size_bytes']} bytes")
        elif path.stat().st_size != entry["size_bytes"]:
            problems.append(
                f"{path}: {path.stat().st_size} bytes, the manifest says {entry['size_bytes']}"
            )
        elif (actual := sha256_file(path)) != entry["sha256"]:
            problems.append(f"{path}: SHA-256 {actual}, the manifest says {entry['sha256']}")
    if rank == 0:
        names = {entry["file"] for entry in listed}
        strangers = {
            str(path.relative_to(checkpoint.directory)) for path in files_of(checkpoint.directory)
        }
        problems += [
            f"{checkpoint.directory / name}: the manifest does not list this file"
            for name in sorted(strangers - names)
        ]
    return problems


def newest(run_dir: str | Path) -> Checkpoint | None:
    """Return the newest published checkpoint of a run, or None when there was never one.

    Raises:
        CheckpointError: its manifest is damaged, or every checkpoint is lost, see `candidates`.
    """
    candidates(run_dir)
    published = by_step(RunFiles(run_dir).checkpoints)
    return read(published[-1]) if published else None


def candidates(run_dir: str | Path) -> tuple[list[Checkpoint], dict[Path, str]]:
    """Return a run's checkpoints whose manifests are right, newest first, and the other ones.

    The pointer is a convenience for people and tools; what counts is which manifests exist.

    Returns:
        The checkpoints; and {directory: what is wrong with its manifest}. Both are empty when the
        run never had a checkpoint.

    Raises:
        CheckpointError: there were checkpoints and none is left. Starting again from step 0 would
            hide a loss.
    """
    files = RunFiles(run_dir)
    found: list[Checkpoint] = []
    damaged: dict[Path, str] = {}
    for directory in reversed(by_step(files.checkpoints)):
        try:
            found.append(read(directory))
        except CheckpointError as error:
            damaged[directory] = str(error)
    remains = [files.latest, *files.checkpoints.glob(f"*{STEP}*")]
    lost = [path.name for path in remains if path.exists() and TEMPORARY not in path.name]
    if lost and not found:
        raise CheckpointError(
            [
                *damaged.values(),
                f"{files.checkpoints}: no whole checkpoint is left ({', '.join(sorted(lost))}). "
                f"Restore one, or choose another --run_dir to start afresh. Nothing was deleted.",
            ]
        )
    return found, damaged
