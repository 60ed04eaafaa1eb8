"""A run's checkpoints on disk: published by a rename, found by their manifests.

A checkpoint is a directory `checkpoints/step-00001000` with a `MANIFEST.json`, which is written
last and vouches for every other file; a directory without one does not exist for us. What is not
whole yet, or not any more, has a name that begins with `.tmp-`. Progress is in the manifest, as
plain JSON. Knows nothing of DeepSpeed or torch: zerolm/checkpoint.py fills and loads them.
"""

import hashlib
import json
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zerolm.errors import CheckpointError
from zerolm.files import sha256_file, sync_directory, write_atomically, write_json

FORMAT = "zerolm-checkpoint"
VERSION = 1
MANIFEST = "MANIFEST.json"
POINTER = "latest"
PREFIX = "step-"
TEMPORARY = ".tmp-"


@dataclass
class Progress:
    """How far a run is. All counts are over the whole run, over all its starts.

    Attributes:
        step: optimizer steps attempted.
        position: sequences consumed, the run's position in the data order without the windows
            that it leaves out.
        tokens: tokens of the steps that were really taken; the learning rate counts these.
        skipped_steps: steps that were not taken: refused for a spike, or skipped by DeepSpeed.
        spikes: steps that were anomalies, see zerolm/spike.py.
        rollbacks: how often the run went back to a checkpoint by itself.
        skipped_windows: sequence numbers [start, end) that the data order leaves out since then.
        history: what the next steps are judged by, a `zerolm.spike.History` as JSON.

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
        return hashlib.sha256(json.dumps(self.manifest, sort_keys=True).encode()).hexdigest()

    @property
    def world_size(self) -> int:
        return self.manifest["world_size"]

    @property
    def zero_stage(self) -> int:
        return self.manifest["zero_stage"]


def directory_name(step: int) -> str:
    return f"{PREFIX}{step:08d}"


def publish(temporary: Path, manifest: dict[str, Any], keep: int) -> Path:
    """Make a filled temporary directory the newest checkpoint. Rank 0 alone calls.

    The order is the safety: manifest, rename, pointer, and only then are old ones removed.
    """
    write_json(temporary / MANIFEST, manifest)
    final = temporary.with_name(temporary.name.removeprefix(TEMPORARY))
    if final.exists():  # a damaged one of the same step, refused at the start of this run
        remove(final)
    os.replace(temporary, final)
    sync_directory(final.parent)
    write_atomically(final.parent / POINTER, lambda file: file.write(f"{final.name}\n".encode()))
    for old in by_step(final.parent)[:-keep] if keep else []:
        if old != final:
            remove(old)
    return final


def remove(directory: Path) -> None:
    """Delete a checkpoint so that, killed half-way, it never looks whole."""
    doomed = directory.with_name(TEMPORARY + directory.name)
    os.replace(directory, doomed)
    sync_directory(directory.parent)
    shutil.rmtree(doomed)


def clear_debris(checkpoints: Path) -> None:
    for unfinished in checkpoints.glob(f"{TEMPORARY}*"):
        shutil.rmtree(unfinished)


def by_step(checkpoints: Path) -> list[Path]:
    """Return the published checkpoints, oldest first."""
    found = [path.parent for path in checkpoints.glob(f"{PREFIX}*/{MANIFEST}")]
    return sorted(found, key=lambda path: path.name)


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
            f"checkpoints/{PREFIX}... that has one."
        )
    try:
        manifest = json.loads(path.read_text())
        Progress(**manifest["progress"])
        known = manifest["format"] == FORMAT and manifest["version"] == VERSION
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error!r}. It is damaged.") from error
    if not known:
        raise CheckpointError(
            f"{path}: format {manifest['format']!r} version {manifest['version']!r}, this release "
            f"reads {FORMAT!r} version {VERSION}."
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

    The pointer is a convenience for people and tools; what counts is which manifests exist.

    Raises:
        CheckpointError: the newest manifest is damaged, or the pointer names a checkpoint although
            none is left. Starting again from step 0 would hide a loss.
    """
    checkpoints = Path(run_dir) / "checkpoints"
    published = by_step(checkpoints)
    if published:
        return read(published[-1])
    if (checkpoints / POINTER).exists():
        named = (checkpoints / POINTER).read_text().strip()
        raise CheckpointError(
            f"{checkpoints / POINTER}: names {named!r}, but no checkpoint is left. "
            f"Restore it, or choose another --run_dir to start afresh."
        )
    return None
