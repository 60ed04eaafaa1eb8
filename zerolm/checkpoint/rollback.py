"""Rolls a run back to a checkpoint from before a spike, and is safe against crashes at any point.

The rollback is first recorded in `rollbacks.json`. Then `apply_recorded` renames the undone
checkpoints, newest first, and updates `latest`. Every start of the run also calls this function, to
complete an interrupted rollback. Each checkpoint stores the number of rollbacks before it, so
checkpoints from before and after a rollback can be distinguished. Only rank 0 changes files. Must
not depend on the training loop or on torch.
"""

import contextlib
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from zerolm.checkpoint.directory import Checkpoint, published_checkpoints, read, set_aside
from zerolm.checkpoint.manifest import Progress
from zerolm.checkpoint.rotation import point_to
from zerolm.common.errors import CheckpointError
from zerolm.common.faults import fault_point
from zerolm.common.files import write_json
from zerolm.data.skips import merge_ranges, sequence_range
from zerolm.run_dir.files import ROLLED_BACK, RunFiles, rolled_back_checkpoints
from zerolm.run_dir.records import Rollback, read_rollbacks


def target(run_dir: Path, first_anomaly: int, margin: int) -> Checkpoint | None:
    """Return the checkpoint to roll back to, or None if none precedes the first anomaly.

    Args:
        margin: number of good steps before the anomaly to undo as well, if a checkpoint is old
            enough.
    """
    before = []
    for directory in published_checkpoints(RunFiles(run_dir).checkpoints):
        try:
            found = read(directory)
        except CheckpointError:  # damaged
            continue
        if found.progress.step < first_anomaly:
            before.append(found)
    early = [found for found in before if found.progress.step < first_anomaly - margin]
    return (early or before)[-1] if before else None


def plan(
    run_dir: Path,
    progress: Progress,
    batch_schedule: Callable[[int], int],
    first_anomaly: int,
    margin: int,
    reason: str,
    position_of: Callable[[Checkpoint], int] = lambda found: found.progress.position,
) -> Rollback | None:
    """Plan the rollback that undoes a spike; return None if no checkpoint is old enough.

    The run will skip the data from `margin` steps before the first anomaly to the end of the last
    batch. The range starts at the checkpoint instead if that is later, or if the batch size has
    changed since then.

    Args:
        batch_schedule: function from a position to the number of sequences in the batch that starts
            there.
        reason: why the last step is an anomaly.
        position_of: function from a checkpoint to the position from which the run continues after
            loading it.
    """
    found = target(run_dir, first_anomaly, margin)
    if found is None:
        return None
    start = position = position_of(found)
    for step in range(found.progress.step, progress.step):
        if step == first_anomaly - 1 - margin:
            start = position
        position += batch_schedule(position)
    if position != progress.position:  # the batch size has changed since the checkpoint
        start = position_of(found)
    window = sequence_range(start, progress.position, progress.skipped_windows)
    return {
        "number": progress.rollbacks + 1,
        "from_step": progress.step,
        "to_step": found.progress.step,
        "checkpoint": found.directory.name,
        "first_anomaly": first_anomaly,
        "skipped_window": list(window),
        "skipped_windows": merge_ranges([*progress.skipped_windows, window]),
        "skipped_steps": progress.skipped_steps,
        "spikes": progress.spikes,
        "reason": reason,
    }


def record(run_dir: Path, entry: Rollback) -> None:
    """Append a rollback to `rollbacks.json`. From then on, every start of the run applies it."""
    write_json(RunFiles(run_dir).rollbacks, {"rollbacks": [*read_rollbacks(run_dir), entry]})
    fault_point("rollback.recorded", entry["from_step"])


def apply_recorded(run_dir: Path) -> None:
    """Rename the undone checkpoints, and point `latest` to the newest remaining one.

    May be interrupted at any point and called again.
    """
    rollbacks = read_rollbacks(run_dir)
    if not rollbacks:
        return
    checkpoints = RunFiles(run_dir).checkpoints
    for directory in reversed(published_checkpoints(checkpoints)):
        try:
            progress = read(directory).progress
        except CheckpointError:  # damaged: reported when the run resumes
            continue
        if stale := undone_by(progress, rollbacks):
            fault_point("rollback.aside", progress.step)
            set_aside(directory, f"{ROLLED_BACK}{stale[0]['number']:04d}-")
    left = published_checkpoints(checkpoints)
    if left:
        with contextlib.suppress(OSError):  # the next save reports it
            point_to(left[-1])


def undone_by(progress: Progress, rollbacks: list[Rollback]) -> list[Rollback]:
    """Return the rollbacks that undo a checkpoint and were recorded after it was saved."""
    return [
        entry
        for entry in rollbacks
        if entry["number"] > progress.rollbacks and entry["to_step"] < progress.step
    ]


def remove_older(run_dir: Path, number: int) -> None:
    """Delete the checkpoints that earlier rollbacks set aside."""
    for rollback, directory in rolled_back_checkpoints(RunFiles(run_dir).checkpoints):
        if rollback < number:
            shutil.rmtree(directory, ignore_errors=True)  # the next rollback tries again


def with_rollbacks(progress: Progress, rollbacks: list[Rollback]) -> Progress:
    """Return a checkpoint's progress, updated with the effects of later rollbacks.

    Args:
        rollbacks: all rollbacks of the run; those recorded before the checkpoint was saved have no
            effect.
    """
    for entry in rollbacks:
        if entry["number"] > progress.rollbacks:
            progress = replace(
                progress,
                rollbacks=entry["number"],
                skipped_steps=entry["skipped_steps"],
                spikes=entry["spikes"],
                skipped_windows=merge_ranges(
                    [*progress.skipped_windows, *entry["skipped_windows"]]
                ),
                history={**progress.history, "anomalies": []},
            )
    return progress
