"""Selects the precision of a run, and checks the JSON blocks that concern it.

An explicit `bf16` or `fp16` block takes precedence; `--precision` applies if the file has "auto" or
no block; otherwise "auto" selects what suits the device. `rules` and preflight call this module.
Versions: DeepSpeed 0.19.8.
"""

import copy
from typing import Any, NamedTuple

from zerolm.common.values import shown
from zerolm.config.settings import PRECISIONS, Settings
from zerolm.distributed.device import Device
from zerolm.ds_config.profile import AUTO, Profile, block, weight_precision

BF16_NAMES = ("bfloat16", "bf16", "torch.bfloat16")  # as in deepspeed.runtime.config.DtypeEnum
CPU_ADAM = frozenset({"adam", "adamw"})


class Begun(NamedTuple):
    """The precision with which a run started.

    Attributes:
        path: path of the run.json that records the precision.
        device: name of the run's devices; empty if it was not recorded.
    """

    path: str
    precision: str
    device: str


def with_precision(
    profile: Profile,
    settings: Settings,
    device: Device,
    problems: list[str],
    begun: Begun | None = None,
) -> tuple[Profile, list[str]]:
    """Return the profile with an explicit precision, and notices about the choice.

    Args:
        problems: a contradiction between `--precision` and the file is appended.
        begun: the resumed run's precision, which is kept if the file has "auto".
    """
    flag, where = settings.precision, settings.where("precision")
    chosen, reason = weight_precision(profile.json, flag)
    if flag is not None and (against := _contradiction(profile, flag, chosen, reason)):
        problems.append(
            f'{profile.name}: {against} contradicts {where} {flag}. Set it to "auto", or remove '
            f"the flag."
        )
        return profile, []
    if reason.endswith(": true"):  # the file decides
        return profile, _emulation(profile, device, f'Write "{_key(profile, "bf16")}": '
                                   f'{{"enabled": "auto"}}')  # fmt: skip
    fix = f"Leave out {where} {flag}"
    notices = [f"{profile.name}: training in {chosen}, as {where} says"] if flag else []
    written = [profile.block(_key(profile, name)).get("enabled") for name in ("bf16", "fp16")]
    if flag is None and AUTO in written:
        chosen, notices = _automatic(profile, chosen, reason, device, begun)
        fix = "Resume the run on devices like those it started on, or start another run"
    elif flag is None and written[0] is not False and profile.compute_precision == "fp32":
        notices = [f"{profile.name}: training in fp32, since {reason}; {_others(chosen)}"]
    resolved: dict[str, Any] = copy.deepcopy(profile.json)
    for name in ("bf16", "fp16"):
        key = _key(profile, name)
        if name == chosen or block(resolved, key).get("enabled") not in (None, False):
            resolved[key] = {**block(resolved, key), "enabled": name == chosen}
    profile = Profile.parse(resolved, profile.name)
    if profile.precision == "fp32" and profile.compute_precision == "bf16":
        fix = "Remove torch_autocast"
    return profile, notices + _emulation(profile, device, fix)


def _automatic(
    profile: Profile, wanted: str, reason: str, device: Device, begun: Begun | None
) -> tuple[str, list[str]]:
    """Select the precision for "auto"; return it, and a notice unless it is the expected bf16.

    Args:
        wanted: bf16, or fp16 if the file rules out bf16.
        reason: why `wanted` was selected, for messages.
    """
    fitting, why = wanted, ""
    if wanted == "bf16" and device.lacks_bf16:
        fitting, why = "fp32", device.lacks_bf16
    elif wanted == "fp16" and not device.is_gpu and not cpu_has_fp16():
        fitting, why = "fp32", "does not multiply fp16"
    if begun is not None and begun.precision != fitting:
        where = f" on {begun.device}" if begun.device else ""
        return begun.precision, [
            f"{profile.name}: training in {begun.precision}, since the run of {begun.path} started "
            f"with it{where}; a new run would train in {fitting} on {device.name}"
        ]
    if why:
        other = _others(fitting)
        if device.is_gpu:
            other = "--precision fp16 trains with its fp16 units, and scales the loss"
        return fitting, [
            f"{profile.name}: training in {fitting}, since {reason} and {device.name} {why}; "
            f"{other}"
        ]
    if AUTO in (profile.block("bf16").get("enabled"), profile.block("bfloat16").get("enabled")):
        return fitting, []
    return fitting, [f"{profile.name}: training in {fitting}, since {reason}; {_others(fitting)}"]


def _others(chosen: str) -> str:
    others = ", ".join(name for name in PRECISIONS if name != chosen)
    return f"--precision selects another ({others})"


def _emulation(profile: Profile, device: Device, fix: str) -> list[str]:
    """Return a notice if this run multiplies in bf16 but the device only emulates bf16."""
    if profile.compute_precision != "bf16" or not device.lacks_bf16:
        return []
    return [
        f"{profile.name}: bf16 is {device.bf16_ratio:.3g} times slower than float32 on "
        f"{device.name}, measured with a matrix product. {fix}"
    ]


def _contradiction(profile: Profile, flag: str, chosen: str, reason: str) -> str:
    """Return the JSON key and value that contradict `--precision`, or an empty string."""
    if chosen != flag:
        return reason
    enabled = profile.block(_key(profile, flag)).get("enabled") if flag != "fp32" else None
    return f"{_key(profile, flag)}.enabled: false" if enabled is False else ""


def _key(profile: Profile, name: str) -> str:
    """Return the JSON key of a precision's block, which for bf16 may be the older `bfloat16`."""
    old = name == "bf16" and "bfloat16" in profile.json and "bf16" not in profile.json
    return "bfloat16" if old else name


# -------------------------------------------------------------------------------------------------
# Rules


def precision_problems(profile: Profile, on_gpu: bool) -> list[str]:
    """Return conflicts of precisions, and those that DeepSpeed or this machine does not support."""
    problems = []
    bf16_key = _key(profile, "bf16")
    fp16, bf16 = profile.block("fp16"), profile.block(bf16_key)
    if fp16.get("enabled") is True and bf16.get("enabled") is True:
        problems.append(
            f"fp16.enabled: true, but {bf16_key}.enabled is also true. Only one may be: remove "
            "fp16."
        )
    elif profile.precision == "fp16" and not on_gpu and not cpu_has_fp16():
        problems.append(
            "fp16.enabled: true is not supported by this CPU. Remove the block, and write "
            '"bf16": {"enabled": "auto"}.'
        )
    if profile.grad_accum_dtype not in (None, "fp32", "fp16", "bf16"):
        problems.append(
            f"data_types.grad_accum_dtype: {shown(profile.grad_accum_dtype)} must be fp32, fp16 "
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
            f"{bf16_key}.check_grad_overflow: false would step on non-finite gradients and report "
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
                    f"{key}.bf16_optimizer_states: true needs {masters}. Set that to true too, or "
                    f"remove the key."
                )
            continue
        offload = profile.optimizer_offload != "none"
        cpu_adam = profile.optimizer.kind in CPU_ADAM
        cpu_adam = cpu_adam and not profile.optimizer.params.get("torch_adam")
        if profile.precision != name:
            found.append(
                f"{masters}: true needs {name}, but the weights are {profile.precision}. Remove "
                f"the key."
            )
        elif (offload or not states) and not (offload and cpu_adam):
            instead = " or bf16_optimizer_states" if name == "bf16" and not offload else ""
            found.append(
                f"{masters}: true needs zero_optimization.offload_optimizer with Adam or AdamW"
                f"{instead}. Add it, or remove the key."
            )
        elif profile.uses_bf16_optimizer:
            found.append(
                f"{masters}: true has no effect at stage 1 with data_types.grad_accum_dtype fp32, "
                f"where DeepSpeed uses another optimizer class. Use stage 2, or remove the key."
            )
    return found


def cpu_has_fp16() -> bool:
    """Return whether this CPU supports fp16 matmuls; DeepSpeed queries oneDNN in the same way."""
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
        # Without a dtype, torch selects float16 on a GPU, without loss scaling. With float16, a
        # GradScaler skips steps that engine.was_step_applied() reports as applied.
        problems.append(
            f"torch_autocast.dtype: {'missing, but it' if dtype is None else shown(dtype)} must be "
            f"bfloat16, since DeepSpeed does not report the steps that float16 autocast skips. "
            f'Write "dtype": "bfloat16".'
        )
    if profile.precision == "fp16":
        problems.append(
            "torch_autocast.enabled: true, but fp16.enabled is also true. Only one may be: remove "
            "fp16."
        )
    if profile.zero.get("zero_quantized_weights") is True:
        problems.append(
            "torch_autocast.enabled: true does not work with zero_quantized_weights. Remove one."
        )
    return problems
