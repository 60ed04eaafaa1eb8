"""Read a run's inputs (model config, DeepSpeed JSON, token shards), and check each separately.
`zerolm.preflight.check` and `zerolm.plan.resolve` check whether they fit together.


"""

import contextlib
from dataclasses import dataclass, replace
from pathlib import Path

from zerolm.common.errors import ConfigError, Findings
from zerolm.common.records import read_json
from zerolm.common.shipped import find_config, shipped_notice
from zerolm.common.values import shown
from zerolm.config.settings import Settings
from zerolm.data.sources import Sources, open_sources
from zerolm.ds_config import host as ds_host
from zerolm.ds_config.precision import Begun, with_precision
from zerolm.ds_config.profile import AUTO, Profile
from zerolm.ds_config.rules import rule_notices, rule_problems
from zerolm.ds_config.shard_groups import with_shard_groups
from zerolm.model.model import Model
from zerolm.preflight import initial_weights
from zerolm.preflight.host import Host
from zerolm.pretrained.initial_source import InitialSource
from zerolm.run_dir.files import RunFiles
from zerolm.shards import cache_budget

DEEPSPEED_KEYS = {  # every DeepSpeed JSON has some of these keys; no model config has any
    "bf16", "fp16", "gradient_accumulation_steps", "gradient_clipping", "optimizer", "scheduler",
    "train_batch_size", "train_micro_batch_size_per_gpu", "zero_optimization",
}  # fmt: skip
BUCKET_KEYS = (
    "reduce_bucket_size",
    "stage3_prefetch_bucket_size",
    "stage3_param_persistence_threshold",
)


@dataclass(frozen=True)
class Inputs:
    """A run's inputs, except its settings.

    Attributes:
        model: the model; None if its config could not be read.
        initial: existing weights to start from; None if not requested, or refused.
        profile: the unresolved DeepSpeed JSON; empty if it could not be read.
        sources: the sources that could be opened.
        all_sources: whether all sources could be opened.
    """

    model: Model | None
    initial: InitialSource | None
    profile: Profile
    sources: Sources
    all_sources: bool


def read(
    settings: Settings, host: Host, refused: set[str], found: Findings, begun: Begun | None = None
) -> Inputs:
    """Read all inputs; add their problems to `found`.

    Args:
        refused: names of the settings whose values were refused.
        begun: precision of the run that is resumed or branched from; None for a new run.
    """
    named = filter(None, (settings.model_config, settings.deepspeed_config))
    found.notices += filter(None, map(shipped_notice, named))
    if problems := exchanged_problems(settings):
        found.problems += problems
        settings = replace(settings, model_config=None, deepspeed_config=None)
    opened = initial_weights.open_source(settings, found) if settings.init_from else None
    model = _read_model(settings, opened, found)
    profile = _read_profile(settings, host, model, found, begun)
    before = len(found.problems)
    sources = open_sources(settings, found.problems)
    _prepare_caches(sources, settings, found)
    all_sources = len(found.problems) == before and "data" not in refused
    initial = None
    if opened is not None and model is not None:
        every = [*sources.training, *sources.validation]
        model, initial = initial_weights.complete(opened, model, every, settings, found)
    return Inputs(model, initial, profile, sources, all_sources)


def exchanged_problems(settings: Settings) -> list[str]:
    """Return a problem if the model config is actually a DeepSpeed JSON or vice versa.

    Without this check dozens of keys would be reported as unknown.
    """
    model, profile = settings.model_config, settings.deepspeed_config
    is_profile = bool(DEEPSPEED_KEYS & _keys(model)) and "model_type" not in _keys(model)
    is_model = "model_type" in _keys(profile)
    where = {name: settings.where(name) for name in ("model_config", "deepspeed_config")}
    if is_profile and is_model:
        return [
            f"{where['model_config']}: {model} is a DeepSpeed JSON, and --deepspeed_config "
            f"{profile} is a model config. Swap the two."
        ]
    if is_profile:
        return [
            f"{where['model_config']}: {model} is a DeepSpeed JSON. Name the config.json of a "
            f"model: --model_config model_configs/llama-160m.json."
        ]
    if is_model:
        return [
            f"{where['deepspeed_config']}: {profile} is a model config. Name a ZeRO profile: "
            f"--deepspeed_config ds_configs/zero2.json."
        ]
    return []


def _keys(path: str | None) -> set[str]:
    """Return the keys in a JSON file, or an empty set if it cannot be read, which is reported
    later.
    """
    with contextlib.suppress(ConfigError):
        return set(read_json(find_config(path), "")) if path else set()
    return set()


def _read_model(
    settings: Settings, opened: initial_weights.Opened | None, found: Findings
) -> Model | None:
    model = None
    try:
        if settings.model_config is not None:
            model = Model.load(settings.model_config)
            found.notices += model.notices
        if opened is not None:
            model = initial_weights.model_of(opened, model, found)
    except ConfigError as error:
        found.problems += error.problems
        return None
    return model


def _read_profile(
    settings: Settings, host: Host, model: Model | None, found: Findings, begun: Begun | None
) -> Profile:
    path = settings.deepspeed_config
    if path is None:
        return Profile.parse({})
    try:
        profile = Profile.read(path)
    except ConfigError as error:
        found.problems += error.problems
        return Profile.parse({}, path)
    found.problems += profile.problems
    found.problems += _output_problems(profile, settings)
    profile = ds_host.with_nvme_path(profile, settings, found.problems)
    profile, notices = with_precision(profile, settings, host.device, found.problems, begun)
    found.notices += notices
    if host.device.kind != "absent":
        found.problems += ds_host.nvme_problems(profile)
        found.problems += ds_host.kernel_problems(profile, host.device.kind)
    on_gpu, world_size = host.device.is_gpu, host.world_size
    found.problems += rule_problems(profile, on_gpu=on_gpu, world_size=world_size)
    if profile.compute_precision == "bf16" and not host.device.supports_bf16:
        found.problems.append(
            f"{path}: bf16: enabled, but {host.device.name} does not support it{_began_on(begun)}. "
            "Use fp16 (--precision fp16 if the file sets auto), or a newer device."
        )
    profile = with_shard_groups(profile, settings, world_size, found.problems)
    found.notices += rule_notices(profile, on_gpu=on_gpu, world_size=world_size)
    auto = [key for key in BUCKET_KEYS if profile.zero.get(key) == AUTO]
    if auto and model is not None and not model.hidden_size:
        found.problems.append(
            f"{path}: zero_optimization.{auto[0]}: auto, which needs a hidden_size in the model "
            f"config. Give a number."
        )
    return profile


def _began_on(begun: Begun | None) -> str:
    if begun is None or begun.precision != "bf16":
        return ""
    return f", and the run in {begun.path} began in bf16 on {begun.device or 'another device'}"


def _prepare_caches(sources: Sources, settings: Settings, found: Findings) -> None:
    """Allocate the caches of sources in object stores, and report shards without checksums."""
    every = [*sources.training, *sources.validation]
    found.problems += cache_budget.allocate(settings, every)
    found.notices += [
        f"{source.directory} has no block checksums, so training checks the sizes of its files but "
        "not their content. Shards written by this release have block checksums"
        for source in every
        if not source.has_checksums
    ]


def _output_problems(profile: Profile, settings: Settings) -> list[str]:
    """Return a problem if the JSON would make DeepSpeed overwrite a file outside the run
    directory.
    """
    path = profile.block("flops_profiler").get("output_file")
    if not path or settings.run_dir is None:
        return []
    directory = RunFiles(Path(settings.run_dir)).profile
    if isinstance(path, str) and Path(path).resolve().is_relative_to(directory.resolve()):
        return []
    return [
        f"{profile.name}: flops_profiler.output_file: {shown(path)} must be in {directory}: "
        f"DeepSpeed overwrites it. Name a file there, or remove the key to print the profile."
    ]
