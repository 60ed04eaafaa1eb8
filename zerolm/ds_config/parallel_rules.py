"""Checks the options that a run combines with tensor or sequence parallelism, or with groups of
ranks (`--shard_within`).

Each rule was found by running DeepSpeed or reading its source; DeepSpeed itself checks only a few
of them. tests/end_to_end/test_parallel.py compares the loss curves of allowed combinations with
plain PyTorch; all other combinations are refused. docs/parallelism.md explains the reasons.
Versions: DeepSpeed 0.19.8.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from zerolm.common.values import shown
from zerolm.config.settings import SELECTIVE, Settings, flags_of
from zerolm.distributed.layout import Layout
from zerolm.ds_config.profile import Profile, is_degree
from zerolm.ds_config.topology import (
    KEYS,
    LAYERS_KEY,
    SEQUENCE_KEY,
    STAGES_KEY,
    TENSOR_KEY,
    layout_of,
)
from zerolm.engine.reduction_choice import KEY as REDUCTION_KEY

if TYPE_CHECKING:
    from transformers import PretrainedConfig

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
    if problems := _stage_problems(profile, world_size):
        return problems
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


def _stage_problems(profile: Profile, world_size: int) -> list[str]:
    """Return what is wrong with the block `pipeline` itself; `zerolm.plan.stage_rules` refuses what
    stages are not combined with.
    """
    written = profile.json.get("pipeline")
    if written is None:
        return []
    if not isinstance(written, Mapping) or not written.keys() <= {"stages", "layers"}:
        return [
            f'pipeline: {shown(written)[:60]} must be an object with "stages", and perhaps '
            f'"layers". Write {{"stages": N}}, or remove it.'
        ]
    stages: Any = written.get("stages")
    layers = written.get("layers")
    if not is_degree(stages):
        return [f"{STAGES_KEY}: {shown(stages)[:60]} must be a positive whole number. Correct it."]
    if world_size % stages:
        return [f"{STAGES_KEY}: {stages} must divide the world size {world_size}. Change one."]
    if layers is not None and len(profile.stage_layers) != stages:
        return [
            f"{LAYERS_KEY}: {shown(layers)[:60]} must be a list of {stages} positive whole "
            f"numbers, the blocks of each stage. Correct or remove it."
        ]
    if stages > 1 and (key := parallel_key(_forms(profile, world_size))):
        return [
            f"{STAGES_KEY}: {stages}, and {key}: losses were not compared with PyTorch's. Remove "
            f"one of them."
        ]
    return []


def _forms(profile: Profile, world_size: int) -> Layout:
    return Layout(world_size, profile.tensor_parallel, profile.sequence_parallel)


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


def parallel_key(layout: Layout) -> str | None:
    """Return the JSON key that enables tensor or sequence parallelism, or None for neither."""
    return KEYS[layout.forms[0]] if layout.forms else None


def model_problems(settings: Settings, config: "PretrainedConfig", layout: Layout) -> list[str]:
    """Find properties of the model, and flags, that the layout's parallelism does not support.

    Args:
        layout: of a profile in which `ds_problems` finds no problems.
    """
    if (key := parallel_key(layout)) is None:
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
    if settings.gradient_checkpointing == SELECTIVE:
        found.append(
            f"{settings.where('gradient_checkpointing')}: selective is not supported together with "
            f"{name}. Use full, or remove one of them."
        )
    found += [
        f"{settings.where(flag)}: not supported together with {name}: {why}. Remove the flag"
        + (", or evaluate an export." if about["group"] == "evaluation" else ".")
        for flag, about in flags_of(settings).items()
        if getattr(settings, flag)
        for form in layout.forms
        if (why := about["not_with"].get(form))
    ]
    return found if layout.tensor > 1 else found + _sequence_flags(settings, config, name, size)


def _sequence_flags(
    settings: Settings, config: "PretrainedConfig", name: str, size: int
) -> list[str]:
    found = []
    if settings.seq_len and settings.seq_len % size:
        found.append(
            f"{name}: {size} must divide {settings.where('seq_len')} {settings.seq_len}. Change "
            f"one of them."
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


def group_problems(profile: Profile, settings: Settings, world_size: int) -> list[str]:
    """Return why the profile or the number of ranks does not support `--shard_within`.

    Only DeepSpeed's BF16_Optimizer (0.19.8) supports such groups: it accepts a process group, and
    `OwnerReduction` sums its gradients.
    """
    size = settings.shard_within
    if size is None or not profile.zero_stage:
        return []
    parallel = parallel_key(layout_of(settings, profile, world_size))
    where = f"{settings.where('shard_within')}: {size}"
    found = [f"{where} {why}, or remove the flag." for why in _group_reasons(profile, parallel)]
    if world_size % size:
        found.append(f"{where} does not divide the world size {world_size}. Change one of them.")
    return found


def _group_reasons(profile: Profile, parallel: str | None) -> list[str]:
    """Return why the profile does not support groups, and what to change."""
    if profile.zero_stage != 1:
        return [
            f"needs ZeRO stage 1, but {profile.name} has {profile.zero_stage}. Use "
            f"ds_configs/zero1.json"
        ]
    beside = f"is not supported together with {profile.name}:"
    if parallel:
        return [f"{beside} {parallel}. Remove the key"]
    found = [
        f"{beside} zero_optimization.{name}: {device}. Remove the key"
        for name, device in profile.offloads.items()
        if device != "none"
    ]
    if profile.uses_muon:
        found.append(f"{beside} Muon needs complete matrices. Use AdamW")
    if profile.zero.get(REDUCTION_KEY) is True:
        found.append(f"{beside} zero_optimization.{REDUCTION_KEY}: true. Remove the key")
    for name, default in (("prescale_gradients", False), ("gradient_predivide_factor", 1)):
        if (profile.json.get(name) or default) != default:
            found.append(f"{beside} {name}. Remove the key")
    written = {
        "the precision": profile.precision,
        "data_types.grad_accum_dtype": profile.grad_accum_dtype or profile.precision,
        "communication_data_type": profile.communication_dtype or profile.precision,
    }
    needed = dict(zip(written, ("bf16", "fp32", "fp32"), strict=True))
    if written != needed:
        shown = ", ".join(f"{name} {value}" for name, value in written.items())
        found.append(
            f"needs bf16 weights and gradients that are summed and sent in fp32, but "
            f"{profile.name} has {shown}. Use ds_configs/zero1.json in bf16"
        )
    return found
