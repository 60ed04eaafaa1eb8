"""`--branch`: find the checkpoint that a run starts from, and derive its settings.

A branch starts from a checkpoint of another run, the trunk. It inherits the trunk's settings, which
flags override. `zerolm.checkpoint.branch` later links the checkpoint into the run directory. From
then on the branch no longer needs the trunk. Must not write.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from zerolm.checkpoint.directory import Checkpoint, locate
from zerolm.common.errors import CheckpointError, ConfigError, Findings, RecordError
from zerolm.config.settings import Settings
from zerolm.ds_config.profile import Profile, block
from zerolm.optim.schedule import SCHEDULES, LearningRate
from zerolm.plan.plan import Plan
from zerolm.preflight import initial_weights
from zerolm.preflight.branched_data import with_mixture, without
from zerolm.preflight.run_record import Difference
from zerolm.pretrained import source_config
from zerolm.run_dir.files import RunFiles, run_of, traces_of_checkpoints
from zerolm.run_dir.records import (
    BranchRecord,
    find_run_json,
    read_rollbacks,
    read_run_json,
)


@dataclass(frozen=True)
class Start:
    """Where a branch starts.

    Attributes:
        record: the `branch` entry in run.json.
        checkpoint: the trunk's checkpoint; None if the branch already has its own.
        trunk: content of the trunk's run.json; None if the branch already has its own.
    """

    record: BranchRecord
    checkpoint: Checkpoint | None = None
    trunk: Mapping[str, Any] | None = None

    @property
    def trunk_record(self) -> str:
        """Path of the trunk's run.json."""
        return str(RunFiles(self.record["run"]).record)


def find(settings: Settings, found: Findings) -> tuple[Settings, Start | None]:
    """Return the run's settings and, if the run is a branch, where it starts; otherwise None."""
    own, files = None, RunFiles(settings.run_dir or "")
    if settings.run_dir is not None:
        try:
            own = find_run_json(settings.run_dir)
        except RecordError:
            return settings, None  # reported when the run directory is checked
    where = f"{settings.where('branch')}: {settings.branch}"
    try:
        if own is not None and "branch" in own:
            return _resume(settings, own, where)
        if settings.branch is None:
            return settings, None
        trunk = run_of(settings.branch)[0].resolve()
        if settings.run_dir is not None and Path(settings.run_dir).resolve() == trunk:
            raise ConfigError(f"{where} is the --run_dir itself. Choose another --run_dir.")
        if not RunFiles(run_of(settings.branch)[0]).record.is_file():
            return settings, None  # reported when the settings are parsed
        if own is not None or (settings.run_dir and traces_of_checkpoints(files.checkpoints)):
            raise ConfigError(
                f"{where}, but --run_dir {settings.run_dir} contains a run that did not start "
                "there. Choose another --run_dir, or remove --branch to resume that run."
            )
        return _begin(settings, where)
    except ConfigError as error:
        found.problems += error.problems
        return settings, None


def _resume(settings: Settings, own: Mapping[str, Any], where: str) -> tuple[Settings, Start]:
    """Return the settings and starting point of a branch whose run directory already exists."""
    record: BranchRecord = own["branch"]
    if settings.branch is not None:
        path, step = run_of(settings.branch)
        if str(path.resolve()) != record["run"] or step not in (None, record["step"]):
            raise ConfigError(
                f"{where}, but the run in --run_dir {settings.run_dir} began from step "
                f"{record['step']} of {record['run']}. Choose another --run_dir, or remove "
                f"--branch to resume that run."
            )
    recorded = block(own, "settings")
    same_data = list(settings.data) in (record.get("data"), recorded.get("data"))
    temperatures = (None, record.get("mixture_temperature"))
    if "data" in record and same_data and settings.mixture_temperature in temperatures:
        settings = replace(  # the given data has become a data blend
            settings,
            data=tuple(recorded["data"]),
            data_stage=tuple(recorded["data_stage"]),
            mixture_temperature=None,
        )
    settings = replace(settings, branch=recorded.get("branch", settings.branch))
    if traces_of_checkpoints(RunFiles(settings.run_dir or "").checkpoints):
        return settings, Start(record)
    checkpoint = _checkpoint(f"{record['run']}@{record['step']}", where)
    if checkpoint.digest != record["digest"]:
        raise ConfigError(
            f"{where}: {checkpoint.directory} is not the checkpoint that the run in --run_dir "
            f"{settings.run_dir} should start from: it has been rewritten since. That run has no "
            "checkpoint, so remove its directory, or choose another."
        )
    return settings, Start(record, checkpoint)


def _begin(settings: Settings, where: str) -> tuple[Settings, Start]:
    """Derive a new branch's settings from its trunk; return them and the branch's starting
    point.
    """
    assert settings.branch is not None
    run_dir, _ = run_of(settings.branch)
    checkpoint = _checkpoint(settings.branch, where)
    progress = checkpoint.progress
    trunk = read_run_json(run_dir)
    record: BranchRecord = {
        "run": str(run_dir.resolve()),
        "step": progress.step,
        "tokens": progress.tokens,
        "digest": checkpoint.digest,
    }
    if "branch" in trunk:
        record["branch"] = trunk["branch"]
    settings = _with_schedule(settings, trunk, progress.tokens, where)
    given = settings
    settings = with_mixture(settings, trunk, checkpoint, where)
    if (settings.data, settings.data_stage) != (given.data, given.data_stage):
        record["data"] = list(given.data)
        record["mixture_temperature"] = given.mixture_temperature
    group = (
        settings.wandb_group or block(trunk, "settings").get("wandb_name") or run_dir.resolve().name
    )
    settings = replace(settings, branch=f"{run_dir}@{progress.step}", wandb_group=group)
    return settings, Start(record, checkpoint, trunk)


def _checkpoint(reference: str, where: str) -> Checkpoint:
    """Return the checkpoint named by a reference, RUN[@STEP]."""
    try:
        found = locate(reference)
    except CheckpointError as error:
        named = f"{reference}: ", f"{run_of(reference)[0]}: "  # `where` names it already
        problems = [one.removeprefix(named[0]).removeprefix(named[1]) for one in error.problems]
        raise ConfigError([f"{where}: {problem}" for problem in problems]) from None
    for entry in read_rollbacks(found.directory.parents[1]):
        if entry["number"] > found.progress.rollbacks and entry["to_step"] < found.progress.step:
            raise ConfigError(
                f"{where}: {found.directory.name} was rolled back. Choose a checkpoint from step "
                f"{entry['to_step']} or earlier."
            )
    return found


def _with_schedule(
    settings: Settings, trunk: Mapping[str, Any], tokens: int, where: str
) -> Settings:
    """Return the settings; if the budget or schedule changes, the decay starts at the branch point.

    Other values that the trunk derived from its budget do not change: warm-up, ramp, peak,
    intervals.
    """
    total, kind = settings.total_tokens, settings.schedule
    if total is not None and total <= tokens:
        raise ConfigError(
            f"{settings.where('total_tokens')}: {total} must exceed the {tokens} tokens that "
            f"--branch {settings.branch} has been trained on. Give a larger number, or branch from "
            "an earlier step."
        )
    if kind is None or total is None:
        return settings
    if "decay_tokens" in settings.explicit - settings.inherited:
        return settings
    if not SCHEDULES[kind].uses_decay_tokens:
        return without(settings, "decay_tokens")
    old = block(trunk, "settings")
    decay: int | None = total - max(tokens, settings.warmup_tokens or 0)
    if (total, kind) == (old.get("total_tokens"), old.get("schedule")):
        decay = old.get("decay_tokens")
    if decay == settings.decay_tokens:
        return settings
    settings = without(settings, "decay_tokens")
    origins = {**settings.origins, "decay_tokens": f"{where}: decay_tokens"}
    return replace(settings, decay_tokens=decay, origins=origins)


# ---- With the plan


def differ(start: Start, plan: Plan, differences: Sequence[Difference], found: Findings) -> Start:
    """Report how a branch differs from its trunk; return `start` with the differences in its
    record.

    Args:
        differences: how the plan differs from the trunk's run.json.
    """
    where, moved = start.trunk_record, False
    for one in differences:
        if source_config.is_position(one.key):
            moved = True
        elif one.obstacle:
            found.problems.append(
                f"{where}: {one} ({one.where}), which a branch cannot change: {one.obstacle}. Give "
                f"the old value."
            )
        else:
            found.notices.append(f"differs from the trunk, {where}: {one}")
    if moved:
        old = initial_weights.config_of(block(start.trunk or {}, "model_config"))
        given = plan.settings.model_config or where
        compared = source_config.compare_positions(plan.model.config, given, old, where)
        found.problems += compared.problems
        found.notices += compared.notices
    found.notices += _length_notices(start, plan) + _rate_notices(start, plan)
    changes = {one.key: [one.old, one.new] for one in differences}
    return replace(start, record={**start.record, "changes": changes})


def _length_notices(start: Start, plan: Plan) -> list[str]:
    """Return a notice that explains how a new sequence length affects the data order."""
    old, new = block(start.trunk or {}, "settings").get("seq_len"), plan.settings.seq_len
    if old == new:
        return []
    about = "all data is reordered, so text that the trunk has read may be read again"
    if any(blend.consumed for blend in plan.mixture.blends):
        about = "only sequences that the trunk has not read; each source loses less than one"
    return [f"--branch: sequences of {new} tokens instead of {old}: {about}"]


def _rate_notices(start: Start, plan: Plan) -> list[str]:
    """Return notices if the trunk's decay had already begun or the learning rate would jump."""
    trunk, tokens = start.trunk or {}, start.record["tokens"]
    values = block(trunk, "settings")
    kind, has = values.get("schedule"), values.get
    if kind not in SCHEDULES or plan.learning_rate is None:
        return []
    if Profile.parse(block(trunk, "ds_config")).scheduler:
        return []
    names = ("learning_rate", "min_learning_rate", "warmup_tokens", "decay_tokens", "total_tokens")
    curve = LearningRate(kind, *(has(name) or 0 for name in names))
    notices = []
    decay_start = max(curve.warmup_tokens, curve.total_tokens - curve.decay_tokens)
    if SCHEDULES[kind].uses_decay_tokens and tokens > decay_start:
        notices.append(
            f"--branch: the trunk's decay began at {decay_start:,} tokens, before the branch point "
            f"at {tokens:,}"
        )
    before, after = curve(tokens), plan.learning_rate(tokens)
    if before != after:
        notices.append(
            f"--branch: the learning rate jumps at the branch point, from {before:.4g} to "
            f"{after:.4g}"
        )
    return notices
