"""Findings about a run's speed: data loading, utilization, slow ranks, checkpoints.

Used by `zerolm.report.diagnosis`.
"""

import statistics
from collections.abc import Sequence

from zerolm.report.findings import (
    RECENT_ROWS,
    Finding,
    Row,
    finding_at,
    median_of,
    points_of,
    recent_of,
)
from zerolm.run_dir.events import shown_slow_host
from zerolm.run_dir.metrics import RANK_IMBALANCE, SLOWEST_IN_PIPELINE

DATA_SHARE = 0.1
LOW_MFU, FALLEN_MFU = 0.1, 0.75
SLOW_RANK_RATIO, SLOW_RANK_ROWS = 1.25, 0.7
STALL_SHARE = 0.05
UNEVEN_PIPELINE_RATIO = 1.1  # time that the slowest pipeline stage computes, relative to the mean
UNEVEN_RATIO = 1.5  # tokens of the busiest rank's experts, relative to the mean


def slow_data(rows: Sequence[Row]) -> list[Finding]:
    """Return a finding if steps wait too long for data."""
    waited = recent_of(rows, "throughput/data_seconds")
    steps = recent_of(rows, "throughput/step_seconds")
    if not waited or not steps:
        return []
    share = sum(point.value for point in waited) / max(sum(point.value for point in steps), 1e-9)
    if share <= DATA_SHARE:
        return []
    text = (
        f"{share:.0%} of the step time is spent waiting for data. Raise --num_workers, or move the "
        f"shards to a faster disk."
    )
    return [finding_at("slow_data", waited[0], text)]


def low_mfu(rows: Sequence[Row]) -> list[Finding]:
    """Return a finding if the MFU is low or has fallen."""
    points, recent = points_of(rows, "throughput/mfu"), recent_of(rows, "throughput/mfu")
    if not recent:
        return []
    now = median_of(recent)
    earlier = points[:-RECENT_ROWS]
    if len(earlier) >= RECENT_ROWS:
        usual = median_of(earlier)
        if now < FALLEN_MFU * usual:
            text = (
                f"MFU has fallen from {usual:.1%} to {now:.1%}. Check throughput/data_seconds, the "
                f"slowest rank, memory near its limit, other users of the machines, and thermal "
                f"throttling."
            )
            return [finding_at("falling_mfu", recent[0], text)]
    if now >= LOW_MFU:
        return []
    text = (
        f"MFU is {now:.1%}. Try a larger --micro_batch_size, a lower ZeRO stage or no offload if "
        f"memory allows, or --compile; `zerolm plan --search` compares profiles."
    )
    return [finding_at("low_mfu", recent[0], text)]


def slow_rank(rows: Sequence[Row]) -> list[Finding]:
    """Return a finding if one rank delays the others."""
    ranks = recent_of(rows, "throughput/slowest_rank")
    seconds = recent_of(rows, "throughput/slowest_rank_seconds")
    means = recent_of(rows, "throughput/mean_rank_seconds")
    if not ranks or not seconds or not means:
        return []
    rank = statistics.mode(point.value for point in ranks)
    times = [
        slow.value / mean.value
        for slowest, slow, mean in zip(ranks, seconds, means, strict=True)
        if slowest.value == rank and mean.value > 0.0 and slow.value > SLOW_RANK_RATIO * mean.value
    ]
    if len(times) < SLOW_RANK_ROWS * RECENT_ROWS:
        return []
    text = (
        f"Rank {rank:.0f} takes {statistics.median(times):.1f} times as long as the mean rank, "
        f"and all ranks wait for it. Check its host, device and disk (ranks/ names the host; "
        f"`zerolm doctor` compares hosts)."
    )
    return [finding_at("slow_rank", ranks[0], text)]


def uneven_experts(rows: Sequence[Row]) -> list[Finding]:
    """Return a finding if the experts of one rank get many more tokens than those of others."""
    ratios = recent_of(rows, RANK_IMBALANCE)
    if not ratios or (ratio := median_of(ratios)) < UNEVEN_RATIO:
        return []
    text = (
        f"The experts of the busiest rank get {ratio:.2f} times as many tokens as those of the "
        f"mean rank, and all ranks wait for it. Balance the experts (--balance_rate, or "
        f"--global_router_loss with a larger coefficient), or use a smaller --expert_parallel."
    )
    return [finding_at("uneven_experts", ratios[0], text)]


def uneven_pipeline(rows: Sequence[Row]) -> list[Finding]:
    """Return a finding if one pipeline stage computes longer than the others."""
    ratios = recent_of(rows, SLOWEST_IN_PIPELINE)
    if not ratios or (ratio := median_of(ratios)) < UNEVEN_PIPELINE_RATIO:
        return []
    text = (
        f"The slowest pipeline stage computes {ratio:.2f} times as long as the mean stage, and the "
        f"others wait for it. Give it fewer blocks with `layers` in the block `pipeline` of the "
        f"DeepSpeed JSON, or check its hosts (`zerolm doctor` compares hosts)."
    )
    return [finding_at("uneven_pipeline", ratios[0], text)]


def slow_host(events: Sequence[Row]) -> list[Finding]:
    """Return findings for the slow hosts that the run has logged."""
    newest = {event["host"]: event for event in events if event.get("event") == "slow_host"}
    return [
        Finding(
            "slow_host",
            event["step"],
            0,
            f"{shown_slow_host(event)}. Check its clocks and temperature (nvidia-smi -q), other "
            "processes, disk and network (`zerolm doctor` compares hosts); `zerolm supervise "
            "--leave_out_slow_hosts` starts without it next time, if there is a spare host.",
        )
        for event in newest.values()
        if event.get("slow")
    ]


def checkpoint_stalls(rows: Sequence[Row]) -> list[Finding]:
    """Return a finding if checkpoints pause the run for too large a share of the time."""
    stalls = points_of(rows, "checkpoint/stall_seconds")
    if len(stalls) < 3:
        return []
    seconds, before = 0.0, 0
    for point in points_of(rows, "throughput/step_seconds"):
        seconds += point.value * (point.step - before)
        before = point.step
    stalled = sum(point.value for point in stalls)
    if stalled <= STALL_SHARE * (seconds + stalled):
        return []
    waited = sum(point.value for point in points_of(rows, "checkpoint/wait_seconds"))
    cause = (
        "mostly waiting for the previous one to be written: raise --checkpoint_interval, or write "
        "to a faster disk."
        if waited > stalled / 2
        else "mostly copying states to host memory: raise --checkpoint_interval."
    )
    share = stalled / (seconds + stalled)
    text = f"Training was paused for checkpoints {share:.0%} of the time, {cause}"
    return [finding_at("checkpoint_stalls", stalls[0], text)]
