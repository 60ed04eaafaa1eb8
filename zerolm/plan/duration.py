"""Estimate the duration of a run from its devices' FLOP/s, before any step has been timed.

`zerolm plan` also estimates communication, offload and price. torch is imported where it is needed.
"""

import copy
import os
import time
from collections.abc import Callable
from dataclasses import replace

from zerolm.common import values
from zerolm.common.remembered import recall
from zerolm.distributed.device import ABSENT, CPU, EMULATED_RATIO, bf16_ratio, cpu_name
from zerolm.model.architecture import ConfigKey
from zerolm.model.flops import flops_per_token
from zerolm.model.model import Model
from zerolm.plan import hardware
from zerolm.plan.peak_flops import device_peak_flops
from zerolm.plan.plan import Plan

# Assumed MFU. GPUs: as in docs/scaling.md; CPU: for models whose blocks are too large to time.
GPU_MFU, CPU_MFU = 0.4, 0.6
# Limits that keep timing to about a second on two slow cores.
TIMED_PARAMETERS, TIMED_TOKENS = 50_000_000, 2048
YEAR_SECONDS = 365 * 86400


def with_duration(plan: Plan) -> Plan:
    """Add the expected duration to a plan's derived figures, and a notice if it exceeds a year.

    On a CPU, or a GPU without a known datasheet, matrix products are timed. On a CPU, a block of
    the model is also timed, which may take seconds; `--check` remembers that for an hour.
    """
    mfu = None
    if _is_named(plan):
        named = hardware.load(plan.settings.hardware, {})
        peak = named.peak(plan.matmul_precision) or named.peak("fp32")
        if peak is None:
            return plan
    elif plan.device == CPU:
        peak, mfu = recall("cpu-speed", _speed_inputs(plan), lambda: _cpu_speed(plan), list, tuple)
    else:
        import torch

        peak, _ = device_peak_flops(torch.device(plan.device), plan.matmul_precision)
    line, notices = expected(plan, peak, mfu)
    return replace(
        plan, derived=plan.derived | {"duration": line}, notices=[*plan.notices, *notices]
    )


def _is_named(plan: Plan) -> bool:
    """Return whether `--hardware` names a device other than this machine's CPU."""
    return (plan.settings.hardware or CPU).lower() != CPU


def _speed_inputs(plan: Plan) -> list[object]:
    """Return what the speed of a rank on this CPU depends on, for an hour."""
    settings = plan.settings
    threads = {name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    return ConfigKey.of(plan.model.config).inputs(
        cpu_name(), len(os.sched_getaffinity(0)), threads, plan.matmul_precision,
        plan.ds.compute_precision, settings.seq_len, settings.batch_tokens, settings.world_size,
        plan.layout, time.strftime("%Y-%m-%d %H"),
    )  # fmt: skip


def _cpu_speed(plan: Plan) -> tuple[float, float | None]:
    """Return one rank's FLOP/s on this CPU, which all ranks share with `--world_size`, and its MFU.

    The MFU is None if it could not be timed.
    """
    import torch

    if not plan.settings.world_size:
        peak, _ = device_peak_flops(torch.device(CPU), plan.matmul_precision)
        return peak, _timed_mfu(plan, peak)
    cores, threads = len(os.sched_getaffinity(0)), torch.get_num_threads()
    own = min(threads, max(1, cores // plan.world_size))
    torch.set_num_threads(own)
    try:
        peak, _ = device_peak_flops(torch.device(CPU), plan.matmul_precision)
        mfu = _timed_mfu(plan, peak)
    finally:
        torch.set_num_threads(threads)
    return peak * min(1.0, cores / (own * plan.world_size)), mfu


def expected(
    plan: Plan, peak_flops: float, timed_mfu: float | None = None
) -> tuple[str, list[str]]:
    """Return the expected duration as text, such as `about 3h20m at 40% MFU of 8 x H100`, and
    notices.

    Args:
        peak_flops: FLOP/s of one device.
        timed_mfu: MFU measured on one block of the model; None: assume a typical MFU.
    """
    tokens = plan.settings.total_tokens - (plan.branch["tokens"] if plan.branch else 0)
    more = ""
    mfu = timed_mfu or (CPU_MFU if plan.device == CPU else GPU_MFU)
    if plan.device == ABSENT:
        more = f"; `zerolm plan --hardware {plan.settings.hardware} --devices {plan.world_size}` "
        more += "also estimates communication and price"
    is_bf16 = plan.device == CPU and plan.ds.compute_precision == "bf16"
    if timed_mfu:
        more = ", measured here on one block of the model"
    elif is_bf16 and not _is_named(plan) and (ratio := bf16_ratio("cpu")) > EMULATED_RATIO:
        peak_flops /= ratio
        more = f", which multiplies bf16 {ratio:.2g} times slower than float32"
    seconds = plan.flops_per_token * tokens / (plan.world_size * peak_flops * mfu)
    if seconds < YEAR_SECONDS:
        shown, notices = values.duration(max(1.0, seconds)), []
    else:
        shown = f"{seconds / YEAR_SECONDS:,.3g} years"
        notices = [
            f"this run would take {shown}. Choose fewer tokens (--total_tokens), a smaller model "
            f"or other devices; `zerolm plan --hardware H100 --devices 8` estimates time and price"
        ]
    return (
        f"about {shown} at {mfu:.0%} MFU of {plan.world_size} x {plan.device_name}{more}",
        notices,
    )


def _timed_mfu(plan: Plan, peak_flops: float) -> float | None:
    """Time training steps of a one-block copy of the model on this CPU, and return the MFU.

    Communication and data loading are not included.

    Returns: None if the model is large or cannot be built with one block, or if this CPU emulates
    bf16, so timing would take long.
    """
    if plan.ds.compute_precision == "bf16" and bf16_ratio("cpu") > EMULATED_RATIO:
        return None
    import torch
    from transformers import AutoModelForCausalLM

    config = copy.deepcopy(plan.model.config)
    text, settings = config.get_text_config(), plan.settings
    try:
        text.num_hidden_layers = 1
        if isinstance(vars(text).get("layer_types"), list):
            text.layer_types = text.layer_types[:1]
        block = Model.from_config(config)
        if block.num_parameters > TIMED_PARAMETERS:
            return None
        dtype = torch.bfloat16 if plan.ds.compute_precision == "bf16" else torch.float32
        with torch.random.fork_rng():
            model = AutoModelForCausalLM.from_config(
                config, dtype=dtype, trust_remote_code=False
            ).train()
        length = min(settings.seq_len, TIMED_TOKENS)
        ids = torch.zeros(max(1, TIMED_TOKENS // length), length, dtype=torch.int64)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        forward_backward = _seconds(
            lambda: model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        )
        update = _seconds(optimizer.step)
    except Exception:  # model code may raise anything, and the estimate is optional
        return None
    per_token = flops_per_token(config, block.shapes, length)
    tokens = settings.batch_tokens / plan.layout.replicas
    flops = tokens * plan.flops_per_token / plan.layout.replica_size
    seconds = flops / per_token * forward_backward / ids.numel()
    seconds += update * plan.model.num_parameters / block.num_parameters / plan.world_size
    return flops / (peak_flops * seconds)


def _seconds(work: Callable[[], object]) -> float:
    """Run `work` twice and return the shorter time."""
    taken = []
    for _ in range(2):
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return min(taken)
