"""Estimate what pipeline stages add to a step: transfers between stages, and idle time.

Not fitted to measurements. Transfers overlap with nothing, as a stage waits for each.
"""

from launch.estimate.planned_run import PlannedRun
from zerolm.plan import stage_share

LINK_EFFICIENCY = 0.8  # share of a link's bandwidth that a transfer reaches: as of collectives
TRANSFER_SECONDS = 14e-6  # latency of a transfer between hosts (see `collectives`)


def transfer_seconds(run: PlannedRun) -> float:
    """Return the seconds per step in which a stage in the middle sends and receives.

    For each micro-batch it exchanges hidden states and gradients with each of its neighbours, both
    directions at once. Where a boundary between stages is one between hosts, the replicas of a host
    share its links.
    """
    layout, hardware = run.layout, run.hardware
    if layout.stages == 1:
        return 0.0
    width = run.model.hidden_size or 0
    sent = run.settings.micro_batch_size * run.rank_tokens * width * run.profile.weight_bytes
    bandwidth = hardware.intra_node
    if run.num_nodes > 1:
        crossing = min(layout.replicas, run.devices_per_node)
        between = hardware.inter_node * run.devices_per_node / crossing
        bandwidth = min(bandwidth, between) if run.devices_per_node > 1 else between
    each = sent / (bandwidth * LINK_EFFICIENCY) + TRANSFER_SECONDS
    return min(2, layout.stages - 1) * run.accumulation * each


def busiest_share(run: PlannedRun) -> float:
    """Return the cost of the costliest stage, relative to the mean; 1 without stages."""
    if run.layout.stages == 1:
        return 1.0
    costs, last = stage_share.block_costs(run.model, run.settings.seq_len)
    return max(stage_share.shares(costs, last, run.profile.stage_layers))


def idle_ratio(run: PlannedRun) -> float:
    """Return the time that a stage is idle while the pipeline fills and drains, relative to the
    time of all its micro-batches.
    """
    return (run.layout.stages - 1) / run.accumulation
