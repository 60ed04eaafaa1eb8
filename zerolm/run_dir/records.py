"""The types of run.json and rollbacks.json, and functions that read these files.

`zerolm.train.run_directory` and `zerolm.checkpoint.rollback` write them.
"""

from pathlib import Path
from typing import Any, TypedDict

from zerolm.common.errors import ConfigError
from zerolm.common.records import Count, Range, read_record
from zerolm.run_dir.files import RunFiles

OLD_VALUE = "Give the old value to resume the run"  # in every message that refuses a changed value
FIX = "Restore it from a copy, or choose another --run_dir."


class RecordedSettings(TypedDict, total=False):
    """Settings that are read without the checks of the command line. All others may have any
    type.
    """

    data: list[str]
    val_data: list[str]
    run_dir: str | None
    report_interval: float | None
    upload_to: str | None
    wandb: str | None
    wandb_project: str | None
    wandb_entity: str | None
    wandb_group: str | None
    wandb_name: str | None
    wandb_tags: str | None


class _Mixture(TypedDict, total=False):
    stages: list[tuple[Count, list[float]] | tuple[Count, list[float], list[Count]]]


class _Source(TypedDict):
    given: str
    source: str
    hub_id: str
    digest: str
    about: str
    vocab_size: Count


class InitialWeightsRecord(_Source, total=False):
    """The record of a run's `--init_from` source: fields of `InitialSource`."""

    generation: dict[str, Any]
    parametrization: dict[str, Any]


class _BranchPoint(TypedDict):
    run: str
    step: Count
    tokens: Count
    digest: str


class BranchRecord(_BranchPoint, total=False):
    """Where a run with `--branch` started: a checkpoint of another run, the trunk.

    `run` is the trunk's directory, and `digest` identifies the checkpoint. `changes` lists changes
    that affect the loss curve, as {setting: [old, new]}. `data` and `mixture_temperature` are the
    values that the user gave, if they became a data blend. `branch` is the trunk's record, if
    the trunk is also a branch.
    """

    changes: dict[str, Any]
    data: list[str]
    mixture_temperature: float | None
    branch: dict[str, Any]


class RunJson(TypedDict, total=False):
    """The content of run.json. Any key may be absent, because early releases wrote fewer keys."""

    settings: RecordedSettings
    derived_settings: dict[str, Any]  # the settings that were not set explicitly
    model_config: dict[str, Any]
    ds_config: dict[str, Any]
    data_fingerprint: str
    val_fingerprints: list[str]
    initial_weights: InitialWeightsRecord
    mixture: _Mixture
    world_size: Count
    zero_stage: Count
    versions: dict[str, str]
    model_proof: dict[str, str | None]  # package versions with which the model passed the check
    git_commit: str | None
    derived: dict[str, Any]
    device: str
    working_directory: str  # directory that relative paths in `settings` refer to
    branch: BranchRecord


class _Applied(TypedDict):
    number: Count
    from_step: Count
    to_step: Count
    skipped_windows: list[Range]
    skipped_steps: Count
    spikes: Count


class Rollback(_Applied, total=False):
    """One rollback in rollbacks.json. The keys after `order` are only informative.

    `order` is the data order that `skipped_windows` refers to; absent in early releases.
    """

    order: dict[str, Any]
    checkpoint: str
    first_anomaly: Count
    skipped_window: Range
    reason: str


class _Rollbacks(TypedDict):
    rollbacks: list[Rollback]


def find_run_json(run_dir: str | Path) -> dict[str, Any] | None:
    """Return the content of run.json; None if it does not exist.

    Raises:
        RecordError: the file is damaged.
    """
    record = read_record(RunFiles(run_dir).record, RunJson, FIX)
    return None if record is None else dict(record)


def read_run_json(run_dir: str | Path) -> dict[str, Any]:
    """Return the content of run.json.

    Raises:
        ConfigError: the file is missing or damaged.
    """
    record = find_run_json(run_dir)
    if record is None:
        path = RunFiles(run_dir).record
        raise ConfigError(f"{path}: no such file. Name the --run_dir of a run that has started.")
    return record


def read_rollbacks(run_dir: str | Path) -> list[Rollback]:
    """Return a run's rollbacks, oldest first, or an empty list if there is no rollbacks.json.

    Raises:
        RecordError: the file is damaged. Without the file the run would read skipped data again.
    """
    found = read_record(RunFiles(run_dir).rollbacks, _Rollbacks)
    return found["rollbacks"] if found is not None else []


def ancestors(branch: object) -> list[tuple[str, int]]:
    """Return the name of each run that a run descends from and the step where it branched off.

    The nearest run is first.

    Args:
        branch: the `branch` entry of run.json, possibly damaged.
    """
    found = []
    while isinstance(branch, dict):
        step = branch.get("step")
        name = Path(str(branch.get("run", "?"))).name
        found.append((name, step if isinstance(step, int) else 0))
        branch = branch.get("branch")
    return found


def lineage(branch: object) -> str:
    """Return a description of the runs that a run descends from: `b at step 40, of a at step
    20`.
    """
    return ", of ".join(f"{name} at step {step:,}" for name, step in ancestors(branch))
