"""What tensor and sequence parallelism work with: each rule found by running, or in the source.

DeepSpeed checks little of it before the first step, and some of it never. What is allowed here has
its curve compared with that of plain PyTorch in tests/end_to_end/test_parallel.py; what has not is
refused. docs/parallelism.md has the reasons at length. Versions: DeepSpeed 0.19.8.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from zerolm.ds_config import block, offload_device, optimizer_type, precision, zero_stage
from zerolm.parallel import SEQUENCE_KEY, TENSOR_KEY, degree, is_degree, layout_of
from zerolm.recomputation import SELECTIVE
from zerolm.settings import Settings
from zerolm.values import shown

if TYPE_CHECKING:
    from transformers import PretrainedConfig

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
OPTIMIZERS = ("adam", "adamw")


def ds_problems(ds_config: Mapping[str, Any], world_size: int) -> list[str]:
    """Find what a ds config asks for beside tensor or sequence parallelism that it cannot have.

    Args:
        ds_config: as the user wrote it.
    """
    tensor = ds_config.get("tensor_parallel")
    if tensor is not None and not isinstance(tensor, Mapping):
        return [f"tensor_parallel: {shown(tensor)}, must be an object. Write it, or remove it."]
    for key in (TENSOR_KEY, SEQUENCE_KEY):
        value = degree(ds_config, key)
        if not is_degree(value):
            return [f"{key}: {shown(value)[:60]}, must be a positive whole number. Correct it."]
        if world_size % value:
            return [f"{key}: {value}, must divide the world size {world_size}. Change one of them."]
    degrees = [degree(ds_config, key) for key in (TENSOR_KEY, SEQUENCE_KEY)]
    if max(degrees) == 1:
        return []
    if min(degrees) > 1:
        return [
            f"{TENSOR_KEY}: {degrees[0]}, and {SEQUENCE_KEY}: {degrees[1]}. DeepSpeed takes one "
            f"set of groups only. Remove one of them."
        ]
    key = TENSOR_KEY if degrees[0] > 1 else SEQUENCE_KEY
    problems = [
        f"tensor_parallel.{name}: not supported, the layers are cut as the model's class says. "
        f"Remove the key."
        for name in block(ds_config, "tensor_parallel")
        if name != "autotp_size"
    ]
    problems += _tensor_problems(ds_config) if key == TENSOR_KEY else _sequence_problems(ds_config)
    problems += _shared_problems(ds_config, key)
    return problems


def _tensor_problems(ds_config: Mapping[str, Any]) -> list[str]:
    if zero_stage(ds_config) != 3:
        return []
    # zero/stage3.py, _grad_norm_counts_every_rank: zero.Init partitions everything over all ranks
    # before there are tensor groups, and the matrices, once cut, are partitioned over replicas.
    return [
        f"{TENSOR_KEY}: needs ZeRO stage 1 or 2, got 3: DeepSpeed would partition the cut matrices "
        f"over replicas and all else over all ranks, which checkpoints here cannot say. Use stage "
        f"2, or remove the block."
    ]


def _sequence_problems(ds_config: Mapping[str, Any]) -> list[str]:
    if block(ds_config, "zero_optimization").get("reduce_scatter") is False:
        # zero/stage3.py: then small gradients are divided by one number, large ones by another.
        return [
            f"{SEQUENCE_KEY}: needs zero_optimization.reduce_scatter, got false: gradients would "
            f"not all be averaged alike. Remove that key."
        ]
    accumulation = block(ds_config, "data_types").get("grad_accum_dtype")
    bf16 = precision(ds_config) == "bf16" and accumulation == "fp32"
    if zero_stage(ds_config) == 1 and bf16:
        # bf16_optimizer.py, get_grads_for_norm: takes the sequence group for a tensor group, and
        # has no gradients left to take the norm of on its other ranks.
        return [
            f"{SEQUENCE_KEY}: needs ZeRO stage 2 or 3 in bf16 with fp32 accumulation: DeepSpeed's "
            f"BF16_Optimizer takes the ranks for a tensor group in its norm. Use stage 2."
        ]
    return []


def _shared_problems(ds_config: Mapping[str, Any], key: str) -> list[str]:
    zero = block(ds_config, "zero_optimization")
    found = []
    if optimizer_type(ds_config).lower() not in OPTIMIZERS:
        found.append(f"optimizer.type: {optimizer_type(ds_config)}. Use AdamW")
    for what in ("optimizer", "param"):
        if offload_device(ds_config, what) != "none":
            found.append(f"zero_optimization.offload_{what}. Remove it")
    if precision(ds_config) == "fp16":
        found.append("fp16. Use bf16")
    if block(ds_config, "torch_autocast").get("enabled") is True:
        found.append("torch_autocast. Use bf16")
    for name in ("zero_quantized_weights", "zero_quantized_gradients"):
        if zero.get(name) is True:
            found.append(f"zero_optimization.{name}. Remove it")
    secondary = zero.get("zero_hpz_partition_size", 1)
    if isinstance(secondary, int) and secondary > 1:
        found.append("zero_optimization.zero_hpz_partition_size. Remove it")
    for name in ("prescale_gradients", "gradient_predivide_factor"):
        if ds_config.get(name) not in (None, False, 1, 1.0):
            found.append(f"{name}. Remove it")
    if ds_config.get("scheduler") is not None:
        found.append("scheduler. Use --schedule")
    return [f"{key}: not supported together with {what}, or remove {key}." for what in found]


def model_problems(
    settings: Settings, config: "PretrainedConfig", ds_config: Mapping[str, Any], world_size: int
) -> list[str]:
    """Find what a model, or a flag, cannot have together with the layout of a ds config.

    Args:
        ds_config: without problems of its own, see `ds_problems`; else nothing is found.
    """
    layout = layout_of(ds_config, world_size)
    if layout.replica_size == 1:
        return []
    key = TENSOR_KEY if layout.tensor > 1 else SEQUENCE_KEY
    name, size = f"{settings.deepspeed_config}: {key}", layout.replica_size
    found = []
    if config.model_type not in FAMILIES:
        return [
            f"{name}: {size}, not supported for {config.model_type} ({settings.model_config}); it "
            f"is for {', '.join(FAMILIES)}. Remove it, or use another model."
        ]
    text = config.get_text_config()
    for what in ("num_attention_heads", "num_key_value_heads"):
        if getattr(text, what) % size:
            found.append(
                f"{name}: {size}, must divide {what} {getattr(text, what)} "
                f"({settings.model_config}). Change one of them."
            )
    if settings.compile:
        found.append(f"{name}: not supported together with --compile. Remove one of them.")
    if settings.gradient_checkpointing == SELECTIVE:
        found.append(
            f"{settings.where('gradient_checkpointing')}: selective, not supported together with "
            f"{name}. Use full, or remove one of them."
        )
    if layout.tensor > 1:
        return found + _tensor_flags(settings, config, name, size)
    return found + _sequence_flags(settings, config, name, size)


def _tensor_flags(
    settings: Settings, config: "PretrainedConfig", name: str, size: int
) -> list[str]:
    text, found = config.get_text_config(), []
    for what in ("intermediate_size", "vocab_size"):
        if getattr(text, what) % size:
            found.append(
                f"{name}: {size}, must divide {what} {getattr(text, what)} "
                f"({settings.model_config}). Change one of them."
            )
    flags = {
        "loss_chunk_tokens": "the output head is one of DeepSpeed's",
        "hellaswag": "each rank would have other texts, and a part of the matrices",
        "eval_tasks": "each rank would have other texts, and a part of the matrices",
        "prompts": "each rank would have other texts, and a part of the matrices",
    }
    for flag, why in flags.items():
        if getattr(settings, flag):
            found.append(
                f"{settings.where(flag)}: not supported together with {name}: {why}. Remove the "
                f"flag" + (", or evaluate an export." if "texts" in why else ".")
            )
    return found


def _sequence_flags(
    settings: Settings, config: "PretrainedConfig", name: str, size: int
) -> list[str]:
    found = []
    if settings.seq_len and settings.seq_len % size:
        found.append(
            f"{name}: {size}, must divide {settings.where('seq_len')} {settings.seq_len}. Change "
            f"one of them."
        )
    if settings.document_mask:
        # ulysses_sp.py, uattn_wrapper: discards the mask, and attends by causality alone
        found.append(
            f"{settings.where('document_mask')}: true, not supported together with {name}: "
            f"DeepSpeed's attention drops every mask, so that documents would not be kept apart. "
            f"Remove one of them."
        )
    if settings.attn_implementation in ("eager", "flex_attention"):
        found.append(
            f"{settings.where('attn_implementation')}: {settings.attn_implementation}, not "
            f"supported together with {name}. Use sdpa or auto."
        )
    text = config.get_text_config()
    window = getattr(text, "sliding_window", None)
    if window and getattr(text, "use_sliding_window", True):
        found.append(
            f"{name}: {size}, not supported for a model with sliding_window {window} "
            f"({settings.model_config}): DeepSpeed's attention drops every mask. Remove one."
        )
    return found
