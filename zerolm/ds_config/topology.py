"""The topology of a run: the `Layout` of its ranks, and how it differs from a checkpoint's.

Preflight reports the differences, loading a checkpoint checks them, and `zerolm.ds_files.reshard`
reshards accordingly. Must not read files.
"""

from collections.abc import Mapping
from typing import Any

from zerolm.config.settings import Settings
from zerolm.distributed.layout import Layout
from zerolm.ds_config.profile import Profile
from zerolm.ds_files.pieces import (
    EXPERT_PARALLEL,
    SHARDS,
    STAGES,
    TENSOR_PARALLEL,
    num_shards,
    tensor_degree,
)

# Keys of zero_optimization that change which rank stores a value, or in which order.
SHARDING_KEYS = ("sub_group_size", "parameter_alignment")
TENSOR_KEY, SEQUENCE_KEY = "tensor_parallel.autotp_size", "sequence_parallel_size"
STAGES_KEY, LAYERS_KEY = "pipeline.stages", "pipeline.layers"
KEYS = {"tensor": TENSOR_KEY, "sequence": SEQUENCE_KEY}  # by axis of the layout
# Optimizers whose momentum is of full matrices, not sharded like the weights.
FULL_MATRIX_STATES = frozenset({"muon"})


def layout_of(settings: Settings, profile: Profile, world_size: int) -> Layout:
    """Return the layout of a run's ranks; what does not fit the ranks is left out, as `rules` and
    `parallel_rules` refuse it.
    """
    tensor, sequence = profile.tensor_parallel, profile.sequence_parallel
    stages = profile.stages
    if world_size % (tensor * sequence * stages):
        return Layout(world_size)
    is_plain = tensor * sequence == 1
    experts = settings.expert_parallel or 1
    if stages > 1 and is_plain:
        divides = world_size // stages % experts == 0
        return Layout(world_size, stages=stages, experts=experts if divides else 1)
    group = settings.shard_within or world_size
    in_groups = is_plain and group < world_size and world_size % group == 0
    divides = is_plain and not in_groups and world_size % experts == 0
    return Layout(
        world_size, tensor, sequence, profile.zero_stage == 3, group if in_groups else 0,
        experts if divides else 1,
    )  # fmt: skip


def optimizer_kind(profile: Profile) -> str:
    """Return the optimizer's name and offload device in the manifest's format."""
    return f"{profile.optimizer.name}, offload {profile.optimizer_offload}"


def sharding(profile: Profile, layout: Layout) -> dict[str, Any]:
    """Return the other options that determine which rank stores a state, for the manifest.

    Args:
        profile: resolved.
    """
    degree = profile.tensor_parallel
    return {
        **({TENSOR_PARALLEL: degree} if degree > 1 else {}),
        **({EXPERT_PARALLEL: layout.experts} if layout.experts > 1 else {}),
        **({STAGES: list(profile.stage_layers)} if layout.stages > 1 else {}),
        **{key: profile.zero.get(key) for key in SHARDING_KEYS},
        # Under stage 1 with bf16, these select a different DeepSpeed optimizer class.
        "grad_accum_dtype": profile.grad_accum_dtype,
        "torch_adam": profile.optimizer.params.get("torch_adam"),
    }


def changes(manifest: Mapping[str, Any], profile: Profile, layout: Layout) -> list[str]:
    """List how a checkpoint's sharding differs from this run's, each as `old -> new`.

    Args:
        profile: resolved.

    Returns:
        One line for each difference; empty if the checkpoint can be loaded without resharding.
    """
    in_groups = SHARDS in manifest or layout.shard_within
    what, ours = "shards" if in_groups else "world size", layout.shard_within or layout.world_size
    pairs = [
        (what, num_shards(manifest), ours),
        ("ZeRO stage", manifest["zero_stage"], profile.zero_stage),
        ("optimizer", manifest["optimizer"], optimizer_kind(profile)),
    ]
    options = sharding(profile, layout)
    theirs = manifest.get("cut", options)  # absent in old checkpoints
    pairs += [(key, theirs.get(key), options.get(key)) for key in {**theirs, **options}]
    return [f"{what} {old} -> {new}" for what, old, new in pairs if old != new]


def problems(manifest: Mapping[str, Any], where: str, profile: Profile) -> list[str]:
    """Return the reasons why a checkpoint's states cannot be resharded for this run.

    Args:
        where: path of the manifest, for messages.
    """
    saved_degree = tensor_degree(manifest)
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
            f"resharded. Resume with the world size, ZeRO stage, offload and --expert_parallel "
            f"that it was written with."
        )
    if "nvme" in {offload, *profile.offloads.values()}:
        found.append(
            f"{where}: optimizer: {saved!r}, but --deepspeed_config has {ours!r}: states on NVMe "
            "cannot be resharded. Resume with the world size, ZeRO stage and offload of the "
            "checkpoint."
        )
    return found
