"""Check that the run directory is writable, the disk is large enough, and the run can be resumed.

Compares the plan with run.json (by `run_record`) and with the newest checkpoint (by `topology`).
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from zerolm.checkpoint import directory, rollback
from zerolm.checkpoint.directory import Checkpoint
from zerolm.common import machine
from zerolm.common.errors import CheckpointError, Findings, RecordError
from zerolm.common.files import exists, is_dir, is_file
from zerolm.common.records import open_regular, unreadable
from zerolm.common.values import shown_bytes
from zerolm.config.settings import Settings
from zerolm.data import skips
from zerolm.data.quotas import MAX_SEQUENCES
from zerolm.ds_config import topology
from zerolm.ds_config.precision import Begun
from zerolm.ds_config.profile import Profile, block
from zerolm.evaluate import OUTCOMES
from zerolm.plan import memory
from zerolm.plan.plan import Plan
from zerolm.preflight import branch, run_record
from zerolm.preflight.host import checkpoint_room
from zerolm.run_dir.files import MANIFEST, RunFiles, checkpoint_directories
from zerolm.run_dir.records import find_run_json, read_rollbacks
from zerolm.upload.rules import stored_record, upload_problems

Changed = dict[str, tuple[Any, Any]]


class ExistingRun(NamedTuple):
    """Result of comparing the plan with the run in its directory or store.

    Attributes:
        resumes: whether there is a checkpoint to resume from.
        changed: {key: (old, new)} for changed values that affect the loss curve.
        start: where the branch starts; None if the run is not a branch.
    """

    resumes: bool
    changed: Changed
    start: branch.Start | None = None


NO_RUN = ExistingRun(False, {})
# Files that never occur in a run directory, and the kind of directory that contains them.
NOT_A_RUN = {
    "manifest.json": "directory of token shards",
    "config.json": "model directory",
    "tokenizer.json": "tokenizer directory",
}


def directory_problems(settings: Settings) -> list[str]:
    """Check that the run directory is writable and the store's URL is valid.

    Local rank 0 on each host tries to write; on NFS this creates and removes a file.
    """
    if settings.run_dir is None:  # already reported as missing
        return []
    first = os.environ.get("LOCAL_RANK", "0") == "0"
    problem = machine.write_problem(settings.run_dir) if first else None
    problem = problem or _occupied(Path(settings.run_dir))
    if problem:
        return [f"{settings.where('run_dir')}: {settings.run_dir}: {problem}"]
    return upload_problems(settings) + _wrong_kinds(Path(settings.run_dir))


def _wrong_kinds(run_dir: Path) -> list[str]:
    """Return a problem for each path whose type is wrong: not a regular file, or not a
    directory.
    """
    files = RunFiles(run_dir)
    written = [*files.record_files(OUTCOMES), files.evaluation_begun, files.report, files.lock]
    problems = []
    for path in written:
        try:
            open_regular(path)
        except OSError as error:
            problems.append(unreadable(path, error, "Remove or restore it."))
    problems += [
        f"{path}: is not a directory. Remove it."
        for path in (files.checkpoints, files.ranks)
        if os.path.lexists(path) and not is_dir(path)
    ]
    return problems


def _occupied(run_dir: Path) -> str | None:
    """Return the problem if a directory is in use for something other than a run, else None."""
    for name, what in NOT_A_RUN.items():
        if is_file(run_dir / name) and not exists(RunFiles(run_dir).record):
            return f"is a {what}: it has {name}. Choose another directory, for example runs/first."
    return None


def begun(settings: Settings, start: branch.Start | None) -> Begun | None:
    """Return the precision of the run that is resumed or branched from; None for a new run.

    Only local files are read, so a run restored from a store must be started with the same
    precision.
    """
    path = RunFiles(settings.run_dir or "").record
    try:
        record: Mapping[str, Any] | None
        record = find_run_json(settings.run_dir) if settings.run_dir else None
    except RecordError:
        return None  # reported when the run directory is checked
    if record is None and start is not None:
        path, record = Path(start.trunk_record), start.trunk
    if record is None or not (json := block(record, "ds_config")):
        return None
    return Begun(str(path), Profile.parse(json).precision, str(record.get("device", "")))


def compare(
    plan: Plan, environment: Mapping[str, str], found: Findings, start: branch.Start | None = None
) -> ExistingRun:
    """Compare a plan with the existing run in its directory or store, or with a new branch's trunk.

    Only rank 0 reads the store.
    """
    settings, run_dir = plan.settings, plan.run_dir
    linked = start.checkpoint if start is not None else None
    _check_disk(plan, found, linked)
    first = environment.get("RANK", "0") == "0"
    stored = stored_record(settings, found.problems) if first else None
    resumes = stored is not None or bool(checkpoint_directories(RunFiles(run_dir).checkpoints))
    where, record = stored or _record_of(run_dir, found)
    if record is None and start is not None and start.trunk is not None:
        fixed = _fixed_sequences(settings, run_dir, found, linked)
        start = branch.differ(start, plan, run_record.differences(start.trunk, plan, fixed), found)
        _check_checkpoint(plan, found, linked)
        return ExistingRun(resumes, {}, start)
    if record is None:
        return ExistingRun(resumes, {}, start)
    fixed = _fixed_sequences(settings, run_dir, found, linked)
    differences = run_record.differences(record, plan, fixed)
    accepted = settings.accept_changes
    found.problems += run_record.problems(differences, where, accepted=accepted)
    found.notices += [f"changed since {where}: {one}" for one in differences if accepted]
    _check_checkpoint(plan, found, linked)
    return ExistingRun(resumes, {one.key: (one.old, one.new) for one in differences}, start)


def _check_disk(plan: Plan, found: Findings, linked: Checkpoint | None) -> None:
    """Report a problem if no checkpoint fits on the disk, and a notice if only some fit.

    Args:
        linked: the checkpoint that a branch starts from, which is copied if it is on another file
            system.
    """
    settings = plan.settings
    kept = settings.kept_bytes()
    size = memory.checkpoint_bytes(
        plan.model.shapes, plan.ds, kept_bytes=kept, experts=plan.layout.experts
    )
    free, required = checkpoint_room(plan.run_dir, size, settings.checkpoint_keep)
    copied = linked is not None and not machine.same_file_system(linked.directory, plan.run_dir)
    if linked is not None and copied and free >= 0:
        free = max(0, free - linked.size_bytes)
    if free < 0 or plan.device == "absent":
        return
    where = f"{settings.where('run_dir')}: {plan.run_dir}"
    has = f"its file system has {shown_bytes(free)} free"
    if free < size:
        found.problems.append(
            f"{where}: {has}, but a checkpoint needs about {shown_bytes(size)}. Free some space, "
            f"or choose another directory."
        )
    elif free < required:
        found.notices.append(
            f"{where}: {has}, but --checkpoint_keep {settings.checkpoint_keep} needs "
            f"about {shown_bytes(required)} more"
        )


def _record_of(run_dir: Path, found: Findings) -> tuple[str, Mapping[str, Any] | None]:
    """Return the path of run.json and its content, which is None if absent or unreadable."""
    path = str(RunFiles(run_dir).record)
    try:
        return path, find_run_json(run_dir)
    except RecordError as error:
        found.problems += error.problems
        return path, None


def _fixed_sequences(
    settings: Settings, run_dir: Path, found: Findings, linked: Checkpoint | None
) -> int:
    """Return the sequence number below which the data order must not change."""
    try:
        rollbacks = read_rollbacks(run_dir)
        newest = linked or directory.newest(run_dir)
    except RecordError as error:
        found.problems += error.problems
        return MAX_SEQUENCES
    except CheckpointError:
        return MAX_SEQUENCES  # reported when the run starts; it may resume from an older one
    if newest is None:  # a store may contain checkpoints; otherwise only the first mixture is fixed
        return MAX_SEQUENCES if settings.upload_to else 1
    progress = rollback.with_rollbacks(newest.progress, rollbacks)
    return skips.used_sequences_end(progress.position, progress.skipped_windows)


def _check_checkpoint(plan: Plan, found: Findings, linked: Checkpoint | None) -> None:
    """Report whether the newest checkpoint needs resharding, and refuse it if it cannot be
    resharded.
    """
    try:
        newest = linked or directory.newest(plan.run_dir)
    except CheckpointError:
        return  # reported when the run starts; it may resume from an older one
    if newest is None:
        return
    changes = plan.resharded(newest.manifest)
    if changes:
        where = str(newest.directory / MANIFEST)
        found.problems += topology.problems(newest.manifest, where, plan.ds)
        found.notices.append(
            f"{newest.directory.name} was written for another topology; its states will be "
            f"resharded: {', '.join(changes)}"
        )
