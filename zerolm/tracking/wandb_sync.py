"""`zerolm wandb-sync RUN`: send a run directory to W&B, regardless of what W&B already has.

One W&B run receives metrics.jsonl, references to the checkpoints, and the samples. The rows
discarded by each rollback become a separate W&B run in the same group. The run may still be in
progress.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from zerolm.common.errors import ConfigError, ZerolmError, reason
from zerolm.common.locks import FileLock, LockTaken
from zerolm.common.records import open_regular, read_record, unreadable
from zerolm.run_dir.files import TRACKER_STATE, RunFiles, rollback_name
from zerolm.run_dir.jsonl import EventRow, MetricsRow, SampleRow
from zerolm.run_dir.records import read_run_json
from zerolm.tracking import wandb_environment
from zerolm.tracking.mirror import Tail
from zerolm.tracking.wandb import WandbTracker, close, new_id
from zerolm.tracking.wandb_identity import (
    Identity,
    TrackerState,
    has_key,
    identity,
    resolve_mode,
)


def wandb_sync(
    run_dir: Path,
    *,
    mode: str = "auto",
    project: str | None = None,
    entity: str | None = None,
    same_id: bool = False,
    log: Callable[[str], object] = print,
) -> list[str]:
    """Send the current content of a run directory to W&B.

    Args:
        project: W&B project; None means the run's project.
        entity: W&B user or team; None means the run's entity.
        same_id: overwrite the run's own W&B run instead of creating a new one.
        log: called with one line for each W&B run.

    Returns:
        The ids of the W&B runs.
    """
    files = RunFiles(run_dir)
    record = read_run_json(run_dir)
    if mode == "online" and not has_key():
        raise ConfigError(
            "--mode: online, but no key is configured. Run wandb login, set WANDB_API_KEY, or use "
            "--mode offline."
        )
    record, notes = _named(record, {"wandb_project": project, "wandb_entity": entity}, mode)
    for note in notes:
        log(f"note: {note}")
    run_id = _id_in_use(files) if same_id else new_id()
    parts = [("", files.metrics)]
    parts += [(f"-{rollback_name(path)}", path) for path in files.all_archived_metrics()]
    for path in (*(path for _, path in parts), files.events, files.samples):
        try:  # so file errors are not reported as W&B errors
            if (file := open_regular(path)) is not None:
                file.close()
        except OSError as error:
            raise ConfigError(unreadable(path, error, "Restore it.")) from None
    ids = []
    for suffix, path in parts:
        one = identity(files.run_dir, record, suffix)
        one = replace(one, mode=resolve_mode(mode))
        ids.append(run_id + suffix)
        if one.mode == "online":
            log(f"{path}: connecting to W&B")
        try:
            log(_send(files, path, one, ids[-1], everything=not suffix))
        except Exception as error:  # network, key or disk; W&B raises many classes
            close()
            raise ZerolmError(
                f"{path}: W&B did not accept the data: {reason(error, named=False)}. Try again, or "
                "write the data to the run directory with --mode offline."
            ) from error
    return ids


def _named(
    record: dict[str, Any], given: Mapping[str, str | None], mode: str
) -> tuple[dict[str, Any], list[str]]:
    """Return run.json with the names to use, and notices of variables without effect.

    A name is the flag's, else the one chosen for the run, else the environment's.
    """
    used = {
        name: (f"environment: {variable}", os.environ[variable])
        for name, variables in reversed(wandb_environment.NAMES.items())
        for variable in reversed(variables)
        if os.environ.get(variable)
    }
    chosen = wandb_environment.chosen_names(record)
    used |= {name: (f"run.json: settings.{name}", value) for name, value in chosen.items()}
    used |= {name: (f"--{name[6:]}", value) for name, value in given.items() if value}
    mode = resolve_mode(mode)
    problems = wandb_environment.name_problems(used)
    if problems := problems + wandb_environment.variable_problems(os.environ, mode):
        raise ConfigError(problems)
    values = {name: value for name, (_, value) in used.items()}
    renamed = {**record, "settings": record.get("settings", {}) | values}
    return renamed, wandb_environment.notices(os.environ, used, mode)


def _id_in_use(files: RunFiles) -> str:
    """Return the id of the run's own W&B run."""
    path = files.tracker("wandb") / TRACKER_STATE
    state = read_record(path, TrackerState)
    if state is None:
        raise ConfigError(f"--same_id: {path} is missing: the run has no W&B run yet.")
    try:
        FileLock(files.tracker_lock("wandb")).release()
    except LockTaken as error:
        raise ConfigError(
            f"--same_id: {files.run_dir} is still running and writes to this W&B run. Wait until "
            "the run has ended, or omit --same_id."
        ) from error
    return state["id"]


def _send(files: RunFiles, metrics: Path, one: Identity, run_id: str, everything: bool) -> str:
    """Send a metrics file as one W&B run; return a line that describes the W&B run.

    Args:
        everything: also send samples and events.
    """
    os.environ["WANDB_MODE"] = one.mode
    tracker = WandbTracker(files.run_dir, separate=one, separate_id=run_id)
    tracker.open()
    rows = Tail(metrics, MetricsRow).read()
    if everything:
        tracker.samples(Tail(files.samples, SampleRow).read())
    for row in rows:
        if tracker.lacks(row):
            tracker.log(row)
    if everything:
        for event in Tail(files.events, EventRow).read():
            tracker.event(event)
    tracker.finish(0)
    return f"{one.name} ({run_id}): {len(rows)} rows of {metrics.name}, {tracker.where}"
