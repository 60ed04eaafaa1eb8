"""Read a run's inputs (model config, DeepSpeed JSON, token shards), and check each separately.

`read` needs no rank, and `on_device` then completes the DeepSpeed JSON for one.
`zerolm.preflight.check` and `zerolm.plan.resolve` check whether they fit together.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from zerolm.common.errors import ConfigError, Findings
from zerolm.common.shipped import shipped_notice
from zerolm.common.values import shown
from zerolm.config.settings import Settings
from zerolm.data.sources import Sources, open_sources
from zerolm.ds_config import host as ds_host
from zerolm.ds_config.parallel_rules import group_problems
from zerolm.ds_config.precision import Begun, with_precision
from zerolm.ds_config.profile import AUTO, Profile
from zerolm.ds_config.rules import rule_notices, rule_problems
from zerolm.model.model import Model
from zerolm.preflight import initial_weights, separators
from zerolm.preflight.exchanged import exchanged_problems
from zerolm.preflight.host import Host
from zerolm.pretrained.initial_source import InitialSource
from zerolm.run_dir.files import RunFiles
from zerolm.shards import boundaries, cache_budget

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
        profile: the DeepSpeed JSON as written; None if it could not be read.
        sources: the sources that could be opened.
        all_sources: whether all sources could be opened.
        in_configs, in_data: what was found in the two configs, and in the data and initial weights.
    """

    model: Model | None
    initial: InitialSource | None
    profile: Profile | None
    sources: Sources
    all_sources: bool
    in_configs: Findings
    in_data: Findings


def read(settings: Settings, refused: set[str]) -> Inputs:
    """Read and check all inputs.

    Args:
        refused: names of the settings whose values were refused.
    """
    in_configs, in_data = Findings(), Findings()
    named = filter(None, (settings.model_config, settings.deepspeed_config))
    in_configs.notices += filter(None, map(shipped_notice, named))
    if problems := exchanged_problems(settings):
        in_configs.problems += problems
        settings = replace(settings, model_config=None, deepspeed_config=None)
    opened = initial_weights.open_source(settings, in_configs) if settings.init_from else None
    model = _read_model(settings, opened, in_configs)
    profile = _read_profile(settings, in_configs)
    sources = open_sources(settings, in_data.problems)
    _prepare_caches(sources, settings, in_data)
    all_sources = not in_data.problems and "data" not in refused
    for source in sources.training[:1]:  # all sources have the same tokenizer
        in_data.notices += boundaries.notices(source)
        in_data.notices += separators.config_notices(settings.model_config, source)
    initial = None
    if opened is not None and model is not None:
        every = [*sources.training, *sources.validation]
        model, initial = initial_weights.complete(opened, model, every, settings, in_data)
    return Inputs(model, initial, profile, sources, all_sources, in_configs, in_data)


def _read_model(
    settings: Settings, opened: initial_weights.Opened | None, found: Findings
) -> Model | None:
    model = None
    try:
        if settings.model_config is not None:
            # Ranks and --init_from need the config itself.
            is_plan = settings.check and not settings.init_from
            load = Model.recalled if is_plan else Model.load
            model = load(settings.model_config)
            found.notices += model.notices
        if opened is not None:
            model = initial_weights.model_of(opened, model, found)
    except ConfigError as error:
        found.problems += error.problems
        return None
    return model


def _read_profile(settings: Settings, found: Findings) -> Profile | None:
    if settings.deepspeed_config is None:
        return None
    try:
        profile = Profile.read(settings.deepspeed_config)
    except ConfigError as error:
        found.problems += error.problems
        return None
    found.problems += profile.problems
    found.problems += _output_problems(profile, settings)
    return ds_host.with_nvme_path(profile, settings, found.problems)


def on_device(
    given: Inputs, settings: Settings, host: Host, begun: Begun | None, found: Findings
) -> Profile:
    """Return the DeepSpeed JSON with precision and shard groups, checked for the ranks' devices.

    It is empty if it could not be read.

    Args:
        begun: precision of the run that is resumed or branched from; None for a new run.
    """
    profile, model, path = given.profile, given.model, settings.deepspeed_config
    if profile is None:
        return Profile.parse({}, path) if path else Profile.parse({})
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
    found.problems += group_problems(profile, settings, world_size)
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
