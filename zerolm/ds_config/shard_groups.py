"""Checks `--shard_within`, ZeRO-1 within groups of ranks, and stores it in the profile.

zerolm/engine/shard_groups.py creates the groups. Only DeepSpeed's BF16_Optimizer (0.19.8) supports
such groups: it accepts a process group, and `OwnerReduction` sums its gradients.
"""

from dataclasses import replace

from zerolm.config.settings import Settings
from zerolm.ds_config.parallel_rules import parallel_key
from zerolm.ds_config.profile import Profile
from zerolm.engine.reduction_choice import KEY


def with_shard_groups(
    profile: Profile, settings: Settings, world_size: int, problems: list[str]
) -> Profile:
    """Return the profile with the group size set if there are several groups.

    Args:
        problems: the reasons why the profile does not support groups are appended.
    """
    size = settings.shard_within
    if size is None or not profile.zero_stage:
        return profile
    where = f"{settings.where('shard_within')}: {size}"
    found = [f"{where} {why}, or remove the flag." for why in _reasons(profile, world_size)]
    if world_size % size:
        found.append(f"{where} does not divide the world size {world_size}. Change one of them.")
    problems += found
    return profile if found or size == world_size else replace(profile, shard_within=size)


def _reasons(profile: Profile, world_size: int) -> list[str]:
    """Return why the profile does not support groups, and what to change."""
    if profile.zero_stage != 1:
        return [
            f"needs ZeRO stage 1, but {profile.name} has {profile.zero_stage}. Use "
            f"ds_configs/zero1.json"
        ]
    beside = f"is not supported together with {profile.name}:"
    if key := parallel_key(profile, world_size):
        return [f"{beside} {key}. Remove the key"]
    found = [
        f"{beside} zero_optimization.{name}: {device}. Remove the key"
        for name, device in profile.offloads.items()
        if device != "none"
    ]
    if profile.uses_muon:
        found.append(f"{beside} Muon needs complete matrices. Use AdamW")
    if profile.zero.get(KEY) is True:
        found.append(f"{beside} zero_optimization.{KEY}: true. Remove the key")
    for name, default in (("prescale_gradients", False), ("gradient_predivide_factor", 1)):
        if (profile.json.get(name) or default) != default:
            found.append(f"{beside} {name}. Remove the key")
    written = {
        "the precision": profile.precision,
        "data_types.grad_accum_dtype": profile.grad_accum_dtype or profile.precision,
        "communication_data_type": profile.communication_dtype or profile.precision,
    }
    needed = dict(zip(written, ("bf16", "fp32", "fp32"), strict=True))
    if written != needed:
        shown = ", ".join(f"{name} {value}" for name, value in written.items())
        found.append(
            f"needs bf16 weights and gradients that are summed and sent in fp32, but "
            f"{profile.name} has {shown}. Use ds_configs/zero1.json in bf16"
        )
    return found
