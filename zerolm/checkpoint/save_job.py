"""One checkpoint or copy in progress (`Job`), and its destination (`Target`): disk or memory.

`CheckpointWriter` decides when a checkpoint is saved and published.
"""

import shutil
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from zerolm.checkpoint.checksums import XXH3, checksum_file
from zerolm.checkpoint.directory import publish
from zerolm.checkpoint.file_writer import verify_written, write_hashed
from zerolm.checkpoint.manifest import FILES, Progress
from zerolm.checkpoint.memory import MemoryCopies
from zerolm.checkpoint.rotation import Retention, delete_own, remove_unfinished, rotate
from zerolm.common.faults import fault_point
from zerolm.common.files import sync_directory, sync_file
from zerolm.common.values import shown_bytes
from zerolm.distributed.collectives import broadcast_object, gather_objects
from zerolm.ds_files.checkpoints import saving_parts, uncaptured_files
from zerolm.ds_files.zero_files import OF_ONE_RANK
from zerolm.engine.protocol import Engine
from zerolm.run_dir.files import TEMPORARY, checkpoint_name


@dataclass(frozen=True)
class Outcome:
    """The result of saving a checkpoint; the same on every rank except where noted.

    Attributes:
        progress: the run's progress at the step of the checkpoint.
        error: why the checkpoint was not published; None if it was.
        problems: lines about files that could not be removed; set on rank 0 only.
        copy_seconds: how long training was blocked by the copy.
        seconds: on rank 0, time from the start of the copy until the checkpoint was published; on
            other ranks, until the end of the step that reported the publication.
        in_memory: whether this is a copy in host memory instead of a checkpoint.
    """

    name: str
    progress: Progress
    error: str | None
    problems: list[str]
    copy_seconds: float
    seconds: float
    in_memory: bool = False


@dataclass
class Job:
    """A checkpoint or in-memory copy in progress, written to the directory `temporary`.

    Threads only set `entries`, `published_seconds`, `published`, `problems` and `error`.
    """

    target: "Target"
    temporary: Path
    progress: Progress
    manifest: dict[str, Any]
    files: list[tuple[Path, Any]] = field(default_factory=list)
    started: float = field(default_factory=time.perf_counter)
    copy_seconds: float = 0.0
    entries: list[dict[str, Any]] | None = None
    publishing: bool = False
    published: bool = False
    published_seconds: float | None = None  # after `started`
    problems: list[str] = field(default_factory=list)
    retired: list[Path] = field(default_factory=list)
    error: str | None = None
    cancelled: bool = False
    thread: threading.Thread | None = None


class Target(Protocol):
    """The destination of a save. Every rank has one and makes the same calls, except in threads.

    Attributes:
        publishes: whether rank 0 publishes the checkpoint after all ranks have written; otherwise
            each rank completes its own part.
    """

    publishes: bool

    def directory(self, step: int) -> Path:
        """Return the directory to write a step's files to."""

    def prepare(self, job: Job) -> None:
        """Free space before the state is copied; set the job's error if this fails."""

    def parts(self, engine: Engine) -> AbstractContextManager[None]:
        """Return a context in which the engine saves only the part that this rank must write."""

    def reserve(self, job: Job, size_bytes: int) -> None:
        """Check that there is enough free space for this rank's files. All ranks call this."""

    def write(self, job: Job) -> None:
        """Write this rank's files, and set `entries`. Runs in a thread."""

    def publish(self, job: Job) -> None:
        """Publish the files of all ranks, and set `published`. Runs in a thread on rank 0."""

    def discard(self, job: Job) -> None:
        """Delete the files of a failed save, after all ranks have stopped writing."""

    def replaces(self, job: Job) -> Callable[[], object]:
        """Return a function, to be run in a thread, that deletes this rank's files of older saves.

        All ranks call this.
        """


class OnDisk:
    """A checkpoint in the run directory.

    Args:
        checkpoints: the directory of all checkpoints, shared by all ranks.
        ranked: checkpoint names for all evaluated steps, best first.
    """

    publishes = True

    def __init__(
        self,
        checkpoints: Path,
        rank: int,
        retention: Retention,
        read_back: bool,
        ranked: Sequence[str],
    ):
        self.checkpoints, self.rank, self.retention = checkpoints, rank, retention
        self.read_back, self.ranked = read_back, ranked

    def directory(self, step: int) -> Path:
        return self.checkpoints / (TEMPORARY + checkpoint_name(step))

    def prepare(self, job: Job) -> None:
        fault_point("checkpoint.begin", job.progress.step)
        if self.rank:
            return
        try:
            self.checkpoints.mkdir(exist_ok=True)
            job.problems += remove_unfinished(self.checkpoints, job.temporary)
            job.temporary.mkdir()
        except OSError as error:
            job.error = str(error)

    def parts(self, engine: Engine) -> AbstractContextManager[None]:
        return nullcontext()

    def reserve(self, job: Job, size_bytes: int) -> None:
        free = None
        if self.rank == 0:
            try:
                free = shutil.disk_usage(self.checkpoints).free
            except OSError as error:
                job.error = job.error or str(error)
        sizes = gather_objects((size_bytes, free))
        needed, free = sum(size for size, _ in sizes), sizes[0][1]
        if free is not None and needed > free and job.error is None:
            job.error = f"needs {shown_bytes(needed)}, but only {shown_bytes(free)} are free"
        fault_point("checkpoint.snapshot", job.progress.step)

    def write(self, job: Job) -> None:
        """Write, sync and hash this rank's files."""
        step, entries = job.progress.step, []
        while job.files:
            path, state = job.files.pop(0)
            fault_point("checkpoint.write", step)
            entry = write_hashed(path, state, lambda: job.cancelled)
            entries.append({"file": str(path.relative_to(job.temporary)), **entry})
            del state
        others = uncaptured_files(job.temporary, self.rank)
        entries += [_hash_file(path, job.temporary) for path in others]
        for entry in entries:
            if self.read_back:
                verify_written(job.temporary / entry["file"], entry)
            if OF_ONE_RANK.match(entry["file"]):
                entry["rank"] = self.rank
        # `publish` syncs the checkpoint's own directory, after all ranks have written.
        names = {parent for entry in entries for parent in Path(entry["file"]).parents}
        for name in names - {Path()}:
            sync_directory(job.temporary / name)
        fault_point("checkpoint.written", step)
        job.entries = entries

    def publish(self, job: Job) -> None:
        final = publish(job.temporary, job.manifest)
        job.published_seconds = time.perf_counter() - job.started
        try:
            job.retired, problems = rotate(final, self.retention, self.ranked)
            job.problems += problems
        except Exception as error:  # the checkpoint is published, so the save has not failed
            job.problems.append(f"{final.parent}: {error or repr(error)}")
        job.published = True

    def discard(self, job: Job) -> None:
        if self.rank == 0:
            shutil.rmtree(job.temporary, ignore_errors=True)

    def replaces(self, job: Job) -> Callable[[], object]:
        names = [entry["file"] for entry in job.entries or []] + [FILES] * (self.rank == 0)
        return partial(delete_own, broadcast_object(job.retired), names)


class InMemory:
    """A copy in host memory, in addition to the checkpoints."""

    publishes = False

    def __init__(self, copies: MemoryCopies):
        self.copies = copies

    def directory(self, step: int) -> Path:
        return self.copies.step_directory(step)

    def prepare(self, job: Job) -> None:
        """Do nothing, since the first rank that writes creates the directory."""

    def parts(self, engine: Engine) -> AbstractContextManager[None]:
        return saving_parts(engine, weights=self.copies.leads, states=self.copies.holds)

    def reserve(self, job: Job, size_bytes: int) -> None:
        """Do nothing, since preflight has compared the size with the host's memory."""

    def write(self, job: Job) -> None:
        """Write this rank's files, then its manifest."""
        step, entries = job.progress.step, []
        job.temporary.mkdir(exist_ok=True)
        while job.files:
            path, state = job.files.pop(0)
            fault_point("memory.write", step)
            entry = write_hashed(path, state, lambda: job.cancelled, durable=False)
            entries.append({"file": path.name, **entry, "rank": self.copies.rank})
            del state
        fault_point("memory.manifest", step)
        self.copies.publish(step, {**job.manifest, "files": entries})
        job.entries = entries

    def publish(self, job: Job) -> None:
        raise AssertionError("copies in memory are not published")

    def discard(self, job: Job) -> None:
        if self.copies.leads:
            shutil.rmtree(job.temporary, ignore_errors=True)

    def replaces(self, job: Job) -> Callable[[], object]:
        fault_point("memory.remove", job.progress.step)
        return partial(self.copies.remove_older, job.progress.step)


def _hash_file(path: Path, directory: Path) -> dict[str, Any]:
    sync_file(path)
    return {
        "file": str(path.relative_to(directory)),
        "size_bytes": path.stat().st_size,
        XXH3: checksum_file(path).digest,
    }
