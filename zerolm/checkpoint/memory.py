"""Copies of the states in host memory, in addition to the checkpoints on disk.

    /dev/shm/zerolm-1000/0f3a5c7e9b1d2f40-8c6e.../    one run: digest of its path, and its token
        run_dir                                 the path of the run directory
        step-00000040/                          files of this host's ranks, as in a checkpoint
            MANIFEST-00003.json                 written last by rank 3, whose part is then complete

The copies survive the death of all processes of a run, but not a reboot. Writing a copy needs no
rename and no agreement between ranks: when a run starts, the ranks load the newest step for which
every rank has a complete part. A rank deletes its part of an older copy once all ranks have a newer
one. The token is stored in the run directory, so copies of an earlier run with the same path are
never loaded. Must not depend on torch, since `launch supervise` also removes copies.
"""

import contextlib
import hashlib
import os
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypedDict

from zerolm.checkpoint.directory import Checkpoint
from zerolm.checkpoint.manifest import parse_manifest
from zerolm.common import processes
from zerolm.common.errors import CheckpointError, RecordError
from zerolm.common.files import encode_json, make_private, write_atomically, write_json
from zerolm.common.records import read_record, with_digest
from zerolm.distributed import collectives
from zerolm.run_dir.files import (
    RunFiles,
    checkpoint_directories,
    checkpoint_name,
    checkpoint_step,
)

SHARED_MEMORY = Path("/dev/shm")
OWNER = "run_dir"  # name of the file that contains the path of the run directory
KEPT = 2  # copies that exist at once: the newest complete one, and the one being written


class _Token(TypedDict):
    token: str


class MemoryCopies:
    """Reads, publishes and removes one rank's part of the copies in this host's memory.

    Args:
        leads: whether this rank writes the data that all ranks on its host load (at stages 1 and 2,
            the weights).
        holds: whether this rank writes its optimizer states; False if an earlier rank on its host
            writes the same states.
    """

    def __init__(self, directory: Path, rank: int, leads: bool, holds: bool = True):
        self.directory, self.rank, self.leads, self.holds = directory, rank, leads, holds
        self.manifest_name = f"MANIFEST-{rank:05d}.json"

    def step_directory(self, step: int) -> Path:
        return self.directory / checkpoint_name(step)

    def publish(self, step: int, manifest: dict[str, Any]) -> None:
        """Write the manifest of this rank's part of a copy, after all other files of that part."""
        content = with_digest(manifest)
        path = self.step_directory(step) / self.manifest_name
        write_atomically(path, encode_json(content), durable=False)

    def found(self) -> dict[int, Checkpoint]:
        """Return {step: this rank's part} of all copies for which the part is complete."""
        parts: dict[int, Checkpoint] = {}
        for directory in checkpoint_directories(self.directory):
            path = directory / self.manifest_name
            with contextlib.suppress(OSError, CheckpointError):
                manifest = parse_manifest(path.read_bytes(), path)
                parts[manifest["progress"]["step"]] = Checkpoint(directory, manifest)
        return parts

    def remove_part(self, step: int) -> None:
        """Delete this rank's part of a copy; the host's last rank also removes the directory."""
        directory = self.step_directory(step)
        path = directory / self.manifest_name
        with contextlib.suppress(OSError, CheckpointError):
            files = parse_manifest(path.read_bytes(), path)["files"]
            path.unlink()
            for entry in files:
                (directory / entry["file"]).unlink(missing_ok=True)
            directory.rmdir()

    def remove_older(self, step: int) -> None:
        """Delete this rank's parts of all copies from before `step`."""
        for older in [each for each in self.found() if each < step]:
            self.remove_part(older)

    def keep_only(self, step: int | None) -> None:
        """Delete all copies on this host except that of `step`. Called by one rank per host."""
        for directory in self.directory.iterdir():
            if directory.is_dir() and (step is None or directory != self.step_directory(step)):
                shutil.rmtree(directory, ignore_errors=True)


def connect(run_dir: Path, rank: int, weights: int, states: int) -> MemoryCopies:
    """Create the directory for copies on each host; return this rank's `MemoryCopies`.

    All ranks call this.

    Args:
        weights, states: the first rank with the same weights, and with the same optimizer states.

    Raises:
        ConfigError: on every rank, if a host cannot create the directory.
    """
    token = collectives.broadcast_object(create_token(run_dir) if rank == 0 else "")
    machine = processes.machine_id()
    found = collectives.gather_objects(((machine, weights), (machine, states)))
    leads, holds = (places.index(places[rank]) == rank for places in zip(*found, strict=True))
    _on_each_host(rank, lambda: create_directory(run_dir, token))
    return MemoryCopies(directory_of(run_dir, token), rank, leads, holds)


def forget(run_dir: Path, rank: int) -> None:
    """Remove the copies written before this start of the run from all hosts.

    Every rank must call this.

    Raises:
        ConfigError: on every rank, if a host cannot remove its copies.
    """
    if collectives.broadcast_object(read_token(run_dir) if rank == 0 else None) is not None:
        _on_each_host(rank, lambda: remove_copies(run_dir))


def _on_each_host(rank: int, action: Callable[[], object]) -> None:
    """Remove abandoned copies and call `action` on one rank per host. All ranks call this."""
    problem = ""
    if collectives.gather_objects(processes.machine_id()).index(processes.machine_id()) == rank:
        try:
            remove_abandoned()
            action()
        except OSError as error:
            problem = f"--memory_checkpoint_interval: {user_directory()}: {error}. Remove it."
    collectives.require_on_all_ranks(not problem, problem)


def user_directory() -> Path:
    """Return the directory of this user's copies, which may not exist."""
    return SHARED_MEMORY / f"zerolm-{os.getuid()}"


def read_token(run_dir: Path) -> str | None:
    """Return the token of a run, or None if it has no copies."""
    with contextlib.suppress(RecordError):
        record = read_record(RunFiles(run_dir).memory, _Token)
        return None if record is None else record["token"]
    return None


def create_token(run_dir: Path) -> str:
    """Return the token of a run, creating it if necessary. Only rank 0 may call this."""
    token = read_token(run_dir)
    if token is None:
        token = secrets.token_hex(8)
        write_json(RunFiles(run_dir).memory, {"token": token})
    return token


def directory_of(run_dir: Path, token: str) -> Path:
    """Return the directory of a run's copies on this host, which may not exist."""
    return user_directory() / f"{_path_digest(run_dir)}-{token}"


def create_directory(run_dir: Path, token: str) -> Path:
    """Create the directory of a run's copies on this host. Called by one rank per host.

    Raises:
        OSError: the directory cannot be created, or belongs to another user.
    """
    directory = directory_of(run_dir, token)
    temporary = directory.with_name(f".tmp-{directory.name}")
    while not directory.exists():
        make_private(user_directory())
        with contextlib.suppress(FileNotFoundError):  # a run that ended has removed its parent
            make_private(temporary)
            (temporary / OWNER).write_text(os.path.realpath(run_dir))
            os.replace(temporary, directory)
    return directory


def remove_abandoned() -> None:
    """Remove this host's copies of runs whose directory was deleted or reused by another run."""
    for directory in _directories(lambda name: True):
        with contextlib.suppress(OSError):
            run_dir = Path((directory / OWNER).read_text())
            own = directory_of(run_dir, read_token(run_dir) or "")
            if directory.name.removeprefix(".tmp-") != own.name:  # `own` may not be complete yet
                shutil.rmtree(directory, ignore_errors=True)


def remove_copies(run_dir: Path) -> None:
    """Remove a run's token, without which no host loads a copy, and its copies on this host."""
    RunFiles(run_dir).memory.unlink(missing_ok=True)
    for directory in _directories(lambda name: name.startswith(_path_digest(run_dir))):
        shutil.rmtree(directory, ignore_errors=True)
    with contextlib.suppress(OSError):
        user_directory().rmdir()


def newest_step(run_dir: Path) -> int:
    """Return the step of this host's newest copy, or 0 if there is none."""
    token = read_token(run_dir)
    found = [] if token is None else checkpoint_directories(directory_of(run_dir, token))
    complete = [each for each in found if any(each.glob("MANIFEST-*.json"))]
    return max((checkpoint_step(each.name) for each in complete), default=0)


def bytes_on_host(run_dir: Path) -> int:
    """Return the total size of a run's copies on this host."""
    found = _directories(lambda name: name.startswith(_path_digest(run_dir)))
    files = (path for directory in found for path in directory.rglob("*") if path.is_file())
    return sum(path.stat().st_size for path in files)


def _path_digest(run_dir: Path) -> str:
    return hashlib.sha256(os.path.realpath(run_dir).encode()).hexdigest()[:16]


def _directories(wanted: Callable[[str], bool]) -> list[Path]:
    parent = user_directory()
    if not parent.is_dir() or parent.is_symlink():
        return []
    try:
        found = list(parent.iterdir())
    except FileNotFoundError:  # another stage, or another run, has removed the last copies
        return []
    return [path for path in found if wanted(path.name) and path.is_dir()]
