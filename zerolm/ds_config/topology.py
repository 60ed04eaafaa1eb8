"""Compares how a checkpoint and a run shard optimizer states across ranks.

Preflight reports the differences, loading a checkpoint checks them, and `zerolm.engine.reshard`
reshards accordingly. Must not read files.
"""

from collections.abc import Mapping
from typing import Any

from zerolm.ds_config.parallel_rules import TENSOR_KEY
from zerolm.ds_config.profile import Profile
from zerolm.engine.partitions import SHARDS, num_shards

# Keys of zero_optimization that change which rank stores a value, or in which order.
SHARDING_KEYS = ("sub_group_size", "round_robin_gradients", "parameter_alignment")
TENSOR_PARALLEL = "tensor_parallel"
# Optimizers whose momentum is of full matrices, not sharded like the weights.
FULL_MATRIX_STATES = frozenset({"muon"})


def optimizer_kind(profile: Profile) -> str:
    """Return the optimizer's name and offload device in the manifest's format."""
    return f"{profile.optimizer.name}, offload {profile.optimizer_offload}"


def sharding(profile: Profile) -> dict[str, Any]:
    """Return the other options that determine which rank stores a state, for the manifest.

    Args:
        profile: resolved.
    """
    degree = profile.tensor_parallel
    return {
        **({TENSOR_PARALLEL: degree} if degree > 1 else {}),
        **{key: profile.zero.get(key) for key in SHARDING_KEYS},
        # Under stage 1 with bf16, these select a different DeepSpeed optimizer class.
        "grad_accum_dtype": profile.grad_accum_dtype,
        "torch_adam": profile.optimizer.params.get("torch_adam"),
    }


def changes(manifest: Mapping[str, Any], profile: Profile, world_size: int) -> list[str]:
    """List how a checkpoint's sharding differs from this run's, each as `old -> new`.

    Args:
        profile: resolved.

    Returns:
        One line for each difference; empty if the checkpoint can be loaded without resharding.
    """
    in_groups = SHARDS in manifest or profile.shard_within
    what, ours = "shards" if in_groups else "world size", profile.shard_within or world_size
    pairs = [
        (what, num_shards(manifest), ours),
        ("ZeRO stage", manifest["zero_stage"], profile.zero_stage),
        ("optimizer", manifest["optimizer"], optimizer_kind(profile)),
    ]
    options = sharding(profile)
    theirs = manifest.get("cut", options)  # absent in old checkpoints
    pairs += [(key, theirs.get(key), options.get(key)) for key in {**theirs, **options}]
    return [f"{what} {old} -> {new}" for what, old, new in pairs if old != new]


def problems(manifest: Mapping[str, Any], where: str, profile: Profile) -> list[str]:
    """Return the reasons why a checkpoint's states cannot be resharded for this run.

    Args:
        where: path of the manifest, for messages.
    """
    saved_degree = manifest.get("cut", {}).get(TENSOR_PARALLEL, 1)
    if max(saved_degree, profile.tensor_parallel) > 1:
        return [
            f"{where}: {TENSOR_KEY}: {saved_degree}, but --deepspeed_config has "
            f"{profile.tensor_parallel}: tensor-parallel checkpoints cannot be resharded. Resume "
            "with the world size, ZeRO stage and tensor parallelism that it was written with."
        ]
    saved, ours = manifest["optimizer"], optimizer_kind(profile)
    kind, _, offload = saved.partition(", offload ")
    if kind.lower() != profile.optimizer.kind:
        return [
            f"{where}: optimizer: {saved!r}, but --deepspeed_config has {ours!r}. "
            f"Optimizer states cannot be converted. Use {kind} to resume."
        ]
    found = []
    if kind.lower() in FULL_MATRIX_STATES:
        found.append(
            f"{where}: optimizer: {kind} keeps the momentum of full matrices, which cannot be "
            f"resharded. Resume with the world size, ZeRO stage and offload that it was written "
            f"with."
        )
    if "nvme" in {offload, *profile.offloads.values()}:
        found.append(
            f"{where}: optimizer: {saved!r}, but --deepspeed_config has {ours!r}: states on NVMe "
            "cannot be resharded. Resume with the world size, ZeRO stage and offload of the "
            "checkpoint."
        )
    return found
