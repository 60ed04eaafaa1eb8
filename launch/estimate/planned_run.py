"""`PlannedRun`: a model, a DeepSpeed JSON, settings and devices, resolved as in pretrain.py.

All problems are reported together. Rules and defaults come from zerolm. Must not check the data or
this machine, since a plan needs neither.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from zerolm import features
from zerolm.common.errors import ConfigError, Findings
from zerolm.config.settings import Settings
from zerolm.distributed.layout import Layout
from zerolm.ds_config.parallel_rules import group_problems, model_problems
from zerolm.ds_config.profile import Profile
from zerolm.ds_config.rules import rule_problems
from zerolm.ds_config.topology import layout_of
from zerolm.model.architecture import is_routed_expert, num_parameters, routed_fraction
from zerolm.model.flops import TRAINING_TO_FORWARD, flops_per_token, head_flops_per_token
from zerolm.model.model import Model
from zerolm.parts.inheritance import with_origins
from zerolm.plan import exchange, expert_rules, stage_rules
from zerolm.plan.hardware import Hardware
from zerolm.plan.rank_share import shapes_of_rank
from zerolm.plan.resolve import resolve_ds_config, resolve_settings


@dataclass(frozen=True)
class PlannedRun:
    """A resolved run on a number of devices.

    Attributes:
        profile: the resolved DeepSpeed JSON.
        flops_per_token: the model's FLOPs, without recomputation.
        attention_flops: part of `flops_per_token` that grows with the sequence length.
        head_flops: the output head's part of `flops_per_token`.
        routed_flops: the routed experts' part of `flops_per_token`.
        fp8_share: share of the layers' matrix products computed in fp8.
        feature_flops: additional FLOPs per token for optional features.
        begun_tokens: number of tokens that the trunk was trained on before the branch point.
        rank_imbalance: see `exchange.busiest_share`.
    """

    model: Model
    settings: Settings
    profile: Profile
    hardware: Hardware
    layout: Layout
    devices_per_node: int
    flops_per_token: float
    attention_flops: float
    head_flops: float
    routed_flops: float
    fp8_share: float
    feature_flops: float
    begun_tokens: int = 0
    rank_imbalance: float = exchange.IMBALANCE

    @property
    def tokens(self) -> int:
        """Number of tokens to train on; a branch counts them from its branch point."""
        return self.settings.total_tokens - self.begun_tokens

    @property
    def devices(self) -> int:
        return self.layout.world_size

    @property
    def shapes_of_rank(self) -> tuple[Mapping[str, tuple[int, ...]], int]:
        """Parameter shapes on one device, and the number of devices that ZeRO shards them over; of
        pipeline stages, those of the largest.
        """
        return shapes_of_rank(self.model.shapes, self.layout, self.profile.stage_layers)

    @property
    def rank_tokens(self) -> int:
        """Number of tokens of each sequence that one device processes."""
        return self.settings.seq_len // self.layout.sequence

    @property
    def accumulation(self) -> int:
        return self.profile.accumulation or 1

    @property
    def busiest_share(self) -> float:
        """Tokens that the experts of the busiest rank get, divided by the mean over all ranks."""
        return exchange.busiest_share(self.layout, self.rank_imbalance)

    @property
    def num_nodes(self) -> int:
        return -(-self.devices // self.devices_per_node)


def plan_run(
    model: Model,
    profile: Profile,
    settings: Settings,
    hardware: Hardware,
    devices: int,
    devices_per_node: int,
    *,
    begun_tokens: int = 0,
    rank_imbalance: float = exchange.IMBALANCE,
) -> PlannedRun:
    """Resolve a run for a number of devices.

    Args:
        settings: if `micro_batch_size` is None, the largest micro-batch that fits is chosen.
        rank_imbalance: see `exchange.busiest_share`.

    Raises:
        ConfigError: lists every problem.
    """
    found = Findings(rule_problems(profile, on_gpu=not hardware.is_cpu, world_size=devices))
    found.problems += group_problems(profile, settings, devices)
    layout = layout_of(settings, profile, devices)
    if hardware.peak(profile.compute_precision) is None:
        found.problems.append(
            f"{profile.name}: {profile.compute_precision} is not supported by {hardware.name}. "
            f"Choose another precision in the DeepSpeed JSON, or use a newer device."
        )
    if settings.fp8 and not hardware.fp8:
        found.problems.append(
            f"--fp8: not supported on {hardware.name}. Remove it, or use an H100."
        )
    settings = replace(settings, deepspeed_config=profile.name, model_config=model.path)
    settings = resolve_settings(
        settings,
        model,
        profile,
        found,
        layout=layout,
        memory_bytes=hardware.device.memory_bytes,
        round_batch=True,
        rank_imbalance=rank_imbalance,
    )
    found.problems += model_problems(settings, model.config, layout)
    found.problems += expert_rules.problems(settings, model.config, profile, devices)
    found.problems += expert_rules.host_problems(settings, min(devices, devices_per_node))
    found.problems += stage_rules.problems(settings, model.config, profile)
    found.problems += stage_rules.batch_problems(settings, profile, layout)
    case = features.Case(settings, model.config, profile, layout, "absent")
    found.problems += features.problems(case)
    if found.problems:
        raise ConfigError(with_origins(dict.fromkeys(found.problems), settings))
    resolved = settings.resolved()
    flops = flops_per_token(model.config, model.shapes, resolved.seq_len)
    attention = flops - flops_per_token(model.config, model.shapes, 0)
    head = TRAINING_TO_FORWARD * head_flops_per_token(model.config, model.shapes)
    profile = resolve_ds_config(profile, resolved, model, layout)
    return PlannedRun(
        model,
        resolved,
        profile,
        hardware,
        layout,
        devices_per_node,
        flops,
        attention,
        head,
        _routed_flops(model),
        _fp8_flops(resolved, model) / (flops - attention - head),
        features.flops_per_token(resolved, model.config),
        begun_tokens,
        rank_imbalance,
    )


def _routed_flops(model: Model) -> float:
    values = num_parameters({n: each for n, each in model.shapes.items() if is_routed_expert(n)})
    return 2 * TRAINING_TO_FORWARD * values * routed_fraction(model.config) if values else 0.0


def _fp8_flops(settings: Settings, model: Model) -> float:
    if not settings.fp8:
        return 0.0
    from zerolm.fp8.layers import layers_of  # imports torch

    return layers_of(model.config).flops_per_token
