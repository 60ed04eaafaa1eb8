"""Checks what a run combines with `--expert_parallel`, which divides experts over ranks.

What was not compared with plain PyTorch is refused; tests/end_to_end/test_expert_parallel.py
compares the rest. docs/parallelism.md explains the reasons.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from zerolm.config.settings import Settings, flags_of
from zerolm.ds_config.profile import Profile
from zerolm.model.architecture import meta_model, num_experts

if TYPE_CHECKING:
    from transformers import PretrainedConfig

OPTIMIZERS = ("adam", "adamw", "muon")
WITHOUT = "Remove it, or the flag"
# Keys of zero_optimization, with the largest value that has no effect.
NOT_COMPARED = {
    "round_robin_gradients": 0, "parameter_alignment": 0, "zero_quantized_weights": 0,
    "zero_quantized_gradients": 0, "zero_hpz_partition_size": 1,
}  # fmt: skip


def problems(
    settings: Settings, config: "PretrainedConfig", profile: Profile, world_size: int
) -> Iterator[str]:
    """Yield why the model, the profile or a flag does not support `--expert_parallel`."""
    degree = settings.expert_parallel
    if degree is None:
        return
    where = f"{settings.where('expert_parallel')}: {degree}"
    ranks = world_size // profile.stages
    if ranks % degree and world_size % profile.stages == 0:
        stages = "" if profile.stages == 1 else f", divided into {profile.stages} pipeline stages"
        yield f"{where} does not divide the world size {world_size}{stages}. Change one of them."
    if why := _model_reason(config, degree):
        yield f"{where}: {settings.model_config}: {why}."
    if profile.json:
        for why, fix in _profile_reasons(profile):
            yield f"{where} is not supported with {profile.name}: {why}. {fix}."
    for flag, about in flags_of(settings).items():
        if getattr(settings, flag) and (why := about["not_with"].get("experts")):
            yield f"{settings.where(flag)}: not supported with {where}: {why}. Remove one of them."


def host_problems(settings: Settings, host_ranks: int) -> list[str]:
    """Return why expert groups would not be inside hosts.

    Args:
        host_ranks: number of ranks on each host.
    """
    degree = settings.expert_parallel
    if degree is None or host_ranks % degree == 0:
        return []
    return [
        f"{settings.where('expert_parallel')}: {degree} does not divide the {host_ranks} rank(s) "
        f"of a host, but tokens are exchanged inside hosts only. Choose a divisor of {host_ranks}."
    ]


def _model_reason(config: "PretrainedConfig", degree: int) -> str:
    from zerolm.model.experts import expert_modules

    experts, active = num_experts(config)
    if not experts or not active:
        return f"{config.model_type} is not a mixture of experts. Remove the flag"
    modules = expert_modules(meta_model(config))
    if not modules:
        return (
            f"transformers does not store the experts of {config.model_type} in fused tensors. Use "
            f"ZeRO-3 instead of the flag"
        )
    sizes = {module.num_experts for module in modules.values()}
    if odd := [size for size in sorted(sizes) if size % degree]:
        return f"the number of experts {odd[0]} is not divisible by {degree}. Change one of them"
    return ""


def _profile_reasons(profile: Profile) -> Iterator[tuple[str, str]]:
    """Yield why a profile does not support divided experts, and what to change."""
    if profile.optimizer.kind not in OPTIMIZERS:
        yield f"optimizer.type {profile.optimizer.name}", "Use AdamW, or remove the flag"
    if profile.precision == "fp16":
        yield "fp16", "Use bf16, or remove the flag"
    for name, device in profile.offloads.items():
        if device != "none":
            yield f"zero_optimization.{name}", WITHOUT
    if profile.block("torch_autocast").get("enabled") is True:
        yield "torch_autocast", WITHOUT
    for name, default in (("prescale_gradients", False), ("gradient_predivide_factor", 1)):
        if (profile.json.get(name) or default) != default:
            yield name, WITHOUT
    for name, without_effect in NOT_COMPARED.items():
        if (profile.zero.get(name) or 0) > without_effect:
            yield f"zero_optimization.{name}", WITHOUT
    if profile.json.get("scheduler") is not None:
        yield "scheduler", "Use --schedule, or remove the flag"
