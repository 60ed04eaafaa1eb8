"""What a run is given: its model, its ZeRO profile, its token shards; each is read, and checked by
itself. What they must be together is resolution.py's and preflight.py's affair.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zerolm import data_cache, ds_config, fused_kernels, memory, nvme, parallel
from zerolm.architecture import load_model_config, num_parameters, parameter_shapes
from zerolm.ds_rules import rule_notices, rule_problems
from zerolm.ds_schema import schema_problems
from zerolm.errors import ConfigError, Findings
from zerolm.host_rules import Host
from zerolm.settings import Settings
from zerolm.sources import Sources, open_sources

if TYPE_CHECKING:
    from transformers import PretrainedConfig

BUCKET_KEYS = (
    "reduce_bucket_size",
    "stage3_prefetch_bucket_size",
    "stage3_param_persistence_threshold",
)


@dataclass(frozen=True)
class Model:
    """A model without weights.

    Attributes:
        shapes: of every parameter by name, tied ones once.
    """

    config: "PretrainedConfig"
    shapes: dict[str, tuple[int, ...]]
    num_parameters: int

    @property
    def vocab_size(self) -> int:
        size: int = self.config.get_text_config().vocab_size
        return size


@dataclass(frozen=True)
class Profile:
    """A DeepSpeed JSON.

    Attributes:
        name: of the file, to begin a message.
        ds_config: as it was given, `"auto"` and all; empty when it could not be read.
        layout: which ranks share sequences.
    """

    name: str
    ds_config: dict[str, Any]
    layout: parallel.Layout


@dataclass(frozen=True)
class Inputs:
    """All that a run is given beside its settings.

    Attributes:
        model: None when it could not be read.
        sources: those that could be opened.
        all_sources: whether these are all that were meant, without a problem.
    """

    model: Model | None
    profile: Profile
    sources: Sources
    all_sources: bool


def read(settings: Settings, host: Host, refused: set[str], found: Findings) -> Inputs:
    """Read whatever can be read; what cannot, or is wrong by itself, goes to `found`.

    Args:
        refused: names of settings of which nothing is known.
    """
    model = _read_model(settings, found)
    profile = _read_profile(settings, host, model, found)
    before = len(found.problems)
    sources = open_sources(settings, found.problems)
    _prepare(sources, settings, found)
    all_sources = len(found.problems) == before and "data" not in refused
    return Inputs(model, profile, sources, all_sources)


def _read_model(settings: Settings, found: Findings) -> Model | None:
    if settings.model_config is None:
        return None
    try:
        config = load_model_config(settings.model_config)
        shapes = parameter_shapes(config)
    except ConfigError as error:
        found.problems += error.problems
        return None
    return Model(config, shapes, num_parameters(shapes))


def _read_profile(settings: Settings, host: Host, model: Model | None, found: Findings) -> Profile:
    path = settings.deepspeed_config
    unread = Profile(str(path), {}, parallel.Layout(host.world_size))
    if path is None:
        return unread
    try:
        raw = ds_config.load_ds_config(path)
    except ConfigError as error:
        found.problems += error.problems
        return unread
    raw = nvme.with_path(raw, settings, path, found.problems)
    if host.device.kind != "absent":
        found.problems += nvme.host_problems(raw, path)
        found.problems += fused_kernels.host_problems(raw, path)
    found.problems += schema_problems(raw, path)
    on_gpu, world_size = host.device.is_gpu, host.world_size
    found.problems += rule_problems(raw, path, on_gpu=on_gpu, world_size=world_size)
    if ds_config.compute_precision(raw) == "bf16" and not host.device.supports_bf16:
        found.problems.append(
            f"{path}: bf16 is asked for, this {host.device.kind} device has no bf16. Use "
            f"fp16, or a newer device."
        )
    found.notices += rule_notices(raw, path, on_gpu=on_gpu, world_size=world_size)
    zero = ds_config.block(raw, "zero_optimization")
    auto = [key for key in BUCKET_KEYS if zero.get(key) == "auto"]
    if auto and model is not None and not memory.hidden_size(model.config):
        found.problems.append(
            f"{path}: zero_optimization.{auto[0]}: auto, but the model config has no "
            f"hidden_size to derive it from. Give a number."
        )
    return Profile(path, raw, parallel.layout_of(raw, world_size))


def _prepare(sources: Sources, settings: Settings, found: Findings) -> None:
    """Give what is in stores its cache, and say what is not checked as it is read."""
    every = [*sources.training, *sources.validation]
    found.problems += data_cache.prepare(settings, every)
    found.notices += [
        f"{source.directory} has no sums of blocks: only the sizes of its files are checked, "
        f"not what is read. Shards of this release have them"
        for source in every
        if not source.has_sums
    ]
