"""How a run's optimizer states are cut over its ranks, and whether a checkpoint is cut otherwise.

Pure: from the ds config and a checkpoint's manifest. `preflight` says it, `checkpoint` decides by
it, `reshard` does it.
"""

from collections.abc import Mapping
from typing import Any

from zerolm.ds_config import block, offload_device, optimizer_offload, optimizer_type
from zerolm.parallel import TENSOR_KEY, degree

# Keys of zero_optimization that change which rank holds what, or in which order.
CUTTING_KEYS = ("sub_group_size", "round_robin_gradients", "parameter_alignment")
TENSOR_PARALLEL = "tensor_parallel"
WHOLE_MATRICES = frozenset({"muon"})  # its momentum is of whole matrices, not cut like the weights


def optimizer_kind(ds_config: Mapping[str, Any]) -> str:
    """Name the optimizer and where its states live."""
    return f"{optimizer_type(ds_config)}, offload {optimizer_offload(ds_config)}"


def cut(ds_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what else decides where a state lies, for the manifest.

    Args:
        ds_config: as resolved for the run.
    """
    zero = block(ds_config, "zero_optimization")
    tensor = degree(ds_config, TENSOR_KEY)
    return {
        **({TENSOR_PARALLEL: tensor} if tensor > 1 else {}),
        **{key: zero.get(key) for key in CUTTING_KEYS},
        # With stage 1 and bf16 these make DeepSpeed take another optimizer class.
        "grad_accum_dtype": block(ds_config, "data_types").get("grad_accum_dtype"),
        "torch_adam": block(ds_config, "optimizer", "params").get("torch_adam"),
    }


def changes(
    manifest: Mapping[str, Any], *, world_size: int, zero_stage: int, ds_config: Mapping[str, Any]
) -> list[str]:
    """Say what is cut otherwise than in a checkpoint, `old -> new` each; none: it fits as it is.

    Args:
        manifest: of the checkpoint.
        ds_config: as resolved for this run.
    """
    pairs = [
        ("world size", manifest["world_size"], world_size),
        ("ZeRO stage", manifest["zero_stage"], zero_stage),
        ("optimizer", manifest["optimizer"], optimizer_kind(ds_config)),
    ]
    ours = cut(ds_config)
    theirs = manifest.get("cut", ours)  # checkpoints of before there was such an entry
    pairs += [(key, theirs.get(key), ours.get(key)) for key in {**theirs, **ours}]
    return [f"{what} {old} -> {new}" for what, old, new in pairs if old != new]


def problems(manifest: Mapping[str, Any], where: str, ds_config: Mapping[str, Any]) -> list[str]:
    """Find why the states of a checkpoint cannot be cut anew for this run.

    Args:
        where: the manifest's path, to begin a message.
    """
    found = []
    degrees = [each.get(TENSOR_PARALLEL, 1) for each in (manifest.get("cut", {}), cut(ds_config))]
    if max(degrees) > 1:
        return [
            f"{where}: {TENSOR_KEY}: {degrees[0]}, --deepspeed_config has {degrees[1]}: matrices "
            f"that are cut over ranks are not cut anew. Go on with the world size, ZeRO stage and "
            f"tensor parallelism that it was written with, or begin a run from its export."
        ]
    saved, ours = manifest["optimizer"], optimizer_kind(ds_config)
    kind, _, offload = saved.partition(", offload ")
    if kind.lower() != optimizer_type(ds_config).lower():
        return [
            f"{where}: optimizer: {saved!r}, --deepspeed_config has {ours!r}: another optimizer's "
            f"states mean something else. Use {kind} to go on."
        ]
    if kind.lower() in WHOLE_MATRICES:
        found.append(
            f"{where}: optimizer: {kind} keeps a momentum of whole matrices, which cannot be cut "
            f"anew. Go on with the world size, ZeRO stage and offload that it was written with."
        )
    devices = {offload, optimizer_offload(ds_config), offload_device(ds_config, "param")}
    if "nvme" in devices:
        found.append(
            f"{where}: optimizer: {saved!r}, --deepspeed_config has {ours!r}: states on NVMe are "
            f"not cut anew. Go on with the world size, ZeRO stage and offload of the checkpoint."
        )
    return found
