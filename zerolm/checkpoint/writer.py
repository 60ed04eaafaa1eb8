"""`CheckpointWriter`: saves checkpoints in the background of training.

    save      every rank copies its part of DeepSpeed's state to host memory       training waits
    write     a thread on each rank writes, hashes and syncs its files
    agree     the sums over ranks of the next step show that all ranks have written
    publish   a thread on rank 0 writes the manifest, renames, and retires old checkpoints
    agree     the sums over ranks of the next step show that it is published
    delete    a thread on each rank deletes its files of the retired checkpoints

At most one checkpoint is in progress; the caller finishes it before the next save. An error on any
rank reaches all ranks through the sums of the next step, and nothing is published. DeepSpeed's
`save_checkpoint` only passes its state to `_capture`; it writes no files except for states on NVMe.
Must not depend on the training loop or on logs.
"""

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from zerolm.checkpoint.file_writer import Cancelled
from zerolm.checkpoint.manifest import FORMAT, VERSION, Progress
from zerolm.checkpoint.memory import MemoryCopies
from zerolm.checkpoint.rotation import Retention
from zerolm.checkpoint.save_job import (
    InMemory,
    Job,
    OnDisk,
    Outcome,
    Target,
)
from zerolm.checkpoint.snapshot import HostCopy
from zerolm.distributed.collectives import gather_objects, gather_on_rank0
from zerolm.ds_files import checkpoints
from zerolm.engine.protocol import Engine
from zerolm.run_dir.files import RunFiles, checkpoint_name

# If all cores are busy, a thread with this niceness gets about 5% of a core (CFS weights).
WRITER_NICENESS = 13


class CheckpointWriter:
    """Saves the checkpoints of a run. Every rank has one and makes the same calls.

    Args:
        engine: the DeepSpeed engine, with ZeRO stage 1, 2 or 3 and any offload.
        run_dir: a directory shared by all ranks.
        read_back: whether to read each file back from disk before it counts as written.
    """

    def __init__(
        self, engine: Engine, run_dir: Path, retention: Retention, *, read_back: bool = False
    ):
        self.engine, self.retention, self.read_back = engine, retention, read_back
        self.checkpoints = RunFiles(run_dir).checkpoints
        self.rank, self.world_size = engine.global_rank, engine.world_size
        self._host_copy = HostCopy()
        self._job: Job | None = None
        self._deletion: threading.Thread | None = None
        checkpoints.capture_saves(engine, self._capture)

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is in progress."""
        return self._job is not None

    @property
    def copying_to_memory(self) -> bool:
        """Whether a copy to host memory is in progress."""
        return self._job is not None and not self._job.target.publishes

    @property
    def step(self) -> int | None:
        """The step of the checkpoint in progress."""
        return None if self._job is None else self._job.progress.step

    @property
    def size_bytes(self) -> int:
        """Bytes of host memory that this rank has used for its part of the last checkpoint."""
        return self._host_copy.size_bytes

    def save(self, progress: Progress, ranked: Sequence[str] = (), **facts: Any) -> float:
        """Copy the state, and start writing a checkpoint. All ranks call this.

        No save may be in progress.

        Args:
            progress: the point from which a resume continues.
            ranked: checkpoint names for all evaluated steps, best first.
            facts: additional manifest entries, as JSON values.

        Returns:
            The elapsed time in seconds.
        """
        target = OnDisk(self.checkpoints, self.rank, self.retention, self.read_back, ranked)
        return self._save(target, progress, facts)

    def copy_to_memory(self, progress: Progress, copies: MemoryCopies, **facts: Any) -> float:
        """Like `save`, but write to host memory instead of disk."""
        return self._save(InMemory(copies), progress, facts)

    def _save(self, target: Target, progress: Progress, facts: dict[str, Any]) -> float:
        assert self._job is None, "finish() the previous checkpoint first"
        manifest = {
            "format": FORMAT,
            "version": VERSION,
            "progress": asdict(progress),
            "world_size": self.world_size,
            "zero_stage": self.engine.zero_optimization_stage(),
            **facts,
        }
        directory = target.directory(progress.step)
        self._job = job = Job(target, directory, Progress(**asdict(progress)), manifest)
        self._finish_deletion()
        target.prepare(job)
        # Begins with a barrier, so no rank writes before unfinished checkpoints are removed.
        with target.parts(self.engine):
            self._take_state(job)
        target.reserve(job, self._host_copy.size_bytes)
        self._start(target.write)
        job.copy_seconds = time.perf_counter() - job.started
        return job.copy_seconds

    def _take_state(self, job: Job) -> None:
        """Let DeepSpeed pass its state to `_capture`."""
        self._host_copy.reset()
        directory = job.temporary
        try:
            checkpoints.save(self.engine, directory)
        except OSError as error:  # for states on NVMe, DeepSpeed itself copies files
            job.error = str(error)
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def _capture(self, state: Any, path: str) -> None:
        assert self._job is not None
        self._job.files.append((Path(path), self._host_copy.copy(state)))

    # ---- Called between two steps

    def flags(self) -> tuple[float, float, float]:
        """Return this rank's flags (written, failed, published), to be summed over all ranks."""
        job = self._job
        if job is None:
            return 0.0, 0.0, 0.0
        written = job.entries is not None and not job.publishing
        return float(written), float(job.error is not None), float(job.published)

    def advance(self, sums: Sequence[float]) -> Outcome | None:
        """Advance the checkpoint in progress. Every rank must call this with the same sums.

        Args:
            sums: the `flags` of all ranks, summed.

        Returns:
            The outcome if the save has ended, else None.
        """
        written, failed, published = sums
        if self._job is None:
            return None
        if failed:
            return self._abort()
        if written == self.world_size and not self._job.publishing:
            if not self._job.target.publishes:
                return self._end(None)
            self._start_publishing()
        return self._end(None) if published else None

    def finish(self) -> Outcome | None:
        """Wait for the checkpoint in progress, if any. Every rank must call this."""
        job = self._job
        if job is None:
            return None
        for part in ("write", "publish") if job.target.publishes else ("write",):
            if part == "publish" and not job.publishing:
                self._start_publishing()
            assert job.thread is not None
            job.thread.join()
            if any(gather_objects(job.error is not None)):
                return self._abort()
        outcome = self._end(None)
        self._finish_deletion()
        return outcome

    def _start_publishing(self) -> None:
        job = self._job
        assert job is not None
        job.publishing = True
        shares = gather_on_rank0(job.entries)
        if shares is not None:
            files = [entry for share in shares for entry in share]
            job.manifest["files"] = sorted(files, key=lambda entry: entry["file"])
            self._start(job.target.publish)

    def _abort(self) -> Outcome:
        """Cancel a checkpoint that at least one rank could not write, and delete its files."""
        job = self._job
        assert job is not None and job.thread is not None
        job.cancelled = True
        job.thread.join()
        errors = gather_objects(job.error)  # also a barrier, after which no rank is writing
        job.target.discard(job)
        lines = [f"rank {rank}: {error}" for rank, error in enumerate(errors) if error is not None]
        return self._end("; ".join(lines))

    def _end(self, error: str | None) -> Outcome:
        job = self._job
        assert job is not None
        self._job = None
        if error is None:
            self._start_deletion(job.target.replaces(job))
        seconds = job.published_seconds or time.perf_counter() - job.started
        name = checkpoint_name(job.progress.step)
        return Outcome(
            name, job.progress, error, job.problems, job.copy_seconds, seconds,
            in_memory=not job.target.publishes,
        )  # fmt: skip

    def _start_deletion(self, delete: Callable[[], object]) -> None:
        """Delete this rank's files of older checkpoints or copies, in the background."""
        self._deletion = threading.Thread(target=delete, daemon=True)
        self._deletion.start()

    def _finish_deletion(self) -> None:
        if self._deletion is not None:
            self._deletion.join()
            self._deletion = None

    # ---- Run in a thread

    def _start(self, work: Callable[[Job], None]) -> None:
        job = self._job
        assert job is not None

        def run() -> None:
            try:
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), WRITER_NICENESS)
                if job.error is None:
                    work(job)
            except Cancelled:
                return
            except Exception as error:  # every failure must reach the training loop
                job.error = f"{error or repr(error)}"

        job.thread = threading.Thread(target=run, name="checkpoint writer", daemon=True)
        job.thread.start()
