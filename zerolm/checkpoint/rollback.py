"""Going back to a checkpoint from before a spike, so that it holds through a crash at any point.

The decision is written to `rollbacks.json` first. From then on `settle`, which is called by the
rollback and by every start of the run, brings the directory to it: checkpoints of the time that was
gone back over are renamed aside, the newest first, and `latest` names what is left. A checkpoint
knows how many rollbacks it has behind it, so one that came after a rollback is never mistaken for
one that came before. Rank 0 alone changes files.
"""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from zerolm.checkpoint.directory import Checkpoint, Progress, by_step, read
from zerolm.common.errors import CheckpointError
from zerolm.common.faults import fault_point
from zerolm.common.files import sync_directory, write_atomically, write_json
from zerolm.common.run_files import ROLLED_BACK, RunFiles
from zerolm.common.values import read_json
from zerolm.data.skips import merge_ranges, sequence_range

Entry = dict[str, Any]


def target(run_dir: Path, first_anomaly: int, margin: int) -> Checkpoint | None:
    """Return the checkpoint to go back to, or None when there is none from before the spike.

    Args:
        first_anomaly: the step with which the spike began.
        margin: how many good steps before it are to be left behind too, if a checkpoint allows it.
    """
    before = []
    for directory in by_step(RunFiles(run_dir).checkpoints):
        try:
            found = read(directory)
        except CheckpointError:  # a damaged one is no way back
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
) -> Entry | None:
    """Return the rollback that leaves a spike behind, or None when no checkpoint is old enough.

    The data from `margin` steps before the first anomaly, or from the checkpoint if that is later,
    to the end of the last batch is left out.

    Args:
        progress: of the run now.
        batch_schedule: position -> sequences of the batch that starts there.
        reason: why the last step was an anomaly.
    """
    found = target(run_dir, first_anomaly, margin)
    if found is None:
        return None
    step, position = found.progress.step, found.progress.position
    while step < first_anomaly - 1 - margin:
        position += batch_schedule(position)
        step += 1
    window = sequence_range(position, progress.position, progress.skipped_windows)
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


def entries(run_dir: Path) -> list[Entry]:
    """Return the rollbacks of a run, oldest first.

    Raises:
        ConfigError: the file cannot be read.
    """
    path = RunFiles(run_dir).rollbacks
    if not path.is_file():
        return []
    return read_json(path, "the rollbacks that a run has recorded")["rollbacks"]


def record(run_dir: Path, entry: Entry) -> None:
    """Make a rollback durable: from here on every start of the run carries it out."""
    write_json(RunFiles(run_dir).rollbacks, {"rollbacks": [*entries(run_dir), entry]})
    fault_point("rollback.recorded", entry["from_step"])


def settle(run_dir: Path) -> None:
    """Set aside the checkpoints that a rollback went back over, and let `latest` name the newest.

    A killed call leaves work that the next one does.
    """
    done = entries(run_dir)
    if not done:
        return
    checkpoints, pointer = RunFiles(run_dir).checkpoints, RunFiles(run_dir).latest
    for directory in reversed(by_step(checkpoints)):
        try:
            progress = read(directory).progress
        except CheckpointError:  # it cannot say; a resume names it
            continue
        stale = [
            entry
            for entry in done
            if entry["number"] > progress.rollbacks and entry["to_step"] < progress.step
        ]
        if stale:
            fault_point("rollback.aside", progress.step)
            number = stale[0]["number"]
            directory.rename(checkpoints / f"{ROLLED_BACK}{number:04d}-{directory.name}")
            sync_directory(checkpoints)
    left = by_step(checkpoints)
    name = f"{left[-1].name}\n" if left else ""
    if left and not (pointer.is_file() and pointer.read_text() == name):
        write_atomically(pointer, name.encode())


def forget(run_dir: Path, number: int) -> None:
    """Remove what rollbacks before this one set aside: no more than one rollback's is kept."""
    for directory in RunFiles(run_dir).checkpoints.glob(f"{ROLLED_BACK}*"):
        if int(directory.name.removeprefix(ROLLED_BACK)[:4]) < number:
            shutil.rmtree(directory)


def carried_over(progress: Progress, done: list[Entry]) -> Progress:
    """Return a checkpoint's progress with what rollbacks since then have left: counts and windows.

    Args:
        done: all rollbacks of the run.
    """
    for entry in done:
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
