"""How optimizer states are sharded over ranks, and how a checkpoint differs from a run in that.

Pure: compares a profile with a checkpoint's manifest. Preflight reports the differences, loading a
checkpoint decides by them, and `zerolm.checkpoint.reshard` acts on them.
"""

from collections.abc import Mapping
from typing import Any

from zerolm.ds_config.parallel_rules import TENSOR_KEY
from zerolm.ds_config.profile import Profile

# Keys of zero_optimization that change which rank holds what, or in which order.
SHARDING_KEYS = ("sub_group_size", "round_robin_gradients", "parameter_alignment")
TENSOR_PARALLEL = "tensor_parallel"
KEEPS_WHOLE_MATRICES = frozenset({"muon"})  # momentum of whole matrices, not sharded like weights


def optimizer_kind(profile: Profile) -> str:
    """Name the optimizer and where its states live."""
    return f"{profile.optimizer.name}, offload {profile.optimizer_offload}"


def sharding(profile: Profile) -> dict[str, Any]:
    """Return what else decides where a state is, for a checkpoint's manifest.

    Args:
        profile: resolved.
    """
    degree = profile.tensor_parallel
    return {
        **({TENSOR_PARALLEL: degree} if degree > 1 else {}),
        **{key: profile.zero.get(key) for key in SHARDING_KEYS},
        # With stage 1 and bf16 these make DeepSpeed take another optimizer class.
        "grad_accum_dtype": profile.grad_accum_dtype,
        "torch_adam": profile.optimizer.params.get("torch_adam"),
    }


def changes(manifest: Mapping[str, Any], profile: Profile, world_size: int) -> list[str]:
    """List how a checkpoint's sharding differs from this run's, `old -> new` each.

    Args:
        profile: resolved.

    Returns:
        Empty when the checkpoint can be loaded as it is.
    """
    pairs = [
        ("world size", manifest["world_size"], world_size),
        ("ZeRO stage", manifest["zero_stage"], profile.zero_stage),
        ("optimizer", manifest["optimizer"], optimizer_kind(profile)),
    ]
    ours = sharding(profile)
    theirs = manifest.get("cut", ours)  # absent in old checkpoints
    pairs += [(key, theirs.get(key), ours.get(key)) for key in {**theirs, **ours}]
    return [f"{what} {old} -> {new}" for what, old, new in pairs if old != new]


def problems(manifest: Mapping[str, Any], where: str, profile: Profile) -> list[str]:
    """Find why the states of a checkpoint cannot be resharded for this run.

    Args:
        where: the manifest's path, to begin a message.
    """
    saved_degree = manifest.get("cut", {}).get(TENSOR_PARALLEL, 1)
    if max(saved_degree, profile.tensor_parallel) > 1:
        return [
            f"{where}: {TENSOR_KEY}: {saved_degree}, --deepspeed_config has "
            f"{profile.tensor_parallel}: tensor-parallel checkpoints cannot be resharded. Resume "
            f"with the world size, ZeRO stage and tensor parallelism that it was written with, or "
            f"start a run from its export."
        ]
    saved, ours = manifest["optimizer"], optimizer_kind(profile)
    kind, _, offload = saved.partition(", offload ")
    if kind.lower() != profile.optimizer.kind:
        return [
            f"{where}: optimizer: {saved!r}, --deepspeed_config has {ours!r}: another optimizer's "
            f"states mean something else. Use {kind} to resume."
        ]
    found = []
    if kind.lower() in KEEPS_WHOLE_MATRICES:
        found.append(
            f"{where}: optimizer: {kind} keeps a momentum of whole matrices, which cannot be "
            f"resharded. Resume with the world size, ZeRO stage and offload that it was written "
            f"with."
        )
    if "nvme" in {offload, *profile.offloads.values()}:
        found.append(
            f"{where}: optimizer: {saved!r}, --deepspeed_config has {ours!r}: states on NVMe "
            f"cannot be resharded. Resume with the world size, ZeRO stage and offload of the "
            f"checkpoint."
        )
    return found
