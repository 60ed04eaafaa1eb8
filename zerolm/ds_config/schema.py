"""The keys of a DeepSpeed JSON and the types of their values, as DeepSpeed 0.19.8 reads them.

`Profile` reads its file through `read` once, so that rules, plan, run.json and engine agree that
`"true"` and 1 are true, and 2.0 is 2. DeepSpeed ignores unknown keys at the top level and in some
blocks, so a typo there would go unnoticed. Where DeepSpeed has a pydantic model, that is the type
of a block; a test compares the other keys with DeepSpeed's source. `rules` checks which values work
together. Imports DeepSpeed only inside functions.
"""

import enum
import functools
import inspect
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, TypeGuard, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    TypeAdapter,
    ValidationError,
    create_model,
)

from zerolm.common.errors import did_you_mean
from zerolm.common.values import shown

AUTO = "auto"
MAX_NUMBER = 1e30  # no count, size or rate of a run exceeds it
# DeepSpeed logs to stdout on import, where the output of `plan` or `doctor` belongs; they name the
# devices themselves.
logging.getLogger("DeepSpeed").addFilter(
    lambda record: "Setting accelerator to CPU" not in record.getMessage()
)
# `rules` and `parallel_rules` refuse most of these, with better messages than their types have.
CHECKED_BY_RULES = (
    "autotuning",
    "data_efficiency",
    "data_parallel_size",
    "datastates_ckpt",
    "expert_parallel",
    "fp8",
    "hybrid_engine",
    "pipeline",
    "sequence_parallel_size",
    "tensor_parallel",
    "weight_quantization",
)
_TRUE_TEXTS = ("true", "1", "yes", "on", "t", "y")  # as pydantic


# ---- Types


class RuleError(ValueError):
    """A value breaks a rule of this module; the text is the rule and the fix."""


def is_number(value: Any) -> TypeGuard[int | float]:
    """Return whether a JSON value is a finite number below `MAX_NUMBER`, and not a boolean."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return abs(value) < MAX_NUMBER


def _type(
    rule: str,
    accepts: Callable[[Any], bool] = lambda value: True,
    convert: Callable[[Any], Any] = lambda value: value,
    auto: bool = False,
) -> Any:
    """Return a type of values that are converted and then accepted, or the word "auto".

    Args:
        rule: what a value must be, for messages.
        auto: allow "auto" at the top level, where DeepSpeed crashes or ignores it, because the
            Hugging Face Trainer resolves it.
    """
    rule += ' or "auto"' if auto else ""

    def read(value: Any) -> Any:
        if auto and value == AUTO:
            return value
        value = convert(value)
        if not accepts(value):
            raise RuleError(f"must be {rule}. Correct it.")
        return value

    return Annotated[Any, BeforeValidator(read)]


def _truth(value: Any) -> Any:
    """Return a switch as DeepSpeed tests it, for which any text is true."""
    if isinstance(value, str) and value.lower() not in _TRUE_TEXTS:
        raise RuleError("is text, which DeepSpeed reads as true. Write true or false.")
    return bool(value) if isinstance(value, (int, float, str)) else value


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _dtype_name(value: Any) -> Any:
    """Return `fp32`, `bf16` or `fp16` for DeepSpeed's other names of it: `float32`, `half`."""
    from deepspeed.runtime.config import DtypeEnum

    try:
        return DtypeEnum(value).name
    except ValueError:
        return value


def _choice(*choices: str | None) -> Any:
    return _type(
        "one of " + ", ".join(map(shown, choices)),
        lambda value: value in choices,
        lambda value: value.lower() if isinstance(value, str) else value,
    )


def _is_count(value: Any) -> bool:
    return is_number(value) and isinstance(value, int) and value > 0


def _is_never(value: Any) -> bool:
    return isinstance(value, (int, float)) and value >= MAX_NUMBER


def _is_size(value: Any) -> bool:
    return is_number(value) and value >= 0


_SWITCH = _type("true or false", lambda value: isinstance(value, bool), _truth)
_COUNT = _type("a positive whole number", _is_count, _whole)
_AUTO_COUNT = _type("a positive whole number", _is_count, _whole, auto=True)
_NUMBER = _type("a number, at least 0", _is_size)
_AUTO_NUMBER = _type("a number, at least 0", _is_size, auto=True)
# An interval in steps that no run reaches, which DeepSpeed takes for never, as null.
_INTERVAL = _type(
    "a positive whole number or null",
    lambda value: value is None or _is_count(value),
    lambda value: None if _is_never(value) else _whole(value),
)
_FLOAT_TYPE = _choice("fp32", "fp16", "bf16", None)
_DTYPE = _type("checked by `precision`", convert=_dtype_name)
_DEGREE = _type("checked by `parallel_rules`", convert=_whole)


class _Block(BaseModel):
    """A block that DeepSpeed reads key by key, ignoring unknown keys."""


class _OpenBlock(_Block):
    """A block whose other keys another module checks."""


def _block(
    switches: str = "", others: str = "", base: type[_Block] = _Block, **types: Any
) -> type[_Block]:
    types |= dict.fromkeys(switches.split(), _SWITCH | None) | dict.fromkeys(others.split(), Any)
    fields: dict[str, Any] = {key: (kind, None) for key, kind in types.items()}
    return create_model("Block", __base__=base, **fields)


@functools.cache
def known_keys() -> dict[str, Any]:
    """Return {top-level key that DeepSpeed reads: the type of its value}."""
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.compile.config import CompileConfig
    from deepspeed.inference.config import WeightQuantConfig
    from deepspeed.monitor.config import CometConfig, CSVConfig, TensorBoardConfig, WandbConfig
    from deepspeed.runtime.config import HybridEngineConfig
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.tensor_parallel.config import TPTrainingConfig
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.utils.config import DeepSpeedThroughputTimerConfig

    switches = (
        "wall_clock_breakdown memory_breakdown dump_state disable_python_gc disable_allgather "
        "prescale_gradients zero_allow_untested_optimizer zero_force_ds_cpu_optimizer "
        "managed_gradient_accumulation dataloader_drop_last use_data_before_expert_parallelism"
    )
    return {
        **dict.fromkeys(CHECKED_BY_RULES, Any),
        **dict.fromkeys(switches.split(), _SWITCH),
        "train_batch_size": _AUTO_COUNT,
        "train_micro_batch_size_per_gpu": _AUTO_COUNT,
        "gradient_accumulation_steps": _AUTO_COUNT,
        "gradient_clipping": _AUTO_NUMBER,
        "gradient_predivide_factor": _NUMBER,
        "steps_per_print": _INTERVAL | None,
        "vocabulary_size": _COUNT,
        "allgather_size": _COUNT,
        "gradient_allreduce_op": _choice("mean", "sum"),
        "communication_data_type": _FLOAT_TYPE,
        "seq_parallel_communication_data_type": _FLOAT_TYPE,
        "log_level": _choice("debug", "info", "warning", "error", "critical", None),
        "sequence_parallel_size": _DEGREE,
        "data_parallel_size": _DEGREE,
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
        "hybrid_engine": HybridEngineConfig,
        "tensor_parallel": TPTrainingConfig,
        "weight_quantization": WeightQuantConfig,
        "timers": _block(throughput=DeepSpeedThroughputTimerConfig),
        "optimizer": _block(
            others="type legacy_fusion",
            params=_block(
                "torch_adam adam_w_mode bias_correction amsgrad fused foreach maximize capturable "
                "fp32_optimizer_states per_head_muon nesterov",
                base=_OpenBlock,
            ),
        ),
        "scheduler": _block(others="type", params=_block(base=_OpenBlock)),
        "activation_checkpointing": _block(
            "partition_activations profile contiguous_memory_optimization cpu_checkpointing "
            "synchronize_checkpoint_boundary",
            "number_checkpoints",
        ),
        "aio": _block(
            "single_submit overlap_events use_gds", "block_size queue_depth intra_op_parallelism"
        ),
        "flops_profiler": _block(
            "enabled detailed",
            "recompute_fwd_factor profile_step module_depth top_modules output_file",
        ),
        "checkpoint": _block(
            "load_universal use_node_local_storage checkpoint_serialization",
            "tag_validation parallel_write",
            writer=_block(
                "decoupled io_buffer_double show_statistics",
                "type data_parallel io_buffer_size io_multiplier",
            ) | None,
        ),
        "data_types": _block(
            others="keep_in_fp32_modules",
            grad_accum_dtype=_DTYPE | None,
            param_dtype=_DTYPE | None,
            buffer_dtype=_DTYPE | None,
        ),
        "torch_autocast": _block("enabled", "dtype lower_precision_safe_modules"),
        "autotuning": _block("enabled", base=_OpenBlock),
        "data_efficiency": _block("enabled", base=_OpenBlock),
        "fp8": _block("enabled", base=_OpenBlock),
    }  # fmt: skip


# ---- Reading


def read(written: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return a DeepSpeed JSON with every value as DeepSpeed reads it, and the problems of its keys.

    Unknown keys and values that DeepSpeed refuses stay as written.

    Args:
        written: the JSON as written, without comments.
    """
    values, problems = dict(written), []
    if isinstance(zero := values.get("zero_optimization"), bool):  # runtime/zero/config.py
        size = {"allgather_bucket_size": values.pop("allgather_size", 500_000_000)}
        values["zero_optimization"] = {"stage": 1, **size} if zero else {"stage": 0}
    if not values:
        return {}, []
    types, removed = known_keys(), _removed("TOP_LEVEL")
    for key, value in values.items():
        if key in removed:
            problems.append(f"{key}: DeepSpeed has removed this key: {removed[key]} Remove it.")
        elif key not in types:
            problems.append(f"{key}: {_unknown(key, types)}")
        else:
            found: list[str] = []
            values[key], known = _as_read(types[key], value, key, found)
            if key not in CHECKED_BY_RULES:
                problems += found + _type_problems(types[key], known, key)
    return values, problems


def _as_read(kind: Any, value: Any, where: str, problems: list[str]) -> tuple[Any, Any]:
    """Return a value as DeepSpeed reads it, and as written without "auto" and unknown keys.

    Args:
        where: dotted key of the value.
        problems: unknown keys are appended.
    """
    model = inner_model(kind)
    if model is None:
        try:
            read = _adapter(kind).validate_python(value)
        except ValidationError:
            return value, value
        read = read.value if isinstance(read, enum.Enum) else read
        return (read if isinstance(read, (bool, int, float, str, type(None))) else value), value
    if not isinstance(value, Mapping):
        return value, value
    removed = _removed("ZERO") if where == "zero_optimization" else {}
    fields, values, known = model_fields(model), dict(value), {}
    key_by_key = issubclass(model, _Block)
    for key, inner in value.items():
        if key in removed:
            problems.append(
                f"{where}.{key}: DeepSpeed has removed this key: {removed[key]} Remove it."
            )
        elif key in fields:
            kind, path = fields[key].annotation, f"{where}.{key}"
            if inner != AUTO or (key_by_key and inner_model(kind)):
                values[key], known[key] = _as_read(kind, inner, path, problems)
        elif not issubclass(model, _OpenBlock):
            problems.append(f"{where}.{key}: {_unknown(key, fields, key_by_key)}")
    return values, known


def _type_problems(kind: Any, value: Any, where: str) -> list[str]:
    """Return why a value is not of its type, or why DeepSpeed's model refuses it."""
    try:
        _adapter(kind).validate_python(value)
    except ValidationError as error:
        return [
            _problem(".".join([where, *map(str, found["loc"])]), found)
            for found in error.errors()
            if (where, *found["loc"]) != ("zero_optimization", "stage")  # `rules` has a better one
        ]
    except (AttributeError, TypeError) as error:
        return [f"{where}: is refused by DeepSpeed: {error}. Correct the block."]
    return []


def _problem(where: str, found: Any) -> str:
    if isinstance(rule := found.get("ctx", {}).get("error"), RuleError):
        return f"{where}: {shown(found['input'])} {rule}"
    given = "" if isinstance(found["input"], Mapping) else f"{shown(found['input'])} "
    if found["type"] in ("model_type", "model_attributes_type", "dict_type"):
        return f"{where}: {given}must be an object. Write {{...}} or remove it."
    message = found["msg"].rstrip(".")
    return f"{where}: {given}is refused by DeepSpeed: {message}. Correct the value."


def inner_model(kind: Any) -> Any:
    """Return the pydantic model in `Model` or `Optional[Model]`, else None."""
    for candidate in (kind, *get_args(kind)):
        if inspect.isclass(candidate) and hasattr(candidate, "model_fields"):
            return candidate
    return None


def model_fields(model: Any) -> dict[str, Any]:
    """Return the fields of a pydantic model by name and by alias."""
    fields = dict(model.model_fields)
    return fields | {field.alias: field for field in fields.values() if field.alias}


@functools.cache
def _adapter(kind: Any) -> Any:
    is_model = inner_model(kind) is kind
    return TypeAdapter(kind, config=None if is_model else ConfigDict(arbitrary_types_allowed=True))


def _removed(level: str) -> dict[str, str]:
    """Return {key that DeepSpeed has removed: why} of the top level or of `zero_optimization`."""
    from deepspeed.runtime import config

    return getattr(config, f"_REMOVED_{level}_CONFIG_KEYS", {})


def _unknown(key: str, choices: Iterable[str], is_ignored: bool = True) -> str:
    hint = did_you_mean(key, choices) or " Correct or remove it."
    return f"unknown key{', DeepSpeed would ignore it' if is_ignored else ''}.{hint}"
