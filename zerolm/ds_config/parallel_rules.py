"""Checks the options that a run combines with tensor or sequence parallelism.

Each rule was found by running DeepSpeed or reading its source; DeepSpeed itself checks only a few
of them. tests/end_to_end/test_parallel.py compares the loss curves of allowed combinations with
plain PyTorch; all other combinations are refused. docs/parallelism.md explains the reasons.
Versions: DeepSpeed 0.19.8.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from zerolm.common.values import shown
from zerolm.config.settings import SELECTIVE, Settings, flags_of
from zerolm.ds_config.profile import Profile, is_degree

if TYPE_CHECKING:
    from transformers import PretrainedConfig

TENSOR_KEY, SEQUENCE_KEY = "tensor_parallel.autotp_size", "sequence_parallel_size"
MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
OPTIMIZERS = ("adam", "adamw")


def ds_problems(profile: Profile, world_size: int) -> list[str]:
    """Find JSON keys that tensor or sequence parallelism does not support."""
    tensor = profile.json.get("tensor_parallel")
    if tensor is not None and not isinstance(tensor, Mapping):
        return [
            f"tensor_parallel: {shown(tensor)} must be an object. Write "
            f'{{"autotp_size": N}}, or remove it.'
        ]
    written = {
        TENSOR_KEY: profile.block("tensor_parallel").get("autotp_size"),
        SEQUENCE_KEY: profile.json.get(SEQUENCE_KEY),
    }
    for key, value in written.items():
        if value is None or (value == 0 and not isinstance(value, bool)):
            continue
        if not is_degree(value):
            return [f"{key}: {shown(value)[:60]} must be a positive whole number. Correct it."]
        if world_size % value:
            return [f"{key}: {value} must divide the world size {world_size}. Change one of them."]
    degrees = [profile.tensor_parallel, profile.sequence_parallel]
    if max(degrees) == 1:
        return []
    if min(degrees) > 1:
        return [
            f"{TENSOR_KEY}: {degrees[0]}, and {SEQUENCE_KEY}: {degrees[1]}. DeepSpeed supports "
            f"only one set of groups. Remove one of them."
        ]
    key = TENSOR_KEY if profile.tensor_parallel > 1 else SEQUENCE_KEY
    problems = [
        f"tensor_parallel.{name}: not supported, because the model's class decides how layers are "
        "sharded. Remove the key."
        for name in profile.block("tensor_parallel")
        if name != "autotp_size"
    ]
    problems += _tensor_problems(profile) if key == TENSOR_KEY else _sequence_problems(profile)
    return problems + _shared_problems(profile, key)


def _tensor_problems(profile: Profile) -> list[str]:
    if profile.zero_stage != 3:
        return []
    # zero/stage3.py, _grad_norm_counts_every_rank: zero.Init partitions everything over all ranks
    # before the tensor-parallel groups exist. The sharded matrices are then partitioned over
    # replicas.
    return [
        f"{TENSOR_KEY}: needs ZeRO stage 1 or 2, got 3: DeepSpeed would partition the sharded "
        f"matrices over replicas and everything else over all ranks, which our checkpoints cannot "
        f"record. Use stage 2, or remove the block."
    ]


def _sequence_problems(profile: Profile) -> list[str]:
    if profile.zero.get("reduce_scatter") is False:
        # zero/stage3.py: without it, small gradients are divided by a different number than large
        # ones.
        return [
            f"{SEQUENCE_KEY}: needs zero_optimization.reduce_scatter, got false: DeepSpeed would "
            f"average small and large gradients differently. Remove that key."
        ]
    if (
        profile.zero_stage == 1
        and profile.precision == "bf16"
        and profile.grad_accum_dtype == "fp32"
    ):
        # bf16_optimizer.py, get_grads_for_norm: treats the sequence group as a tensor group, so
        # only the group's first rank contributes gradients to the norm.
        return [
            f"{SEQUENCE_KEY}: needs ZeRO stage 2 or 3 in bf16 with fp32 accumulation: DeepSpeed's "
            f"BF16_Optimizer treats the ranks as a tensor group in its gradient norm. Use stage 2."
        ]
    return []


def _shared_problems(profile: Profile, key: str) -> list[str]:
    found = []
    if profile.optimizer.kind not in OPTIMIZERS:
        found.append(f"optimizer.type: {profile.optimizer.name}. Use AdamW")
    for name, device in profile.offloads.items():
        if device != "none":
            found.append(f"zero_optimization.{name}. Remove it")
    if profile.precision == "fp16":
        found.append("fp16. Use bf16")
    if profile.block("torch_autocast").get("enabled") is True:
        found.append("torch_autocast. Use bf16")
    for name in ("zero_quantized_weights", "zero_quantized_gradients"):
        if profile.zero.get(name) is True:
            found.append(f"zero_optimization.{name}. Remove it")
    secondary = profile.zero.get("zero_hpz_partition_size", 1)
    if isinstance(secondary, int) and secondary > 1:
        found.append("zero_optimization.zero_hpz_partition_size. Remove it")
    for name, default in (("prescale_gradients", False), ("gradient_predivide_factor", 1)):
        if (profile.json.get(name) or default) != default:
            found.append(f"{name}. Remove it")
    if profile.json.get("scheduler") is not None:
        found.append("scheduler. Use --schedule")
    return [f"{key}: not supported together with {what}, or remove {key}." for what in found]


def parallel_key(profile: Profile, world_size: int) -> str | None:
    """Return the JSON key that enables tensor or sequence parallelism, or None for neither."""
    layout = profile.layout(world_size)
    if layout.replica_size == 1:
        return None
    return TENSOR_KEY if layout.tensor > 1 else SEQUENCE_KEY


def model_problems(
    settings: Settings, config: "PretrainedConfig", profile: Profile, world_size: int
) -> list[str]:
    """Find properties of the model, and flags, that the profile's parallelism does not support.

    Args:
        profile: a profile in which `ds_problems` finds no problems.
    """
    layout, key = profile.layout(world_size), parallel_key(profile, world_size)
    if key is None:
        return []
    name, size = f"{settings.deepspeed_config}: {key}", layout.replica_size
    if config.model_type not in MODEL_TYPES:
        return [
            f"{name}: {size} is not supported for {config.model_type} ({settings.model_config}), "
            f"only for {', '.join(MODEL_TYPES)}. Remove it, or use another model."
        ]
    divided = ["num_attention_heads", "num_key_value_heads"]
    divided += ["intermediate_size", "vocab_size"] if layout.tensor > 1 else []
    text = config.get_text_config()
    found = [
        f"{name}: {size} must divide {what} {getattr(text, what)} ({settings.model_config}). "
        f"Change one of them."
        for what in divided
        if getattr(text, what) % size
    ]
    if settings.compile:
        found.append(f"{name}: not supported together with --compile. Remove one of them.")
    if settings.gradient_checkpointing == SELECTIVE:
        found.append(
            f"{settings.where('gradient_checkpointing')}: selective is not supported together with "
            f"{name}. Use full, or remove one of them."
        )
    if layout.tensor > 1:
        return found + _tensor_flags(settings, name)
    return found + _sequence_flags(settings, config, name, size)


def _tensor_flags(settings: Settings, name: str) -> list[str]:
    return [
        f"{settings.where(flag)}: not supported together with {name}: {why}. Remove the flag"
        + (", or evaluate an export." if about["group"] == "evaluation" else ".")
        for flag, about in flags_of(settings).items()
        if (why := about["no_tensor_parallel"]) and getattr(settings, flag)
    ]


def _sequence_flags(
    settings: Settings, config: "PretrainedConfig", name: str, size: int
) -> list[str]:
    found = []
    if settings.seq_len and settings.seq_len % size:
        found.append(
            f"{name}: {size} must divide {settings.where('seq_len')} {settings.seq_len}. Change "
            f"one of them."
        )
    if settings.document_mask:
        # ulysses_sp.py, uattn_wrapper: discards the mask and uses causal attention
        found.append(
            f"{settings.where('document_mask')}: true is not supported together with {name}: "
            f"DeepSpeed's attention discards every mask, so tokens would attend across documents. "
            f"Remove one of them."
        )
    if settings.attn_implementation in ("eager", "flex_attention", "varlen"):
        found.append(
            f"{settings.where('attn_implementation')}: {settings.attn_implementation} is not "
            f"supported together with {name}. Use sdpa or auto."
        )
    text: Any = config.get_text_config()
    window = getattr(text, "sliding_window", None)
    if window and getattr(text, "use_sliding_window", True):
        found.append(
            f"{name}: {size} is not supported for a model with sliding_window {window} "
            f"({settings.model_config}): DeepSpeed's attention discards every mask. Remove one of "
            f"them."
        )
    return found
