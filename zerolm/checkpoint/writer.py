"""Saves checkpoints behind training: what the training loop waits for is a copy in host memory.

    save      all ranks copy their part of DeepSpeed's state to host memory     training waits
    write     a thread on each rank writes, hashes, syncs and reads back        training goes on
    agree     the ranks' sums of the next step say that all have written
    publish   a thread on rank 0 writes the manifest and renames, then rotates  training goes on
    agree     the sums of the next step say that it is published

Only one checkpoint is on its way: the next one waits for it, and says how long. An error anywhere
reaches all ranks with the sums of the next step, and nothing is published. DeepSpeed's own engine
writes nothing: its `save_checkpoint` hands over the state, and no disk is touched until it returns.
"""

import os
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from zerolm.checkpoint.directory import (
    FORMAT,
    VERSION,
    Progress,
    Retention,
    clear_debris,
    publish,
    rotate,
)
from zerolm.checkpoint.snapshot import Cancelled, HostCopy, write_hashed
from zerolm.common.faults import fault_point
from zerolm.common.files import sha256_file, sync_directory, sync_file
from zerolm.common.run_files import TEMPORARY, RunFiles, checkpoint_name
from zerolm.common.values import shown_bytes
from zerolm.distributed.collectives import gather_objects

# Where all cores compute, a thread of this niceness takes about a twentieth of one (CFS weights).
WRITER_NICENESS = 13


@dataclass(frozen=True)
class Outcome:
    """What became of a checkpoint, the same on every rank.

    Attributes:
        name: of its directory.
        progress: of the run at its step.
        error: why it was not published; None if it was.
        copy_seconds: for which training stood still.
        seconds: from the copy to the end.
    """

    name: str
    progress: Progress
    error: str | None
    copy_seconds: float
    seconds: float


@dataclass
class _Job:
    """A checkpoint on its way. Threads set `entries`, `published` and `error`, nothing else."""

    temporary: Path
    progress: Progress
    manifest: dict[str, Any]
    best: frozenset[str]
    files: list[tuple[Path, Any]] = field(default_factory=list)
    began: float = field(default_factory=time.perf_counter)
    copy_seconds: float = 0.0
    entries: list[dict[str, Any]] | None = None
    publishing: bool = False
    published: bool = False
    error: str | None = None
    cancelled: bool = False
    thread: threading.Thread | None = None


class _StateTaker:
    """Stands in for DeepSpeed's checkpoint engine: takes what it is told to save, writes nothing.

    Its files appear later, so it makes no directories either; loading is as before.
    """

    def __init__(self, original: Any, take: Callable[[Any, str], None]):
        self._original, self._take = original, take

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def create(self, info: Any) -> None:
        """Nothing is to be prepared."""

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """The writer makes them."""

    def save(self, state_dict: Any, path: str) -> None:
        self._take(state_dict, path)

    def commit(self, info: Any) -> bool:
        return True

    def preserves_storage_sharing(self) -> bool:
        return False  # the copy is compact: DeepSpeed need not clone before


class CheckpointWriter:
    """Saves the checkpoints of a run; one on each rank, and all ranks make the same calls.

    Args:
        engine: the DeepSpeed engine; ZeRO stages 1, 2 and 3, offloaded or not.
        run_dir: one directory that every rank sees.
        retention: which older checkpoints stay.
    """

    def __init__(self, engine: Any, run_dir: Path, retention: Retention):
        self.engine, self.retention = engine, retention
        self.checkpoints = RunFiles(run_dir).checkpoints
        self.rank, self.world_size = engine.global_rank, engine.world_size
        self._host_copy = HostCopy()
        self._job: _Job | None = None
        engine.checkpoint_engine = _StateTaker(engine.checkpoint_engine, self._take)
        engine._copy_recovery_script = lambda path: None  # the writer does it

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is on its way."""
        return self._job is not None

    @property
    def step(self) -> int | None:
        """The step of the checkpoint on its way."""
        return None if self._job is None else self._job.progress.step

    @property
    def size_bytes(self) -> int:
        """Of this rank's part of the last checkpoint: so much host memory is held for copies."""
        return self._host_copy.size_bytes

    def save(self, progress: Progress, best: Sequence[str] = (), **facts: Any) -> float:
        """Copy the state and begin to write it. Every rank must call, with none on its way.

        Args:
            progress: what a resume continues from.
            best: names of checkpoints that a rotation spares.
            facts: further entries of the manifest, JSON values.

        Returns:
            The seconds that it took.
        """
        assert self._job is None, "finish() the one before"
        began = time.perf_counter()
        name = checkpoint_name(progress.step)
        fault_point("checkpoint.begin", progress.step)
        manifest = {
            "format": FORMAT,
            "version": VERSION,
            "progress": asdict(progress),
            "world_size": self.world_size,
            "zero_stage": self.engine.zero_optimization_stage(),
            **facts,
        }
        temporary = self.checkpoints / (TEMPORARY + name)
        job = self._job = _Job(temporary, Progress(**asdict(progress)), manifest, frozenset(best))
        if self.rank == 0:
            try:
                clear_debris(self.checkpoints)
            except OSError as error:
                job.error = str(error)
        self._host_copy.begin()
        try:
            # It begins with a barrier: no rank writes before the debris is gone.
            self.engine.save_checkpoint(
                str(self.checkpoints), tag=temporary.name, save_latest=False
            )
        except OSError as error:  # NVMe offload: DeepSpeed copies its files itself
            job.error = str(error)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        free = shutil.disk_usage(self.checkpoints).free
        known = gather_objects((self._host_copy.size_bytes, free, job.error))
        needed = sum(size for size, _, _ in known)
        if needed > known[0][1] and job.error is None:
            job.error = f"needs {shown_bytes(needed)}, has {shown_bytes(known[0][1])}"
        fault_point("checkpoint.snapshot", progress.step)
        self._start(self._write)
        job.copy_seconds = time.perf_counter() - began
        return job.copy_seconds

    def _take(self, state: Any, path: str) -> None:
        assert self._job is not None
        self._job.files.append((Path(path), self._host_copy.take(state)))

    # ---- Between two steps

    def flags(self) -> tuple[float, float, float]:
        """Return what this rank adds to the ranks' sums: written, failed, published."""
        job = self._job
        if job is None:
            return 0.0, 0.0, 0.0
        written = job.entries is not None and not job.publishing
        return float(written), float(job.error is not None), float(job.published)

    def advance(self, sums: Sequence[float]) -> Outcome | None:
        """Go on with the checkpoint on its way. Every rank must call, with the same sums.

        Args:
            sums: of all ranks' `flags`.

        Returns:
            What became of it, if that is decided now.
        """
        written, failed, published = sums
        if self._job is None:
            return None
        if failed:
            return self._give_up()
        if written == self.world_size and not self._job.publishing:
            self._publish_behind()
        return self._end(None) if published else None

    def finish(self) -> Outcome | None:
        """Wait for the checkpoint on its way, if there is one. Every rank must call."""
        job = self._job
        if job is None:
            return None
        for stage in ("write", "publish"):
            if stage == "publish" and not job.publishing:
                self._publish_behind()
            assert job.thread is not None
            job.thread.join()
            if any(gather_objects(job.error is not None)):
                return self._give_up()
        return self._end(None)

    def _publish_behind(self) -> None:
        job = self._job
        assert job is not None
        job.publishing = True
        shares = gather_objects(job.entries)
        files = sorted((entry for share in shares for entry in share), key=lambda e: e["file"])
        job.manifest["files"] = files
        if self.rank == 0:
            self._start(self._publish)

    def _give_up(self) -> Outcome:
        """Clear what was written of a checkpoint that some rank could not write."""
        job = self._job
        assert job is not None and job.thread is not None
        job.cancelled = True
        job.thread.join()
        errors = gather_objects(job.error)  # and all have stopped writing
        if self.rank == 0:
            shutil.rmtree(job.temporary, ignore_errors=True)
        lines = [f"rank {rank}: {error}" for rank, error in enumerate(errors) if error is not None]
        return self._end("; ".join(lines))

    def _end(self, error: str | None) -> Outcome:
        job = self._job
        assert job is not None
        self._job = None
        seconds = time.perf_counter() - job.began
        name = checkpoint_name(job.progress.step)
        return Outcome(name, job.progress, error, job.copy_seconds, seconds)

    # ---- In a thread

    def _start(self, work: Callable[[_Job], None]) -> None:
        job = self._job
        assert job is not None

        def run() -> None:
            try:
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), WRITER_NICENESS)
                if job.error is None:
                    work(job)
            except Cancelled:
                return
            except Exception as error:  # whatever it is, the training loop must hear of it
                job.error = f"{error or repr(error)}"

        job.thread = threading.Thread(target=run, name="checkpoint writer", daemon=True)
        job.thread.start()

    def _write(self, job: _Job) -> None:
        step, entries = job.progress.step, []
        job.temporary.mkdir(parents=True, exist_ok=True)
        while job.files:
            path, state = job.files.pop(0)
            fault_point("checkpoint.write", step)
            path.parent.mkdir(parents=True, exist_ok=True)
            entry = write_hashed(path, state, lambda: job.cancelled)
            entries.append({"file": str(path.relative_to(job.temporary)), **entry})
            del state
        entries += [_hash_foreign(path, job.temporary) for path in self._foreign_files(job)]
        for directory in {(job.temporary / entry["file"]).parent for entry in entries}:
            sync_directory(directory)
        sync_directory(job.temporary)
        fault_point("checkpoint.written", step)
        job.entries = entries

    def _foreign_files(self, job: _Job) -> list[Path]:
        """Return this rank's files that DeepSpeed did not hand over: NVMe's, and the script."""
        files = []
        swapped = job.temporary / "offloaded_tensors" / f"rank{self.rank}"
        if swapped.is_dir():
            files = [path for path in sorted(swapped.rglob("*")) if path.is_file()]
        if self.rank == 0:
            from deepspeed.utils import zero_to_fp32

            script = job.temporary / "zero_to_fp32.py"
            shutil.copyfile(zero_to_fp32.__file__, script)
            files.append(script)
        return files

    def _publish(self, job: _Job) -> None:
        final = publish(job.temporary, job.manifest)
        rotate(final, self.retention, job.best)
        job.published = True


def _hash_foreign(path: Path, directory: Path) -> dict[str, Any]:
    sync_file(path)
    return {
        "file": str(path.relative_to(directory)),
        "size_bytes": path.stat().st_size,
        "sha256": sha256_file(path),
    }
