"""What the run directory says: may this command write there, is there room, and which run does it
go on with? run_record.py compares the two, topology.py what a resume cuts anew.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from zerolm import (
    checkpoint_directory,
    ds_config,
    machine,
    memory,
    resources,
    rollback,
    run_record,
    skipped,
    topology,
)
from zerolm.errors import CheckpointError, ConfigError, Findings
from zerolm.host_rules import Host
from zerolm.inputs import Inputs
from zerolm.mixture import Mixture
from zerolm.model_rules import has_router_loss
from zerolm.order import MAX_SEQUENCES
from zerolm.packing import data_fingerprint
from zerolm.resolution import resolved_ds_config
from zerolm.settings import Settings
from zerolm.upload_rules import stored_record, upload_problems
from zerolm.values import read_json, shown_bytes

Changed = dict[str, tuple[Any, Any]]


class Earlier(NamedTuple):
    """What is known of the run that this one goes on with.

    Attributes:
        resumes: whether there is one that has begun.
        changed: old and new of each setting of the curve that differs.
    """

    resumes: bool
    changed: Changed


def look(
    settings: Settings,
    inputs: Inputs,
    host: Host,
    mixture: Mixture | None,
    environment: Mapping[str, str],
    found: Findings,
) -> Earlier:
    """Look at the run directory, and at the store of its checkpoints.

    Args:
        settings: resolved; compared only where `found` has no problem so far.
        environment: of the launcher.
    """
    if settings.run_dir is None:
        return Earlier(False, {})
    problem = machine.unwritable(settings.run_dir)
    if problem:
        found.problems.append(f"{settings.where('run_dir')}: {settings.run_dir}, {problem}")
        return Earlier(False, {})
    found.problems += upload_problems(settings)
    if found.problems:
        return Earlier(False, {})
    _check_disk(settings, inputs, host, found)
    run_dir, first = Path(settings.run_dir), environment.get("RANK", "0") == "0"
    stored = stored_record(settings, found.problems) if first else None
    resumes = stored is not None or any((run_dir / "checkpoints").glob("step-*"))
    where, record = stored or _record_of(run_dir, found)
    if record is None:
        return Earlier(resumes, {})
    differences = _differences(record, settings, inputs, host, mixture)
    accepted = settings.accept_changes
    found.problems += run_record.problems(differences, where, accepted=accepted)
    found.notices += [f"changed since {where}: {one}" for one in differences if accepted]
    _look_at_checkpoint(settings, inputs, host, found)
    return Earlier(resumes, {one.key: (one.old, one.new) for one in differences})


def _check_disk(settings: Settings, inputs: Inputs, host: Host, found: Findings) -> None:
    """Compare the checkpoints to come with the free space."""
    assert inputs.model is not None and settings.run_dir is not None
    size = memory.checkpoint_bytes(inputs.model.shapes, inputs.profile.ds_config)
    free, wanted = resources.checkpoint_room(settings.run_dir, size, settings.checkpoint_keep)
    if free < 0 or host.device.kind == "absent":
        return
    where = f"{settings.where('run_dir')}: {settings.run_dir}"
    has = f"its file system has {shown_bytes(free)} free"
    if free < size:
        found.problems.append(
            f"{where}, {has}, a checkpoint needs about {shown_bytes(size)}. Free some, or "
            f"choose another directory."
        )
    elif free < wanted:
        found.notices.append(
            f"{where}: {has}, but --checkpoint_keep {settings.checkpoint_keep} needs "
            f"about {shown_bytes(wanted)} more"
        )


def _record_of(run_dir: Path, found: Findings) -> tuple[str, Mapping[str, Any] | None]:
    """Return the path of run.json and what it says, None where there is none that can be read."""
    path = run_dir / "run.json"
    if not path.is_file():
        return str(path), None
    try:
        return str(path), read_json(path, "a --run_dir that a run has made, or a new one")
    except ConfigError as error:
        found.problems += error.problems
        return str(path), None


def _differences(
    record: Mapping[str, Any],
    settings: Settings,
    inputs: Inputs,
    host: Host,
    mixture: Mixture | None,
) -> list[run_record.Difference]:
    """Compare what shapes the curve with what run.json has of it."""
    assert inputs.model is not None and mixture is not None, "inputs without problems"
    config = inputs.model.config
    return run_record.differences(
        record,
        settings,
        model_config=config.to_diff_dict(),
        ds_config=resolved_ds_config(settings, inputs, host),
        data_fingerprint=data_fingerprint(
            inputs.sources.training, settings.seq_len, settings.packing
        ),
        stages=mixture.stages,
        begun=_begun(settings),
        world_size=host.world_size,
        router_loss=has_router_loss(config),
    )


def _begun(settings: Settings) -> int:
    """Return the sequence number up to which the run's order must stay what it was."""
    run_dir = Path(settings.run_dir or "")
    try:
        newest = checkpoint_directory.newest(run_dir)
        done = rollback.entries(run_dir)
    except (CheckpointError, ConfigError):
        return MAX_SEQUENCES  # named when the run begins, which may go on from an older one
    if newest is None:  # of a store it may have more; the first weights stay in any case
        return MAX_SEQUENCES if settings.upload_to else 1
    progress = rollback.carried_over(newest.progress, done)
    return max(1, skipped.reached(progress.position, progress.skipped_windows))


def _look_at_checkpoint(settings: Settings, inputs: Inputs, host: Host, found: Findings) -> None:
    """Say what a resume will cut anew, and refuse what it cannot."""
    try:
        newest = checkpoint_directory.newest(Path(settings.run_dir or ""))
    except CheckpointError:
        return  # named when the run begins, which may go on from an older one
    if newest is None:
        return
    resolved = resolved_ds_config(settings, inputs, host)
    changes = topology.changes(
        newest.manifest,
        world_size=host.world_size,
        zero_stage=ds_config.zero_stage(resolved),
        ds_config=resolved,
    )
    if changes:
        where = str(newest.directory / checkpoint_directory.MANIFEST)
        found.problems += topology.problems(newest.manifest, where, resolved)
        found.notices.append(
            f"{newest.directory.name} was cut for another topology, its states will be cut "
            f"anew: {', '.join(changes)}"
        )
