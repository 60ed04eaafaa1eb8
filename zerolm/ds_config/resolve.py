"""DeepSpeed's JSON with nothing left open: every "auto", and what DeepSpeed would fill in silently.

After ds_rules.py has found no problem. What comes out goes to `deepspeed.initialize` and run.json.
"""

import copy
from collections.abc import Mapping
from typing import Any

from zerolm import muon
from zerolm.ds_config import (
    SCHEDULES,
    block,
    optimizer_offload,
    precision,
    zero_stage,
)
from zerolm.ds_optimizers import ADAM, takes_betas
from zerolm.ds_schema import AUTO
from zerolm.parallel import TENSOR_KEY, degree
from zerolm.settings import Settings

ADAM_EPSILON = 1e-8
DEFAULT_CLIPPING = 1.0


def resolve(
    ds_config: Mapping[str, Any],
    settings: Settings,
    *,
    hidden_size: int | None,
    micro_batch_size: int,
    accumulation: int,
    replicas: int,
    on_gpu: bool,
    warmup_steps: int = 1,
    total_steps: int = 1,
) -> dict[str, Any]:
    """Return the config for `deepspeed.initialize`: no "auto" left, nothing left to defaults.

    Args:
        ds_config: without problems; it is not changed.
        settings: resolved ones.
        hidden_size: of the model; None leaves the bucket sizes to DeepSpeed's defaults.
        micro_batch_size: sequences per rank at once.
        accumulation: micro-batches per rank in a full batch.
        replicas: ranks, or groups of them, that have sequences of their own.
        warmup_steps, total_steps: optimizer steps, for a `scheduler` block.

    Source: transformers/integrations/deepspeed.py, HfTrainerDeepSpeedConfig (5.23).
    """
    resolved = copy.deepcopy(dict(ds_config))
    resolved["train_micro_batch_size_per_gpu"] = micro_batch_size
    resolved["gradient_accumulation_steps"] = accumulation
    resolved["train_batch_size"] = micro_batch_size * accumulation * replicas
    if degree(resolved, TENSOR_KEY) > 1:
        del resolved["train_batch_size"]  # DeepSpeed would multiply by all ranks
        # else the head of tied weights would give a rank's part of the logits
        resolved["tensor_parallel"]["vocab_parallel_lm_head"] = False
    if resolved.get("gradient_clipping", AUTO) == AUTO:
        # DeepSpeed's own default since 0.19; older ones did not clip. Here it stands in run.json.
        resolved["gradient_clipping"] = 0.0 if muon.chosen(ds_config) else DEFAULT_CLIPPING
    if "writer" in block(resolved, "checkpoint"):
        del resolved["checkpoint"]["writer"]  # --async_checkpoint says it from here on
    _resolve_precision(resolved)
    _resolve_zero(resolved, hidden_size)
    _resolve_optimizer(resolved, settings, on_gpu)
    if "scheduler" in resolved:
        _resolve_scheduler(resolved, settings, warmup_steps, total_steps)
    return _without_auto(resolved)


def _resolve_precision(resolved: dict[str, Any]) -> None:
    kind = precision(resolved)
    if "bfloat16" in resolved:  # DeepSpeed's older spelling
        resolved.setdefault("bf16", resolved.pop("bfloat16"))
    for key in ("bf16", "fp16"):
        if block(resolved, key).get("enabled") == AUTO:
            resolved[key]["enabled"] = kind == key


def _resolve_zero(resolved: dict[str, Any], hidden_size: int | None) -> None:
    zero = resolved.setdefault("zero_optimization", {})
    # Without a stage DeepSpeed runs stage 0, which cannot be right here (ds_rules.py).
    zero.setdefault("stage", zero_stage(resolved))
    if hidden_size is None:
        return
    sizes = {
        "reduce_bucket_size": hidden_size * hidden_size,
        "stage3_prefetch_bucket_size": int(0.9 * hidden_size * hidden_size),
        "stage3_param_persistence_threshold": 10 * hidden_size,
    }
    for key, size in sizes.items():
        if zero.get(key) == AUTO and (zero_stage(resolved) == 3 or not key.startswith("stage3")):
            zero[key] = size


def _resolve_optimizer(resolved: dict[str, Any], settings: Settings, on_gpu: bool) -> None:
    optimizer = resolved.setdefault("optimizer", {"type": "AdamW", "params": {}})
    params = optimizer.setdefault("params", {})
    adam = optimizer["type"].lower() in ADAM
    ours = {"lr", "eps", "weight_decay"} if adam or muon.chosen(resolved) else {"lr"}
    if takes_betas(resolved):
        ours.add("betas")
    wanted = {
        "lr": settings.learning_rate,
        "betas": [settings.beta1, settings.beta2],
        "eps": ADAM_EPSILON,
        "weight_decay": settings.weight_decay,
    }
    for key, value in wanted.items():
        if params.get(key) == AUTO or (key not in params and key in ours):
            params[key] = value
    on_plain_cpu = not on_gpu and optimizer_offload(resolved) == "none"
    if muon.chosen(resolved):
        muon.fill(params, on_plain_cpu=on_plain_cpu)
    if adam and on_plain_cpu:
        # DeepSpeed's FusedAdam would compile a CPU kernel for a minute at each fresh start; torch's
        # AdamW is the same arithmetic and needs no compiler.
        params.setdefault("torch_adam", True)
        if params["torch_adam"]:
            params.setdefault("fused", True)  # one pass over the states, not seven
            params.pop("bias_correction", None)


def _resolve_scheduler(
    resolved: dict[str, Any], settings: Settings, warmup_steps: int, total_steps: int
) -> None:
    kind = resolved["scheduler"]["type"]
    params = resolved["scheduler"].setdefault("params", {})
    if kind not in SCHEDULES:
        return
    wanted: dict[str, Any] = {"warmup_num_steps": max(1, warmup_steps)}
    if kind != "WarmupLR":
        wanted["total_num_steps"] = total_steps
    if kind == "WarmupCosineLR":
        low, high = settings.min_learning_rate, settings.learning_rate
        wanted["cos_min_ratio"] = low / high if low and high else 0.0
    else:
        wanted |= {"warmup_min_lr": 0, "warmup_max_lr": settings.learning_rate}
    for key, value in wanted.items():
        if params.get(key, AUTO) == AUTO:
            params[key] = value


def _without_auto(value: Any) -> Any:
    """Leave out keys that are still "auto": in DeepSpeed's own blocks it means the default."""
    if isinstance(value, dict):
        kept = {key: inner for key, inner in value.items() if inner != AUTO}
        kept |= {key: inner for key, inner in value.items() if key == "keep_in_fp32_modules"}
        return {key: _without_auto(inner) for key, inner in kept.items()}
    return value
