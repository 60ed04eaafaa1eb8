"""One checkpoint or copy in progress (`Job`), and what a thread of each rank writes for it.

Must not know when a checkpoint is saved or published: `CheckpointWriter` does.
"""

import re
import shutil
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zerolm.checkpoint.checksums import XXH3, checksum_file
from zerolm.checkpoint.file_writer import verify_written, write_hashed
from zerolm.checkpoint.manifest import Progress
from zerolm.checkpoint.memory import MemoryCopies
from zerolm.common.faults import fault_point
from zerolm.common.files import sync_directory, sync_file

# Files that only the rank which writes them reads, on the same topology. DeepSpeed's names.
OWN_FILE = re.compile(r"(bf16_)?zero_pp_rank_|offloaded_tensors/")


@dataclass(frozen=True)
class Outcome:
    """The result of saving a checkpoint, the same on every rank.

    Attributes:
        progress: the run's progress at the step of the checkpoint.
        error: why the checkpoint was not published; None if it was.
        problems: files that could not be removed; known on rank 0 only.
        copy_seconds: how long training waited for the copy.
        seconds: time from the start of the copy until the checkpoint was published, on rank 0; on
            other ranks until the end of the step in which they learned of it.
        in_memory: a copy in the memory of the hosts instead of a checkpoint.
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
    """One checkpoint or copy in progress.

    Threads only set `entries`, `published_seconds`, `published`, `problems` and `error`.
    """

    temporary: Path
    progress: Progress
    manifest: dict[str, Any]
    ranked: Sequence[str] = ()
    copies: MemoryCopies | None = None
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


def write_files(job: Job, rank: int, *, read_back: bool) -> None:
    """Write and sync this rank's files of a checkpoint, and set `entries`."""
    step, entries = job.progress.step, []
    while job.files:
        path, state = job.files.pop(0)
        fault_point("checkpoint.write", step)
        entry = write_hashed(path, state, lambda: job.cancelled)
        entries.append({"file": str(path.relative_to(job.temporary)), **entry})
        del state
    entries += [_hash_file(path, job.temporary) for path in _other_files(job, rank)]
    for entry in entries:
        if read_back:
            verify_written(job.temporary / entry["file"], entry)
        if OWN_FILE.match(entry["file"]):
            entry["rank"] = rank
    # `publish` syncs the checkpoint's own directory, after all ranks have written.
    names = {parent for entry in entries for parent in Path(entry["file"]).parents}
    for name in names - {Path()}:
        sync_directory(job.temporary / name)
    fault_point("checkpoint.written", step)
    job.entries = entries


def write_to_memory(job: Job, rank: int) -> None:
    """Write this rank's files of a copy, then its manifest, and set `entries`."""
    assert job.copies is not None
    step, entries = job.progress.step, []
    job.temporary.mkdir(exist_ok=True)
    while job.files:
        path, state = job.files.pop(0)
        fault_point("memory.write", step)
        entry = write_hashed(path, state, lambda: job.cancelled, durable=False)
        entries.append({"file": path.name, **entry, "rank": rank})
        del state
    fault_point("memory.manifest", step)
    job.copies.publish(step, {**job.manifest, "files": entries})
    job.entries = entries


def _other_files(job: Job, rank: int) -> list[Path]:
    """Return this rank's files that were not captured: NVMe states and zero_to_fp32.py."""
    files = []
    swapped = job.temporary / "offloaded_tensors" / f"rank{rank}"
    if swapped.is_dir():
        files = [path for path in sorted(swapped.rglob("*")) if path.is_file()]
    if rank == 0:
        from deepspeed.utils import zero_to_fp32

        script = job.temporary / "zero_to_fp32.py"
        shutil.copyfile(zero_to_fp32.__file__, script)
        files.append(script)
    return files


def _hash_file(path: Path, directory: Path) -> dict[str, Any]:
    sync_file(path)
    return {
        "file": str(path.relative_to(directory)),
        "size_bytes": path.stat().st_size,
        XXH3: checksum_file(path).digest,
    }
