"""The keys of a DeepSpeed JSON and the types of their values, as DeepSpeed 0.19.8 reads them.

If DeepSpeed has a pydantic model for a block, that model is the block's type; a test compares the
other keys with DeepSpeed's source. Imports DeepSpeed only inside functions.
"""

import functools
import logging
from collections.abc import Callable
from typing import Annotated, Any, TypeGuard

from pydantic import BaseModel, BeforeValidator, create_model

from zerolm.common.values import shown

AUTO = "auto"
MAX_NUMBER = 1e30  # no count, size or rate in a run exceeds it
# On import, DeepSpeed logs to stdout, which is reserved for the output of `plan` and `doctor`;
# they print the devices themselves.
logging.getLogger("DeepSpeed").addFilter(
    lambda record: "Setting accelerator to CPU" not in record.getMessage()
)
_TRUE_TEXTS = ("true", "1", "yes", "on", "t", "y")  # as pydantic


class RuleError(ValueError):
    """A value breaks a rule of this module; the message states the rule and the fix."""


def is_number(value: Any) -> TypeGuard[int | float]:
    """Return whether a JSON value is a finite number below `MAX_NUMBER`. Booleans do not count."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return abs(value) < MAX_NUMBER


def _type(
    rule: str,
    accepts: Callable[[Any], bool] = lambda value: True,
    convert: Callable[[Any], Any] = lambda value: value,
    auto: bool = False,
) -> Any:
    """Return a pydantic type that converts a value and then accepts or rejects it.

    Args:
        rule: what a value must be, worded for messages.
        auto: also accept "auto" at the top level, where the Hugging Face Trainer resolves it;
            DeepSpeed itself crashes on "auto" there or ignores it.
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
    """Return a value as the boolean that DeepSpeed takes it for: any string is true."""
    if isinstance(value, str) and value.lower() not in _TRUE_TEXTS:
        raise RuleError("is text, which DeepSpeed reads as true. Write true or false unquoted.")
    return bool(value) if isinstance(value, (int, float, str)) else value


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _dtype_name(value: Any) -> Any:
    """Return `fp32`, `bf16` or `fp16` for DeepSpeed's aliases such as `float32` and `half`."""
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
# To DeepSpeed, null and an interval that no run reaches both mean never.
_INTERVAL = _type(
    "a positive whole number or null",
    lambda value: value is None or _is_count(value),
    lambda value: None if _is_never(value) else _whole(value),
)
_FLOAT_TYPE = _choice("fp32", "fp16", "bf16", None)
_DTYPE = _type("checked by `precision`", convert=_dtype_name)
_DEGREE = _type("checked by `parallel_rules`", convert=_whole)


class Block(BaseModel):
    """A block that DeepSpeed reads key by key, ignoring unknown keys."""


class OpenBlock(Block):
    """A block whose remaining keys are checked by another module."""


def _block(
    switches: str = "", others: str = "", base: type[Block] = Block, **types: Any
) -> type[Block]:
    types |= dict.fromkeys(switches.split(), _SWITCH | None) | dict.fromkeys(others.split(), Any)
    fields: dict[str, Any] = {key: (kind, None) for key, kind in types.items()}
    return create_model("Block", __base__=base, **fields)


@functools.cache
def known_keys() -> dict[str, Any]:
    """Return the type of each top-level key that DeepSpeed reads."""
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
        **dict.fromkeys(("datastates_ckpt", "expert_parallel", "pipeline"), Any),
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
                base=OpenBlock,
            ),
        ),
        "scheduler": _block(others="type", params=_block(base=OpenBlock)),
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
        "autotuning": _block("enabled", base=OpenBlock),
        "data_efficiency": _block("enabled", base=OpenBlock),
        "fp8": _block("enabled", base=OpenBlock),
    }  # fmt: skip


def removed_keys(level: str) -> dict[str, str]:
    """Return {removed key: reason} for the top level or `zero_optimization` of a DeepSpeed JSON."""
    from deepspeed.runtime import config

    return getattr(config, f"_REMOVED_{level}_CONFIG_KEYS", {})
