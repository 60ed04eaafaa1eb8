"""Resolves a profile: replaces every "auto", and makes DeepSpeed's defaults explicit.

Runs after `rules` has found no problems. The result is passed to `deepspeed.initialize` and saved
in run.json.
"""

import copy
from collections.abc import Sequence
from typing import Any

from zerolm.common.errors import reason
from zerolm.common.remembered import recall
from zerolm.config.settings import Settings
from zerolm.ds_config import muon
from zerolm.ds_config.gathering import persistence_threshold, prefetch_bucket
from zerolm.ds_config.implied import DEEPSPEED_SCHEDULES
from zerolm.ds_config.optimizers import ADAM, cycles_betas, takes_betas, uses_torch_adam
from zerolm.ds_config.profile import AUTO, Profile, block, is_number
from zerolm.engine.deepspeed_launcher import accelerator_kind

ADAM_EPSILON = 1e-8
DEFAULT_CLIPPING = 1.0


def resolve_profile(
    profile: Profile,
    settings: Settings,
    *,
    hidden_size: int | None,
    micro_batch_size: int,
    accumulation: int,
    replicas: int,
    warmup_steps: int,
    total_steps: int,
    gathered_block: Sequence[int] = (),
) -> Profile:
    """Return the profile for `deepspeed.initialize`, without "auto" and with defaults filled in.

    Args:
        profile: a profile without problems.
        settings: resolved.
        hidden_size: the model's hidden size; None: use DeepSpeed's default bucket sizes.
        accumulation: number of micro-batches per optimizer step.
        replicas: number of data-parallel replicas.
        warmup_steps, total_steps: numbers of optimizer steps, for a `scheduler` block.
        gathered_block: number of values in each parameter of the largest block, if ZeRO-3 gathers
            blocks at once.

    Source: transformers/integrations/deepspeed.py, HfTrainerDeepSpeedConfig (5.23).
    """
    resolved = copy.deepcopy(profile.json)
    resolved["train_micro_batch_size_per_gpu"] = micro_batch_size
    resolved["gradient_accumulation_steps"] = accumulation
    resolved["train_batch_size"] = micro_batch_size * accumulation * replicas
    if profile.tensor_parallel > 1:
        del resolved["train_batch_size"]  # DeepSpeed's check would multiply by the world size
        # If true, a head with tied weights would return only the rank's shard of the logits.
        resolved["tensor_parallel"]["vocab_parallel_lm_head"] = False
    if resolved.get("gradient_clipping", AUTO) == AUTO:
        # DeepSpeed's default since 0.19, made explicit so run.json records it.
        resolved["gradient_clipping"] = 0.0 if profile.uses_muon else DEFAULT_CLIPPING
    if "writer" in block(resolved, "checkpoint"):
        del resolved["checkpoint"]["writer"]  # `implied` converts it to --async_checkpoint
    for monitor in ("wandb", "tensorboard", "csv_monitor", "comet"):
        resolved.pop(monitor, None)  # `implied` adopts their settings for our trackers
    if block(resolved, "comms_logger").get("enabled") is not True:
        resolved.pop("comms_logger", None)  # the block's presence alone enables it in DeepSpeed
    # DeepSpeed's throughput timer waits for the device twice in every step.
    resolved.setdefault("timers", {}).setdefault("throughput", {}).setdefault("enabled", False)
    _resolve_precision(resolved, profile.precision)
    if profile.uses_bf16_optimizer:
        # This makes DeepSpeed add each gradient to its float32 sum and free it during the backward
        # pass.
        resolved.setdefault("bf16", {}).setdefault("immediate_grad_update", True)
    _resolve_zero(resolved, profile, hidden_size, gathered_block)
    if replicas == 1 and profile.zero_stage < 3 and profile.optimizer_offload == "none":
        _leave_out_communication(resolved, profile)
    _resolve_optimizer(resolved, profile, settings)
    if "scheduler" in resolved:
        _resolve_scheduler(resolved, settings, warmup_steps, total_steps)
    return Profile.parse(_without_auto(resolved), profile.name)


def deepspeed_problems(profile: Profile) -> list[str]:
    """Return why DeepSpeed's own config class refuses a profile, as it would later in the engine.

    Args:
        profile: a resolved profile in which `schema` and `rules` have found no problems.
    """
    inputs = [profile.name, profile.json, accelerator_kind()]
    return recall("deepspeed-config", inputs, lambda: _refusals(profile))


def _refusals(profile: Profile) -> list[str]:
    from deepspeed import DeepSpeedConfig

    config = copy.deepcopy(profile.json)
    config.pop("train_batch_size", None)  # DeepSpeed would compare it with a world size of 1
    config.pop("aio", None)  # `rules` checks this block; DeepSpeed would query this machine's GPU
    try:
        DeepSpeedConfig(config)
    except Exception as error:  # DeepSpeed raises AssertionError, ValueError and its own classes
        text = reason(error, named=False)
        return [f"{profile.name}: DeepSpeed refuses it: {text}. Correct the file."]
    return []


def _leave_out_communication(resolved: dict[str, Any], profile: Profile) -> None:
    """Avoid waits and copies for communication if there is one replica and so nothing to sum."""
    resolved["zero_optimization"]["overlap_comm"] = False
    # Stage 2 converts the gradients of each micro-batch, which have the weights' precision. Stage 1
    # converts their sum, which would then be rounded.
    if profile.zero_stage == 2 and not resolved.get("prescale_gradients"):
        resolved["communication_data_type"] = profile.precision


def _resolve_precision(resolved: dict[str, Any], precision: str) -> None:
    if "bfloat16" in resolved:  # DeepSpeed's older spelling
        resolved.setdefault("bf16", resolved.pop("bfloat16"))
    for key in ("bf16", "fp16"):
        if block(resolved, key).get("enabled") == AUTO:
            resolved[key]["enabled"] = precision == key


def _resolve_zero(
    resolved: dict[str, Any],
    profile: Profile,
    hidden_size: int | None,
    gathered_block: Sequence[int],
) -> None:
    zero, stage = resolved.setdefault("zero_optimization", {}), profile.zero_stage
    zero["stage"] = stage  # DeepSpeed's default is stage 0
    zero.pop(muon.IN_MEMORY, None)
    if profile.uses_muon and stage == 3:
        zero.setdefault("reduce_scatter", False)
    if hidden_size is None:
        return
    sizes = {
        "reduce_bucket_size": hidden_size * hidden_size,
        "stage3_prefetch_bucket_size": prefetch_bucket(profile, gathered_block, hidden_size),
        "stage3_param_persistence_threshold": persistence_threshold(hidden_size),
    }
    for key, size in sizes.items():
        if zero.get(key) == AUTO and (stage == 3 or not key.startswith("stage3")):
            zero[key] = size


def _resolve_optimizer(resolved: dict[str, Any], profile: Profile, settings: Settings) -> None:
    optimizer = resolved.setdefault("optimizer", {"type": "AdamW", "params": {}})
    params = optimizer.setdefault("params", {})
    adam = profile.optimizer.kind in ADAM
    filled_if_missing = {"lr", "eps", "weight_decay"} if adam or profile.uses_muon else {"lr"}
    if takes_betas(profile):
        filled_if_missing.add("betas")
    values = {
        "lr": settings.learning_rate,
        "betas": [settings.beta1, settings.beta2],
        "eps": ADAM_EPSILON,
        "weight_decay": settings.weight_decay,
    }
    if cycles_betas(profile):
        del values["betas"]
    for key, value in values.items():
        if params.get(key) == AUTO or (key not in params and key in filled_if_missing):
            params[key] = value
    if profile.uses_muon:
        muon.fill_defaults(params)
    if (adam or profile.uses_muon) and profile.optimizer_offload == "none":
        params["torch_adam"] = uses_torch_adam(profile)
        if adam and params["torch_adam"]:
            params.setdefault("fused", True)  # one pass over the states instead of seven
            params.pop("bias_correction", None)


def _resolve_scheduler(
    resolved: dict[str, Any], settings: Settings, warmup_steps: int, total_steps: int
) -> None:
    kind = resolved["scheduler"]["type"]
    params = resolved["scheduler"].setdefault("params", {})
    if is_number(steps := params.get("warmup_num_steps")):
        params["warmup_num_steps"] = max(1, int(steps))  # an integer, at least DeepSpeed's minimum
    if kind not in DEEPSPEED_SCHEDULES:
        return
    values: dict[str, Any] = {"warmup_num_steps": max(1, warmup_steps)}
    if kind != "WarmupLR":
        values["total_num_steps"] = total_steps
    if kind == "WarmupCosineLR":
        low, high = settings.min_learning_rate, settings.learning_rate
        values["cos_min_ratio"] = low / high if low and high else 0.0
    else:
        values |= {"warmup_min_lr": 0, "warmup_max_lr": settings.learning_rate}
    for key, value in values.items():
        if params.get(key, AUTO) == AUTO:
            params[key] = value


def _without_auto(value: Any) -> Any:
    """Drop keys that are still "auto", so DeepSpeed uses its defaults."""
    if isinstance(value, dict):
        kept = {key: inner for key, inner in value.items() if inner != AUTO}
        kept |= {key: inner for key, inner in value.items() if key == "keep_in_fp32_modules"}
        return {key: _without_auto(inner) for key, inner in kept.items()}
    return value
