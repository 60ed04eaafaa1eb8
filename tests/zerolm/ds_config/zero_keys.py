"""What is known of each key of DeepSpeed's `zero_optimization` block, and a trial of each.

test_zero_keys.py runs the trials, and docs/settings.md has the table.
"""

from collections.abc import Iterator
from typing import Any

from zerolm.ds_config import muon
from zerolm.ds_config.construction import ASSERTIONS
from zerolm.ds_config.rules import QUANTIZED_KEYS, REFUSALS

HOST = {"device": "cpu", "pin_memory": False}
# {stage: {key, dotted: a value that is not the default}}. A trial has the key and nothing else.
TRIALS: dict[int, dict[str, Any]] = {
    1: {"contiguous_gradients": False, "parameter_alignment": True},
    2: {
        "contiguous_gradients": False,
        "reduce_scatter": False,
        "reduce_bucket_size": 100,
        "use_multi_rank_bucket_allreduce": False,
        "allgather_partitions": False,
        "allgather_bucket_size": 100,
        "overlap_comm": True,
        "parameter_alignment": True,
        "ignore_unused_parameters": False,
    },
    3: {
        "contiguous_gradients": False,
        "reduce_scatter": False,
        "reduce_bucket_size": 100,
        "overlap_comm": False,
        "sub_group_size": 100,
        "stage3_prefetch_bucket_size": 10,
        "stage3_param_persistence_threshold": 100,
        "stage3_model_persistence_threshold": 100,
        "stage3_max_live_parameters": 10,
        "stage3_max_reuse_distance": 0,
        "stage3_gather_16bit_weights_on_model_save": True,
        "stage3_gather_fp16_weights_on_model_save": True,
        "stage3_use_all_reduce_for_fetch_params": True,
        "stage3_allgather_sequential": True,
        "memory_efficient_linear": False,
        "override_module_apply": False,
        "log_trace_cache_warnings": True,
        "enable_sanity_checks": True,
        "zero_hpz_partition_size": 2,
        "leaf_module.classes": ["Block"],
        "leaf_module.names": ["blocks.0"],
        "leaf_module.name_suffixes": [".1"],
    },
}
# The same with offload, in which DeepSpeed's own Adam updates.
HOST_TRIALS: dict[int, dict[str, Any]] = {
    2: {
        "cpu_offload": True,
        "cpu_offload_use_pin_memory": True,
        "offload_optimizer.device": "cpu",
        "offload_optimizer.pin_memory": True,
        "offload_optimizer.cpuadam_cores_perc": 0.5,
    },
    3: {
        "cpu_offload_param": True,
        "offload_param.device": "cpu",
        "offload_param.pin_memory": True,
    },
}
NVME = (
    *(f"offload_param.{key}" for key in ("nvme_path", "buffer_count", "buffer_size", "max_in_cpu")),
    *(f"offload_optimizer.{key}" for key in ("nvme_path", "buffer_count")),
)
OTHER = {
    "the stage itself ([compared](../README.md))": ("stage",),
    "changes the curve, with a notice": QUANTIZED_KEYS,
    "the same curve on NVMe, of the shipped profile": NVME,
    "off, with a notice: a resumed run would begin without momentum": (muon.IN_MEMORY,),
}


def refused() -> set[str]:
    keys = (each.key.partition("zero_optimization.")[2] for each in (*REFUSALS, *ASSERTIONS))
    return {key for key in keys if key}


def trials() -> dict[str, dict[str, Any]]:
    """Return {name: a `zero_optimization` block}."""
    found = {}
    for stage, keys in TRIALS.items():
        for key, value in keys.items():
            found[f"{key}-{stage}"] = _block(stage, key, value)
    for stage, keys in HOST_TRIALS.items():
        for key, value in keys.items():
            host: dict[str, Any] = {"offload_optimizer": {**HOST}}
            if key.startswith("cpu_offload") and key != "cpu_offload_param":
                host = {"cpu_offload": True}
            found[f"{key}-{stage}-host"] = _block(stage, key, value, host)
    return found


def _block(stage: int, key: str, value: Any, more: dict[str, Any] | None = None) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": stage, **(more or {})}
    if stage == 3:
        zero["stage3_param_persistence_threshold"] = 0  # of a small model no parameter is sharded
    *path, last = key.split(".")
    inner = zero
    for part in path:
        inner = inner.setdefault(part, {})
    inner[last] = value
    return zero


def known() -> set[str]:
    tried = {key for keys in (*TRIALS.values(), *HOST_TRIALS.values()) for key in keys}
    return tried | refused() | {key for keys in OTHER.values() for key in keys}


def of_model(model: Any, inner_model: Any, prefix: str = "") -> Iterator[str]:
    """Yield the dotted keys of a pydantic model, by alias, down to the leaves."""
    for name, field in model.model_fields.items():
        key = f"{prefix}{field.alias or name}"
        if (inner := inner_model(field.annotation)) is None or key in refused():
            yield key
        else:
            yield from of_model(inner, inner_model, f"{key}.")


def table() -> str:
    """Return the table of docs/settings.md."""

    def listed(keys: Any) -> str:
        return ", ".join(f"`{key}`" for key in sorted(keys))

    kept: dict[str, list[int]] = {}
    for stage, keys in TRIALS.items():
        for key in keys:
            kept.setdefault(key, []).append(stage)
    rows: dict[str, list[str]] = {}
    for key, stages in kept.items():
        rows.setdefault("the same curve, at stage " + " and ".join(map(str, stages)), []).append(
            key
        )
    rows["the same curve, with offload"] = [key for keys in HOST_TRIALS.values() for key in keys]
    rows |= {what: list(keys) for what, keys in OTHER.items()}
    rows["refused ([below](#keys-that-are-refused))"] = list(refused())
    text = "\n| keys of `zero_optimization` | |\n|---|---|\n"
    return text + "".join(f"| {listed(keys)} | {what} |\n" for what, keys in rows.items()) + "\n"
