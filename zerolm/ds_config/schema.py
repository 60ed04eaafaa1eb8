"""Check the keys and value types of a DeepSpeed JSON, as DeepSpeed 0.19.8 reads them.

DeepSpeed ignores unknown keys at the top level and in several blocks, so a typo there would go
unnoticed. Blocks with a pydantic model in DeepSpeed are validated by that model; the other keys are
listed here, and a test compares the list with DeepSpeed's source. `rules` checks which values work
together. DeepSpeed is imported only inside functions.
"""

import copy
from collections.abc import Iterable, Mapping
from typing import Any

from zerolm.common.errors import did_you_mean, reason
from zerolm.common.values import shown
from zerolm.ds_config.coercion import SWITCHES, inner_model, model_fields, pydantic_models, truth
from zerolm.ds_config.profile import AUTO, MAX_NUMBER, Profile, block

_COUNT, _NUMBER, _BOOL = "a positive whole number", "a number, at least 0", "true or false"
_DTYPE = ("fp32", "fp16", "bf16", None)

# Top-level keys with a scalar value, and its allowed values.
SCALARS: dict[str, str | tuple[Any, ...]] = {
    "train_batch_size": _COUNT,
    "train_micro_batch_size_per_gpu": _COUNT,
    "gradient_accumulation_steps": _COUNT,
    "gradient_clipping": _NUMBER,
    "steps_per_print": _COUNT,
    "wall_clock_breakdown": _BOOL,
    "memory_breakdown": _BOOL,
    "dump_state": _BOOL,
    "disable_python_gc": _BOOL,
    "disable_allgather": _BOOL,
    "prescale_gradients": _BOOL,
    "gradient_predivide_factor": _NUMBER,
    "gradient_allreduce_op": ("mean", "sum"),
    "communication_data_type": _DTYPE,
    "seq_parallel_communication_data_type": _DTYPE,
    "zero_allow_untested_optimizer": _BOOL,
    "zero_force_ds_cpu_optimizer": _BOOL,
    "managed_gradient_accumulation": _BOOL,
    "dataloader_drop_last": _BOOL,
    "use_data_before_expert_parallelism": _BOOL,
    "vocabulary_size": _COUNT,
    "allgather_size": _COUNT,
    "log_level": ("debug", "info", "warning", "error", "critical", None),
}
# The Hugging Face Trainer resolves "auto" for these; elsewhere DeepSpeed crashes or ignores it.
AUTO_SCALARS = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
)
# Blocks that DeepSpeed reads key by key, ignoring unknown keys.
BLOCKS: dict[str, frozenset[str]] = {
    name: frozenset(keys.split())
    for name, keys in {
        "optimizer": "type params legacy_fusion",
        "scheduler": "type params",
        "activation_checkpointing": "partition_activations number_checkpoints profile "
        "contiguous_memory_optimization synchronize_checkpoint_boundary cpu_checkpointing",
        "aio": "block_size queue_depth intra_op_parallelism single_submit overlap_events use_gds",
        "flops_profiler": "enabled recompute_fwd_factor profile_step module_depth top_modules "
        "detailed output_file",
        "checkpoint": "tag_validation load_universal use_node_local_storage parallel_write "
        "checkpoint_serialization writer",
        "data_types": "grad_accum_dtype param_dtype buffer_dtype keep_in_fp32_modules",
        "torch_autocast": "enabled dtype lower_precision_safe_modules",
        "timers": "throughput",
    }.items()
}
# Checked by `rules` and `parallel_rules`, which refuse most of them.
CHECKED_BY_RULES = (
    "autotuning",
    "data_efficiency",
    "datastates_ckpt",
    "expert_parallel",
    "fp8",
    "hybrid_engine",
    "pipeline",
    "tensor_parallel",
    "weight_quantization",
    "sequence_parallel_size",
    "data_parallel_size",
)


def known_keys() -> frozenset[str]:
    """Return every top-level key that DeepSpeed reads."""
    return frozenset().union(SCALARS, BLOCKS, CHECKED_BY_RULES, pydantic_models())


def schema_problems(profile: Profile) -> list[str]:
    """Find unknown keys and values of a wrong type, at every level of the JSON as written."""
    models, removed, name = pydantic_models(), _removed_keys(), profile.name
    problems = []
    for key, value in profile.written.items():
        if key == "zero_optimization" and isinstance(value, bool):
            continue  # the form of DeepSpeed's first releases, which `coercion` reads
        if key in removed:
            problems.append(
                f"{name}: {key}: DeepSpeed has removed this key: {removed[key]} Remove the key."
            )
        elif key in models:
            problems += _model_problems(models[key], value, name, key)
        elif key in SCALARS:
            problems += _scalar_problems(key, value, name)
        elif key in BLOCKS:
            problems += _block_problems(key, value, BLOCKS[key], name)
        elif key not in CHECKED_BY_RULES:
            problems.append(f"{name}: {key}: {_unknown(key, known_keys())}")
    return problems + _switch_problems(profile)


def deepspeed_problems(profile: Profile) -> list[str]:
    """Return why DeepSpeed's own config object refuses a profile, as the engine would find later.

    Args:
        profile: resolved, and without problems that `schema_problems` and `rules` find.
    """
    from deepspeed.runtime.config import DeepSpeedConfig

    config = copy.deepcopy(profile.json)
    config.pop("train_batch_size", None)  # it would be compared with a world size of 1
    config.pop("aio", None)  # `rules` checks it; DeepSpeed asks for the GPU of this machine
    try:
        DeepSpeedConfig(config)
    except Exception as error:  # it raises assertions, ValueErrors and its own
        text = reason(error, named=False)
        return [f"{profile.name}: refused by DeepSpeed: {text}. Correct the file."]
    return []


def _switch_problems(profile: Profile) -> list[str]:
    """Find switches in blocks without a model that are neither true nor false."""
    return [
        f"{profile.name}: {path}.{key}: {shown(value)}, DeepSpeed reads any text as true. Write "
        f"true or false."
        for path, switches in SWITCHES.items()
        if path
        for key, value in block(profile.json, *path.split(".")).items()
        if key in switches and not isinstance(value, bool) and value not in (None, AUTO)
    ]


def _unknown(key: str, choices: Iterable[str]) -> str:
    hint = did_you_mean(key, choices) or " Correct or remove it."
    return f"unknown key, DeepSpeed would ignore it.{hint}"


def _removed_keys() -> dict[str, str]:
    from deepspeed.runtime import config

    return dict(getattr(config, "_REMOVED_TOP_LEVEL_CONFIG_KEYS", {}))


def _scalar_problems(key: str, value: Any, name: str) -> list[str]:
    rule = SCALARS[key]
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    number = number and abs(value) < MAX_NUMBER
    if value == AUTO and key in AUTO_SCALARS:
        return []
    if value is None and key == "steps_per_print":
        return []
    if isinstance(rule, tuple):
        valid = (value.lower() if isinstance(value, str) else value) in rule
        rule = "one of " + ", ".join(shown(choice) for choice in rule)
    elif rule == _BOOL:
        valid = isinstance(truth(value), bool)
    elif rule == _COUNT:
        valid = number and value > 0 and value == int(value)
    else:
        valid = number and value >= 0
    auto = ' or "auto"' if key in AUTO_SCALARS else ""
    return [] if valid else [f"{name}: {key}: {shown(value)}, must be {rule}{auto}. Correct it."]


def _block_problems(key: str, value: Any, choices: frozenset[str], name: str) -> list[str]:
    if not isinstance(value, Mapping):
        return [f"{name}: {key}: {shown(value)}, must be an object. Write {{...}} or remove it."]
    problems = [
        f"{name}: {key}.{inner}: {_unknown(inner, choices)}"
        for inner in value
        if inner not in choices
    ]
    if key in ("optimizer", "scheduler") and not isinstance(value.get("params", {}), Mapping):
        problems += _block_problems(f"{key}.params", value["params"], frozenset(), name)
    return problems


def _model_problems(model: Any, value: Any, name: str, path: str) -> list[str]:
    """Check a block's keys, then validate its values with DeepSpeed's pydantic model."""
    from pydantic import ValidationError

    if not isinstance(value, Mapping):
        return [f"{name}: {path}: {shown(value)}, must be an object. Write {{...}} or remove it."]
    problems: list[str] = []
    known = _known_keys_only(model, value, name, path, problems)
    try:
        model(**known)
    except ValidationError as error:
        for found in error.errors():
            if found["loc"] == ("stage",):
                continue  # `rules` has a better message
            where = ".".join([path, *(str(part) for part in found["loc"])])
            given = "" if isinstance(found["input"], Mapping) else f"{shown(found['input'])}, "
            message = found["msg"].rstrip(".")
            problems.append(
                f"{name}: {where}: {given}refused by DeepSpeed: {message}. Correct the value."
            )
    except (AssertionError, ValueError, AttributeError, TypeError) as error:
        problems.append(f"{name}: {path}: refused by DeepSpeed: {error}. Correct the block.")
    return problems


def _known_keys_only(
    model: Any, given: Mapping[str, Any], name: str, path: str, problems: list[str]
) -> dict[str, Any]:
    """Return the block without "auto" values and unknown keys; append those to `problems`."""
    removed = _removed_zero_keys() if path == "zero_optimization" else {}
    fields, known = model_fields(model), {}
    for key, value in given.items():
        if key in removed:
            problems.append(
                f"{name}: {path}.{key}: DeepSpeed has removed this key: {removed[key]} Remove it."
            )
        elif key not in fields:
            hint = did_you_mean(key, fields) or " Correct or remove it."
            problems.append(f"{name}: {path}.{key}: unknown key.{hint}")
        elif value != AUTO:
            inner = inner_model(fields[key].annotation)
            if inner is not None and isinstance(value, Mapping):
                value = _known_keys_only(inner, value, name, f"{path}.{key}", problems)
            known[key] = value
    return known


def _removed_zero_keys() -> dict[str, str]:
    from deepspeed.runtime import config

    return dict(getattr(config, "_REMOVED_ZERO_CONFIG_KEYS", {}))
