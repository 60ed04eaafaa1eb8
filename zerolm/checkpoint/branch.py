"""Starts a branch: links the trunk's checkpoint into the run directory and copies its curve.

Afterwards the directory looks as if the run itself had stopped at this step. So resuming,
resharding, rollbacks, uploads and reports need no code for branches, and the trunk may be removed.
The checkpoint is published last, so the command can simply be repeated if it is killed.
"""

import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from zerolm.checkpoint.directory import Checkpoint, publish, read, verify_files
from zerolm.checkpoint.rotation import point_to, remove_unfinished
from zerolm.common.errors import CheckpointError
from zerolm.common.files import sync_directory, sync_file, write_atomically, write_json
from zerolm.plan.plan import Plan
from zerolm.run_dir import events, jsonl
from zerolm.run_dir.files import TEMPORARY, RunFiles, traces_of_checkpoints
from zerolm.run_dir.jsonl import EventRow, MetricsRow, SampleRow

THREADS = 8  # that read or copy files


def begin(plan: Plan, record: Callable[[], dict[str, Any]], log: Callable[[str], None]) -> None:
    """Create the first checkpoint of a branch in its run directory, unless one exists. Rank 0 only.

    Args:
        record: builds the content of run.json.
        log: called with a line of text.

    Raises:
        CheckpointError: the trunk's checkpoint is damaged or was removed. Nothing was written.
        OSError: a file cannot be written. The same command may be run again.
    """
    files = RunFiles(plan.run_dir)
    if plan.branch is None or plan.branch_from is None or traces_of_checkpoints(files.checkpoints):
        return
    source = _verified(plan.branch_from, plan.branch["digest"])
    trunk, step = RunFiles(plan.branch["run"]), plan.branch["step"]
    temporary = files.checkpoints / (TEMPORARY + source.directory.name)
    remove_unfinished(files.checkpoints, temporary)
    num_copied = _link(source, temporary)
    _copy_rows(trunk.metrics, files.metrics, step, MetricsRow)
    if trunk.samples.is_file():
        _copy_rows(trunk.samples, files.samples, step, SampleRow)
    if not any(row["event"] == "branched" for row in jsonl.read_rows(files.events, EventRow)):
        events.append_event(plan.run_dir, "branched", **plan.branch)
    write_json(files.record, record())
    point_to(publish(temporary, source.manifest))
    how = f"{num_copied} files copied, the others linked" if num_copied else "files linked"
    log(f"branch: of {source.directory}, {how}")


def _verified(directory: Path, digest: str) -> Checkpoint:
    """Compare all files of the trunk's checkpoint with its manifest, and return the checkpoint."""
    source = read(directory)
    with ThreadPoolExecutor(THREADS) as pool:
        shares = pool.map(lambda share: verify_files(source, share, THREADS), range(THREADS))
        problems = [problem for share in shares for problem in share]
    if source.digest != digest:
        problems.append(f"{directory}: has been rewritten since it was checked")
    if problems:
        raise CheckpointError(
            [*problems, f"--branch: {directory} is damaged. Branch from another step."]
        )
    return source


def _link(source: Checkpoint, temporary: Path) -> int:
    """Link a checkpoint's files into a new directory; return how many had to be copied."""
    names = [entry["file"] for entry in source.entries()]
    for parent in {(temporary / name).parent for name in names} | {temporary}:
        parent.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(THREADS) as pool:
        pairs = [(source.directory / name, temporary / name) for name in names]
        num_copied = sum(pool.map(lambda pair: _link_or_copy(*pair), pairs))
    for parent in {(temporary / name).parent for name in names} | {temporary}:
        sync_directory(parent)
    return num_copied


def _link_or_copy(source: Path, target: Path) -> bool:
    """Link a file, or copy it if it cannot be linked; return whether it was copied."""
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:  # another file system, no support for links, or another user's file
        shutil.copyfile(source, target)
        sync_file(target)
        return True
    return False


def _copy_rows(source: Path, target: Path, step: int, kind: Any) -> None:
    """Copy a file's rows up to a step byte for byte. The trunk may still be appending to it."""
    _, end = jsonl.rows_from(source, step, kind)
    write_atomically(target, partial(_copy_bytes, source, end))


def _copy_bytes(source: Path, num_bytes: int, target: BinaryIO) -> None:
    with open(source, "rb") as file:
        while num_bytes and (part := file.read(min(num_bytes, jsonl.BLOCK_BYTES))):
            target.write(part)
            num_bytes -= len(part)
