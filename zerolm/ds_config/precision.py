"""Decide the precision of a run, and check the blocks of the JSON that concern it.

An explicit `bf16` or `fp16` block decides; `--precision` decides where the file says "auto" or
nothing. `rules` and preflight call this module. Versions: DeepSpeed 0.19.8.
"""

import copy
from typing import Any

from zerolm.common.values import shown
from zerolm.config.settings import Settings
from zerolm.ds_config.profile import Profile, block, weight_precision

BF16_NAMES = ("bfloat16", "bf16", "torch.bfloat16")  # as deepspeed.runtime.config.DtypeEnum
CPU_ADAM = frozenset({"adam", "adamw"})


def with_precision(
    profile: Profile, settings: Settings, problems: list[str]
) -> tuple[Profile, list[str]]:
    """Return the profile with an explicit precision, and a notice if the file left it open.

    Args:
        problems: a contradiction between `--precision` and the file is appended.
    """
    flag, where = settings.precision, settings.where("precision")
    chosen, reason = weight_precision(profile.json, flag)
    if flag is not None and (against := _contradiction(profile, flag, chosen, reason)):
        problems.append(
            f'{profile.name}: {against}, contradicts {where} {flag}. Set it to "auto", or remove '
            f"the flag."
        )
        return profile, []
    if reason.endswith(": true"):  # the file decides
        return profile, []
    resolved: dict[str, Any] = copy.deepcopy(profile.json)
    for name in ("bf16", "fp16"):
        key = _key(profile, name)
        if name == chosen or block(resolved, key).get("enabled") not in (None, False):
            resolved[key] = {**block(resolved, key), "enabled": name == chosen}
    off = [profile.block(_key(profile, name)).get("enabled") for name in ("bf16", "fp16")]
    if flag is None and (off == [False, False] or profile.compute_precision != profile.precision):
        return Profile.parse(resolved, profile.name), []  # explicit fp32, or torch_autocast
    why = f"as {where} says" if flag is not None else f"since {reason}"
    others = ", ".join(name for name in ("bf16", "fp16", "fp32") if name != chosen)
    notice = f"{profile.name}: training in {chosen}, {why}"
    notice += "" if flag is not None else f"; --precision chooses another ({others})"
    return Profile.parse(resolved, profile.name), [notice]


def _contradiction(profile: Profile, flag: str, chosen: str, reason: str) -> str:
    """Return the explicit value of the JSON that `--precision` contradicts, or nothing."""
    if chosen != flag:
        return reason
    enabled = profile.block(_key(profile, flag)).get("enabled") if flag != "fp32" else None
    return f"{_key(profile, flag)}.enabled: false" if enabled is False else ""


def _key(profile: Profile, name: str) -> str:
    """Return the key of a precision's block, which may be DeepSpeed's older `bfloat16`."""
    old = name == "bf16" and "bfloat16" in profile.json and "bf16" not in profile.json
    return "bfloat16" if old else name


# -------------------------------------------------------------------------------------------------
# Rules


def precision_problems(profile: Profile, on_gpu: bool) -> list[str]:
    """Find precisions that DeepSpeed or this machine does not support."""
    problems = []
    bf16_key = _key(profile, "bf16")
    fp16, bf16 = profile.block("fp16"), profile.block(bf16_key)
    if fp16.get("enabled") is True and bf16.get("enabled") is True:
        problems.append(
            f"fp16.enabled: true, but {bf16_key}.enabled is true too. Only one may be: remove fp16."
        )
    elif profile.precision == "fp16" and not on_gpu and not cpu_has_fp16():
        problems.append("fp16.enabled: true, is not supported by this CPU. Use bf16 instead.")
    if profile.grad_accum_dtype not in (None, "fp32", "fp16", "bf16"):
        problems.append(
            f"data_types.grad_accum_dtype: {shown(profile.grad_accum_dtype)}, must be fp32, fp16 "
            f"or bf16. Correct it."
        )
    stored = profile.block("data_types").get("param_dtype")
    if stored not in (None, profile.precision):
        problems.append(
            f"data_types.param_dtype: {shown(stored)}, but the weights are {profile.precision}. "
            f"Remove the key, or enable that precision."
        )
    if bf16.get("check_grad_overflow") is False:
        problems.append(
            f"{bf16_key}.check_grad_overflow: false, would step on non-finite gradients and report "
            f"their norm as -1. Remove the key."
        )
    problems += _master_problems(profile)
    return problems + _autocast_problems(profile)


def _master_problems(profile: Profile) -> list[str]:
    """Check 16-bit master weights (runtime/base_optimizer.py, _configure_master_weights)."""
    found = []
    for name in ("bf16", "fp16"):
        key = _key(profile, name)
        masters = f"{key}.{name}_master_weights_and_grads"
        given = profile.block(key)
        states = name == "bf16" and given.get("bf16_optimizer_states") is True
        if given.get(f"{name}_master_weights_and_grads") is not True:
            if states:
                found.append(
                    f"{key}.bf16_optimizer_states: true, needs {masters}. Set that to true too, or "
                    f"remove the key."
                )
            continue
        offload = profile.optimizer_offload != "none"
        cpu_adam = profile.optimizer.kind in CPU_ADAM
        cpu_adam = cpu_adam and not profile.optimizer.params.get("torch_adam")
        if profile.precision != name:
            found.append(
                f"{masters}: true, needs {name}, but the weights are {profile.precision}. Remove "
                f"the key."
            )
        elif (offload or not states) and not (offload and cpu_adam):
            instead = " or bf16_optimizer_states" if name == "bf16" and not offload else ""
            found.append(
                f"{masters}: true, needs zero_optimization.offload_optimizer with Adam or AdamW"
                f"{instead}. Add it, or remove the key."
            )
        elif profile.uses_bf16_optimizer:
            found.append(
                f"{masters}: true, has no effect at stage 1 with data_types.grad_accum_dtype fp32, "
                f"where DeepSpeed uses another optimizer class. Use stage 2, or remove the key."
            )
    return found


def cpu_has_fp16() -> bool:
    """Return whether this CPU supports fp16 matmuls; DeepSpeed asks oneDNN in the same way."""
    import torch

    supported = getattr(torch.ops.mkldnn, "_is_mkldnn_fp16_supported", None)
    return torch.backends.mkldnn.is_available() and supported is not None and bool(supported())


def _autocast_problems(profile: Profile) -> list[str]:
    autocast = profile.block("torch_autocast")
    if autocast.get("enabled") is not True:
        return []
    problems = []
    dtype = autocast.get("dtype")
    if dtype not in BF16_NAMES:
        # Without a dtype torch chooses float16 on a GPU, without a loss scale. With float16 a
        # GradScaler skips steps that engine.was_step_applied() reports as taken.
        problems.append(
            f"torch_autocast.dtype: {'missing' if dtype is None else shown(dtype)}, must be "
            f"bfloat16, since DeepSpeed does not report steps that float16 autocast skips. Write "
            f'"dtype": "bfloat16".'
        )
    if profile.precision == "fp16":
        problems.append(
            "torch_autocast.enabled: true, but fp16.enabled is true too. Only one may be: remove "
            "fp16."
        )
    if profile.zero.get("zero_quantized_weights") is True:
        problems.append(
            "torch_autocast.enabled: true, does not work with zero_quantized_weights. Remove one."
        )
    return problems
