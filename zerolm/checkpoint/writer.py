"""`CheckpointWriter`: saves checkpoints in the background of training.

    save      every rank copies its part of DeepSpeed's state to host memory       training waits
    write     a thread on each rank writes, hashes and syncs its files
    agree     the sums over ranks of the next step show that all ranks have written
    publish   a thread on rank 0 writes the manifest, renames, and retires old checkpoints
    agree     the sums over ranks of the next step show that it is published
    delete    a thread on each rank deletes its files of the retired checkpoints

At most one checkpoint is in progress; the caller finishes it before the next save. An error on any
rank reaches all ranks with the sums of the next step, and nothing is published. DeepSpeed's
`save_checkpoint` only passes its state to `_capture`; it writes no files, except those of states on
NVMe. Must not depend on the training loop or on logs.
"""

import os
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from zerolm.checkpoint.directory import publish
from zerolm.checkpoint.file_writer import Cancelled
from zerolm.checkpoint.manifest import FILES, FORMAT, VERSION, Progress
from zerolm.checkpoint.memory import MemoryCopies
from zerolm.checkpoint.rotation import Retention, delete_own, remove_unfinished, rotate
from zerolm.checkpoint.save_job import Job, Outcome, write_files, write_to_memory
from zerolm.checkpoint.snapshot import HostCopy
from zerolm.common.faults import fault_point
from zerolm.common.values import shown_bytes
from zerolm.distributed.collectives import broadcast_object, gather_objects, gather_on_rank0
from zerolm.engine import checkpoints
from zerolm.engine.protocol import Engine
from zerolm.run_dir.files import TEMPORARY, RunFiles, checkpoint_name

# If all cores are busy, a thread of this niceness gets about 5% of one (CFS weights).
WRITER_NICENESS = 13


class CheckpointWriter:
    """Saves the checkpoints of a run. Every rank has one and makes the same calls.

    Args:
        engine: the DeepSpeed engine, of ZeRO stage 1, 2 or 3 with any offload.
        run_dir: a directory shared by all ranks.
        retention: which older checkpoints to keep.
        read_back: read each file from the disk before it counts as written.
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
        checkpoints.capture_saves(engine, self._capture)  # `_other_files` copies zero_to_fp32.py

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is in progress."""
        return self._job is not None

    @property
    def copying_to_memory(self) -> bool:
        """Whether a copy in memory is in progress."""
        return self._job is not None and self._job.copies is not None

    @property
    def step(self) -> int | None:
        """The step of the checkpoint in progress."""
        return None if self._job is None else self._job.progress.step

    @property
    def size_bytes(self) -> int:
        """Host memory that this rank holds for copies: its part of the last checkpoint."""
        return self._host_copy.size_bytes

    def save(self, progress: Progress, ranked: Sequence[str] = (), **facts: Any) -> float:
        """Copy the state and start to write it. All ranks call this; no save may be in progress.

        Args:
            progress: the point that a resume continues from.
            ranked: names of the checkpoints of all evaluated steps, the best first.
            facts: further entries of the manifest, JSON values.

        Returns:
            The time that it took, in seconds.
        """
        fault_point("checkpoint.begin", progress.step)
        temporary = self.checkpoints / (TEMPORARY + checkpoint_name(progress.step))
        job = self._begin(temporary, progress, facts)
        job.ranked = ranked
        if self.rank == 0:
            try:
                self.checkpoints.mkdir(exist_ok=True)
                job.problems += remove_unfinished(self.checkpoints, temporary)
                temporary.mkdir()
            except OSError as error:
                job.error = str(error)
        # Starts with a barrier, so no rank writes before unfinished checkpoints are removed.
        self._take_state(job)
        free = None
        if self.rank == 0:
            try:
                free = shutil.disk_usage(self.checkpoints).free
            except OSError as error:
                job.error = job.error or str(error)
        sizes = gather_objects((self._host_copy.size_bytes, free))
        needed, free = sum(size for size, _ in sizes), sizes[0][1]
        if free is not None and needed > free and job.error is None:
            job.error = f"needs {shown_bytes(needed)}, has {shown_bytes(free)}"
        fault_point("checkpoint.snapshot", progress.step)
        self._start(partial(write_files, rank=self.rank, read_back=self.read_back))
        job.copy_seconds = time.perf_counter() - job.started
        return job.copy_seconds

    def copy_to_memory(self, progress: Progress, copies: MemoryCopies, **facts: Any) -> float:
        """Copy the state, and start to write it to the memory of the hosts, beside checkpoints.

        Every rank must call this; no checkpoint may be in progress.

        Args:
            facts: see `save`.

        Returns:
            The time that it took, in seconds.
        """
        job = self._begin(copies.step_directory(progress.step), progress, facts)
        job.copies = copies
        with checkpoints.saving_parts(self.engine, weights=copies.leads, states=copies.holds):
            self._take_state(job)
        self._start(partial(write_to_memory, rank=self.rank))
        job.copy_seconds = time.perf_counter() - job.started
        return job.copy_seconds

    def _begin(self, directory: Path, progress: Progress, facts: dict[str, Any]) -> Job:
        assert self._job is None, "finish() the previous checkpoint first"
        manifest = {
            "format": FORMAT,
            "version": VERSION,
            "progress": asdict(progress),
            "world_size": self.world_size,
            "zero_stage": self.engine.zero_optimization_stage(),
            **facts,
        }
        self._job = Job(directory, Progress(**asdict(progress)), manifest)
        self._finish_deletion()
        return self._job

    def _take_state(self, job: Job) -> None:
        """Let DeepSpeed pass its state to `_capture`."""
        self._host_copy.reset()
        directory = job.temporary
        try:
            checkpoints.save(self.engine, directory)
        except OSError as error:  # DeepSpeed itself copies the files of states on NVMe
            job.error = str(error)
        if torch.cuda.is_available():
            torch.cuda.synchronize()

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
        """Advance the checkpoint in progress. Every rank must call this, with the same sums.

        Args:
            sums: the `flags` of all ranks, summed.

        Returns:
            The outcome if the checkpoint has ended, else None.
        """
        written, failed, published = sums
        if self._job is None:
            return None
        if failed:
            return self._abort()
        if written == self.world_size and not self._job.publishing:
            if self._job.copies is not None:
                return self._end(None)
            self._start_publishing()
        return self._end(None) if published else None

    def finish(self) -> Outcome | None:
        """Wait for the checkpoint in progress, if there is one. Every rank must call this."""
        job = self._job
        if job is None:
            return None
        for stage in ("write", "publish") if job.copies is None else ("write",):
            if stage == "publish" and not job.publishing:
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
            self._start(self._publish)

    def _abort(self) -> Outcome:
        """Cancel a checkpoint that some rank could not write, and delete its files."""
        job = self._job
        assert job is not None and job.thread is not None
        job.cancelled = True
        job.thread.join()
        errors = gather_objects(job.error)  # also a barrier: all ranks have stopped writing
        if job.copies is not None:
            if job.copies.leads:
                shutil.rmtree(job.temporary, ignore_errors=True)
        elif self.rank == 0:
            shutil.rmtree(job.temporary, ignore_errors=True)
        lines = [f"rank {rank}: {error}" for rank, error in enumerate(errors) if error is not None]
        return self._end("; ".join(lines))

    def _end(self, error: str | None) -> Outcome:
        job = self._job
        assert job is not None
        self._job = None
        if error is None and job.copies is None:
            names = [entry["file"] for entry in job.entries or []] + [FILES] * (self.rank == 0)
            retired = broadcast_object(job.retired)
            self._start_deletion(delete_own, retired, names)
        elif error is None and job.copies is not None:
            fault_point("memory.remove", job.progress.step)
            self._start_deletion(job.copies.remove_older, job.progress.step)
        seconds = job.published_seconds or time.perf_counter() - job.started
        name = checkpoint_name(job.progress.step)
        return Outcome(
            name, job.progress, error, job.problems, job.copy_seconds, seconds,
            job.copies is not None,
        )  # fmt: skip

    def _start_deletion(self, delete: Callable[..., None], *arguments: Any) -> None:
        """Delete this rank's files of older checkpoints or copies, in the background."""
        self._deletion = threading.Thread(target=delete, args=arguments, daemon=True)
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
            except Exception as error:  # the training loop must learn of any failure
                job.error = f"{error or repr(error)}"

        job.thread = threading.Thread(target=run, name="checkpoint writer", daemon=True)
        job.thread.start()

    def _publish(self, job: Job) -> None:
        final = publish(job.temporary, job.manifest)
        job.published_seconds = time.perf_counter() - job.started
        try:
            job.retired, problems = rotate(final, self.retention, job.ranked)
            job.problems += problems
        except Exception as error:  # the checkpoint exists, so it has not failed
            job.problems.append(f"{final.parent}: {error or repr(error)}")
        job.published = True
