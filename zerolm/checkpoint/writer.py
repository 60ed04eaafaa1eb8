"""`CheckpointWriter`: saves checkpoints in the background of training.

    save      every rank copies its part of DeepSpeed's state to host memory       training waits
    write     a thread on each rank writes, hashes, syncs and reads back its files
    agree     the sums over ranks of the next step show that all ranks have written
    publish   a thread on rank 0 writes the manifest, renames, and removes old checkpoints
    agree     the sums over ranks of the next step show that it is published

At most one checkpoint is in progress; the caller finishes it before the next save. An error on any
rank reaches all ranks with the sums of the next step, and nothing is published. DeepSpeed's
`save_checkpoint` only passes its state to `_CapturingEngine`; it writes no files, except those of
states on NVMe. Must not depend on the training loop or on logs.
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

from zerolm.checkpoint.directory import publish
from zerolm.checkpoint.manifest import FORMAT, VERSION, Progress
from zerolm.checkpoint.rotation import Retention, remove_unfinished, rotate
from zerolm.checkpoint.snapshot import Cancelled, HostCopy, write_hashed
from zerolm.common.faults import fault_point
from zerolm.common.files import sha256_file, sync_directory, sync_file
from zerolm.common.run_files import TEMPORARY, RunFiles, checkpoint_name
from zerolm.common.values import shown_bytes
from zerolm.distributed.collectives import gather_objects

# If all cores are busy, a thread of this niceness gets about 5% of one (CFS weights).
WRITER_NICENESS = 13


@dataclass(frozen=True)
class Outcome:
    """The result of saving a checkpoint, the same on every rank.

    Attributes:
        name: of its directory.
        progress: of the run at its step.
        error: why it was not published; None if it was.
        problems: what could not be tidied up; known on rank 0 only.
        copy_seconds: how long training waited for the copy.
        seconds: from the start of the copy to the end.
    """

    name: str
    progress: Progress
    error: str | None
    problems: list[str]
    copy_seconds: float
    seconds: float


@dataclass
class _Job:
    """A checkpoint in progress. Threads only set `entries`, `published`, `problems` and `error`."""

    temporary: Path
    progress: Progress
    manifest: dict[str, Any]
    best: frozenset[str]
    files: list[tuple[Path, Any]] = field(default_factory=list)
    started: float = field(default_factory=time.perf_counter)
    copy_seconds: float = 0.0
    entries: list[dict[str, Any]] | None = None
    publishing: bool = False
    published: bool = False
    problems: list[str] = field(default_factory=list)
    error: str | None = None
    cancelled: bool = False
    thread: threading.Thread | None = None


class _CapturingEngine:
    """A checkpoint engine for DeepSpeed that captures the state to be saved and writes no files.

    Loading uses the original engine.
    """

    def __init__(self, original: Any, capture: Callable[[Any, str], None]):
        self._original, self._capture = original, capture

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def create(self, info: Any) -> None:
        """Do nothing."""

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Do nothing: the writer creates directories."""

    def save(self, state_dict: Any, path: str) -> None:
        self._capture(state_dict, path)

    def commit(self, info: Any) -> bool:
        return True

    def preserves_storage_sharing(self) -> bool:
        return False  # so DeepSpeed need not clone: `HostCopy` makes views compact


class CheckpointWriter:
    """Saves the checkpoints of a run. Every rank has one and makes the same calls.

    Args:
        engine: the DeepSpeed engine, of ZeRO stage 1, 2 or 3 with any offload.
        run_dir: a directory shared by all ranks.
        retention: which older checkpoints to keep.
    """

    def __init__(self, engine: Any, run_dir: Path, retention: Retention):
        self.engine, self.retention = engine, retention
        self.checkpoints = RunFiles(run_dir).checkpoints
        self.rank, self.world_size = engine.global_rank, engine.world_size
        self._host_copy = HostCopy()
        self._job: _Job | None = None
        engine.checkpoint_engine = _CapturingEngine(engine.checkpoint_engine, self._capture)
        engine._copy_recovery_script = lambda path: None  # `_other_files` copies zero_to_fp32.py

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is in progress."""
        return self._job is not None

    @property
    def step(self) -> int | None:
        """The step of the checkpoint in progress."""
        return None if self._job is None else self._job.progress.step

    @property
    def size_bytes(self) -> int:
        """Host memory that this rank holds for copies: its part of the last checkpoint."""
        return self._host_copy.size_bytes

    def save(self, progress: Progress, best: Sequence[str] = (), **facts: Any) -> float:
        """Copy the state and start to write it. Every rank must call; none may be in progress.

        Args:
            progress: from which a resume continues.
            best: names of further checkpoints to keep.
            facts: further entries of the manifest, JSON values.

        Returns:
            The time that it took, in seconds.
        """
        assert self._job is None, "finish() the previous checkpoint first"
        started = time.perf_counter()
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
                self.checkpoints.mkdir(exist_ok=True)
                job.problems += remove_unfinished(self.checkpoints, temporary)
            except OSError as error:
                job.error = str(error)
        self._host_copy.reset()
        try:
            # Starts with a barrier, so no rank writes before unfinished checkpoints are removed.
            self.engine.save_checkpoint(
                str(self.checkpoints), tag=temporary.name, save_latest=False
            )
        except OSError as error:  # DeepSpeed itself copies the files of states on NVMe
            job.error = str(error)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        free = None
        try:
            free = shutil.disk_usage(self.checkpoints).free
        except OSError as error:
            job.error = job.error or str(error)
        sizes = gather_objects((self._host_copy.size_bytes, free))
        needed, free = sum(size for size, _ in sizes), sizes[0][1]
        if free is not None and needed > free and job.error is None:
            job.error = f"needs {shown_bytes(needed)}, has {shown_bytes(free)}"
        fault_point("checkpoint.snapshot", progress.step)
        self._start(self._write)
        job.copy_seconds = time.perf_counter() - started
        return job.copy_seconds

    def _capture(self, state: Any, path: str) -> None:
        assert self._job is not None
        self._job.files.append((Path(path), self._host_copy.copy(state)))

    # ---- Called between two steps

    def flags(self) -> tuple[float, float, float]:
        """Return this rank's terms of the sums over ranks: written, failed, published."""
        job = self._job
        if job is None:
            return 0.0, 0.0, 0.0
        written = job.entries is not None and not job.publishing
        return float(written), float(job.error is not None), float(job.published)

    def advance(self, sums: Sequence[float]) -> Outcome | None:
        """Advance the checkpoint in progress. Every rank must call, with the same sums.

        Args:
            sums: of the `flags` of all ranks.

        Returns:
            The outcome if the checkpoint has ended, else None.
        """
        written, failed, published = sums
        if self._job is None:
            return None
        if failed:
            return self._abort()
        if written == self.world_size and not self._job.publishing:
            self._start_publishing()
        return self._end(None) if published else None

    def finish(self) -> Outcome | None:
        """Wait for the checkpoint in progress, if there is one. Every rank must call."""
        job = self._job
        if job is None:
            return None
        for stage in ("write", "publish"):
            if stage == "publish" and not job.publishing:
                self._start_publishing()
            assert job.thread is not None
            job.thread.join()
            if any(gather_objects(job.error is not None)):
                return self._abort()
        return self._end(None)

    def _start_publishing(self) -> None:
        job = self._job
        assert job is not None
        job.publishing = True
        shares = gather_objects(job.entries)
        files = sorted((entry for share in shares for entry in share), key=lambda e: e["file"])
        job.manifest["files"] = files
        if self.rank == 0:
            self._start(self._publish)

    def _abort(self) -> Outcome:
        """Cancel a checkpoint that some rank could not write, and delete its files."""
        job = self._job
        assert job is not None and job.thread is not None
        job.cancelled = True
        job.thread.join()
        errors = gather_objects(job.error)  # also a barrier: all ranks have stopped writing
        if self.rank == 0:
            shutil.rmtree(job.temporary, ignore_errors=True)
        lines = [f"rank {rank}: {error}" for rank, error in enumerate(errors) if error is not None]
        return self._end("; ".join(lines))

    def _end(self, error: str | None) -> Outcome:
        job = self._job
        assert job is not None
        self._job = None
        seconds = time.perf_counter() - job.started
        name = checkpoint_name(job.progress.step)
        return Outcome(name, job.progress, error, job.problems, job.copy_seconds, seconds)

    # ---- Run in a thread

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
            except Exception as error:  # the training loop must learn of any failure
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
        entries += [_hash_file(path, job.temporary) for path in self._other_files(job)]
        for directory in {(job.temporary / entry["file"]).parent for entry in entries}:
            sync_directory(directory)
        sync_directory(job.temporary)
        fault_point("checkpoint.written", step)
        job.entries = entries

    def _other_files(self, job: _Job) -> list[Path]:
        """Return this rank's files that were not captured: NVMe states and zero_to_fp32.py."""
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
        try:
            job.problems += rotate(final, self.retention, job.best)
        except Exception as error:  # the checkpoint exists, so it has not failed
            job.problems.append(f"{final.parent}: {error or repr(error)}")
        job.published = True


def _hash_file(path: Path, directory: Path) -> dict[str, Any]:
    sync_file(path)
    return {
        "file": str(path.relative_to(directory)),
        "size_bytes": path.stat().st_size,
        "sha256": sha256_file(path),
    }
