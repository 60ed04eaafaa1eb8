"""Read the values of a DeepSpeed JSON as DeepSpeed will: `"true"` and 1 are true, 2.0 is 2.

`Profile` applies it once, so that rules, plan, run.json and engine agree. Values that DeepSpeed
refuses stay as written, for `schema` to report. Blocks with a pydantic model in DeepSpeed are read
by the types of that model; the other switches are only tested for truth there. A test compares both
with DeepSpeed's own config object. Imports DeepSpeed only inside functions. Versions: 0.19.8.
"""

import enum
import functools
import inspect
import logging
from collections.abc import Mapping
from typing import Any, get_args

AUTO = "auto"
# DeepSpeed logs to stdout on import, where the output of `plan` or `doctor` belongs; they name the
# devices themselves.
logging.getLogger("DeepSpeed").addFilter(
    lambda record: "Setting accelerator to CPU" not in record.getMessage()
)
# Switches that DeepSpeed, or torch for an optimizer's parameters, tests for truth as written.
SWITCHES: dict[str, frozenset[str]] = {
    block: frozenset(keys.split())
    for block, keys in {
        "": "wall_clock_breakdown memory_breakdown dump_state disable_python_gc disable_allgather "
        "prescale_gradients zero_allow_untested_optimizer zero_force_ds_cpu_optimizer "
        "managed_gradient_accumulation dataloader_drop_last use_data_before_expert_parallelism",
        "activation_checkpointing": "partition_activations profile contiguous_memory_optimization "
        "synchronize_checkpoint_boundary cpu_checkpointing",
        "aio": "single_submit overlap_events use_gds",
        "autotuning": "enabled",
        "checkpoint": "load_universal use_node_local_storage checkpoint_serialization",
        "checkpoint.writer": "decoupled io_buffer_double show_statistics",
        "data_efficiency": "enabled",
        "flops_profiler": "enabled detailed",
        "fp8": "enabled",
        "optimizer.params": "torch_adam adam_w_mode bias_correction amsgrad fused foreach maximize "
        "capturable fp32_optimizer_states per_head_muon nesterov",
        "torch_autocast": "enabled",
    }.items()
}
_TRUE_TEXTS = ("true", "1", "yes", "on", "t", "y")  # as pydantic
_LOWER_CASE = frozenset(
    {"communication_data_type", "seq_parallel_communication_data_type", "gradient_allreduce_op"}
)
_COUNTS = frozenset(
    {
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "steps_per_print",
        "sequence_parallel_size",
        "data_parallel_size",
    }
)
_DTYPES = ("grad_accum_dtype", "param_dtype", "buffer_dtype")  # of `data_types`


def pydantic_models() -> dict[str, Any]:
    """Return {block: DeepSpeed's pydantic model of it}."""
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.compile.config import CompileConfig
    from deepspeed.monitor.config import CometConfig, CSVConfig, TensorBoardConfig, WandbConfig
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    return {
        "zero_optimization": DeepSpeedZeroConfig,
        "bf16": DeepSpeedBF16Config,
        "bfloat16": DeepSpeedBF16Config,
        "fp16": DeepSpeedFP16Config,
        "tensorboard": TensorBoardConfig,
        "wandb": WandbConfig,
        "csv_monitor": CSVConfig,
        "comet": CometConfig,
        "comms_logger": CommsLoggerConfig,
        "compile": CompileConfig,
    }


def _models_checked_by_rules() -> dict[str, Any]:
    from deepspeed.inference.config import WeightQuantConfig
    from deepspeed.runtime.config import HybridEngineConfig
    from deepspeed.runtime.tensor_parallel.config import TPTrainingConfig

    return {
        "hybrid_engine": HybridEngineConfig,
        "tensor_parallel": TPTrainingConfig,
        "weight_quantization": WeightQuantConfig,
    }


def without_comments(value: Any) -> Any:
    """Return a JSON value without comment keys: `_...`, `//...`, `#...` and `$schema`."""
    if isinstance(value, list):
        return [without_comments(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    return {
        key: without_comments(inner)
        for key, inner in value.items()
        if not key.startswith(("_", "//", "#")) and key != "$schema"
    }


def coerced(written: Mapping[str, Any]) -> dict[str, Any]:
    """Return a DeepSpeed JSON with every value as DeepSpeed reads it.

    Args:
        written: without comments.
    """
    read = dict(written)
    if isinstance(zero := read.get("zero_optimization"), bool):  # runtime/zero/config.py
        size = {"allgather_bucket_size": read.pop("allgather_size", 500_000_000)}
        read["zero_optimization"] = {"stage": 1, **size} if zero else {"stage": 0}
    models = {**pydantic_models(), **_models_checked_by_rules()} if read else {}
    for key, value in read.items():
        if key in models and isinstance(value, Mapping):
            read[key] = _model_block(models[key], value)
        elif key in _LOWER_CASE and isinstance(value, str):
            read[key] = value.lower()
        elif key in _COUNTS and isinstance(value, float) and value.is_integer():
            read[key] = int(value)
    for path, switches in SWITCHES.items():
        _read_switches(read, path.split(".") if path else [], switches)
    if isinstance(types := read.get("data_types"), Mapping):
        read["data_types"] = {
            key: _dtype_name(value) if key in _DTYPES else value for key, value in types.items()
        }
    return read


def truth(value: Any) -> Any:
    """Return a switch as DeepSpeed tests it; text that means false, but tests true, as written."""
    if isinstance(value, str):
        return True if value.lower() in _TRUE_TEXTS else value
    return bool(value) if isinstance(value, (int, float)) else value


def inner_model(annotation: Any) -> Any:
    """Return the pydantic model in `Model` or `Optional[Model]`, else None."""
    for candidate in (annotation, *get_args(annotation)):
        if inspect.isclass(candidate) and hasattr(candidate, "model_fields"):
            return candidate
    return None


def model_fields(model: Any) -> dict[str, Any]:
    """Return the fields of a pydantic model by name and by alias."""
    fields = dict(model.model_fields)
    return fields | {field.alias: field for field in fields.values() if field.alias}


def _model_block(model: Any, block: Mapping[str, Any]) -> dict[str, Any]:
    fields, read = model_fields(model), dict(block)
    for key, value in block.items():
        if key not in fields or value == AUTO:
            continue
        inner = inner_model(fields[key].annotation)
        if inner is None:
            read[key] = _scalar(fields[key].annotation, value)
        elif isinstance(value, Mapping):
            read[key] = _model_block(inner, value)
    return read


def _scalar(annotation: Any, value: Any) -> Any:
    """Return a value as pydantic converts it to a switch, a number or a choice."""
    from pydantic import ValidationError

    kinds = [kind for kind in (annotation, *get_args(annotation)) if inspect.isclass(kind)]
    if not any(issubclass(kind, (bool, int, float, enum.Enum)) for kind in kinds):
        return value
    try:
        read = _adapter(annotation).validate_python(value)
    except ValidationError:
        return value
    return read.value if isinstance(read, enum.Enum) else read


@functools.cache
def _adapter(annotation: Any) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(annotation)


def _read_switches(read: dict[str, Any], path: list[str], switches: frozenset[str]) -> None:
    """Replace the switches of one block, and copy the blocks that lead to it."""
    block = read
    for key in path:
        inner = block.get(key)
        if not isinstance(inner, Mapping):
            return
        block[key] = block = dict(inner)
    for key in switches & block.keys():
        block[key] = truth(block[key])


def _dtype_name(value: Any) -> Any:
    """Return `fp32`, `bf16` or `fp16` for DeepSpeed's other names of it: `float32`, `half`."""
    from deepspeed.runtime.config import DtypeEnum

    try:
        return DtypeEnum(value).name
    except ValueError:
        return value
