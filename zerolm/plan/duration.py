"""Estimates the duration of a run from the FLOP/s of its devices, before a step has been timed.

`zerolm plan` estimates more: communication, offload, price. torch is imported where it is needed.
"""

from dataclasses import replace

from zerolm.common import values
from zerolm.distributed.device import ABSENT, EMULATED_RATIO, bf16_ratio
from zerolm.plan.peak_flops import datasheet_flops, device_peak_flops
from zerolm.plan.plan import Plan

# On GPUs as in docs/scaling.md; on a CPU as measured (docs/planning.md).
GPU_MFU, CPU_MFU = 0.4, 0.6
ASSUMED_DEVICE = "H100"  # for devices that are not on this machine
YEAR_SECONDS = 365 * 86400


def with_duration(plan: Plan) -> Plan:
    """Return a plan with its expected duration among the derived figures; a notice if it is years.

    On a CPU, and on a GPU without a known datasheet, matrix products are timed, which may take
    seconds.
    """
    if plan.device == ABSENT:
        peak = datasheet_flops(ASSUMED_DEVICE, plan.matmul_precision)
        assert peak is not None, "the assumed device is known"
    else:
        import torch

        peak, _ = device_peak_flops(torch.device(plan.device), plan.matmul_precision)
    line, notices = expected(plan, peak)
    return replace(
        plan, derived=plan.derived | {"duration": line}, notices=[*plan.notices, *notices]
    )


def expected(plan: Plan, peak_flops: float) -> tuple[str, list[str]]:
    """Return the expected duration of a run, `about 3h20m at 40% MFU of 8 x H100`, and notices.

    Args:
        peak_flops: FLOP/s of one device.
    """
    tokens = plan.settings.total_tokens - (plan.branch["tokens"] if plan.branch else 0)
    name, more = plan.device_name, ""
    mfu = CPU_MFU if plan.device == "cpu" else GPU_MFU
    if plan.device == ABSENT:
        name = ASSUMED_DEVICE
        more = f", which is assumed; `zerolm plan --hardware NAME --devices {plan.world_size}` "
        more += "estimates other devices"
    is_bf16 = plan.device == "cpu" and plan.profile.compute_precision == "bf16"
    if is_bf16 and (ratio := bf16_ratio("cpu")) > EMULATED_RATIO:
        peak_flops /= ratio
        more = f", which multiplies bf16 {ratio:.2g} times slower than float32"
    seconds = plan.flops_per_token * tokens / (plan.world_size * peak_flops * mfu)
    if seconds < YEAR_SECONDS:
        shown, notices = values.duration(seconds), []
    else:
        shown = f"{seconds / YEAR_SECONDS:,.3g} years"
        notices = [
            f"this run would take {shown}. Choose fewer tokens (--total_tokens), a smaller model "
            f"or other devices; `zerolm plan --hardware H100 --devices 8` estimates time and price"
        ]
    return f"about {shown} at {mfu:.0%} MFU of {plan.world_size} x {name}{more}", notices
