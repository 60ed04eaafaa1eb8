"""Estimate the time of what `--expert_parallel` sends: tokens in each layer, and gradients of
experts over the ranks that have them.
"""

import math

from launch.estimate.planned_run import PlannedRun
from zerolm.model.architecture import is_routed_expert, num_parameters
from zerolm.plan import exchange

# Of an all-to-all among the devices of a host, with the host's reads of row counts: assumed.
CALL_SECONDS = 20e-6


def exchange_seconds(run: PlannedRun, efficiency: float) -> float:
    """Return the seconds per step in which tokens are exchanged, which nothing hides.

    Each token's copies are sent to the experts and back, in the forward pass, in the backward pass
    and, with gradient checkpointing, in the recomputed forward pass. The busiest rank sets the
    pace.
    """
    degree = run.layout.experts
    if degree == 1:
        return 0.0
    passes = 3 if run.settings.gradient_checkpointing else 2
    layers = exchange.num_layers(run.shapes_of_rank[0]) * passes * run.accumulation
    tokens = run.settings.micro_batch_size * run.rank_tokens
    sent = tokens * exchange.row_bytes(run.model.config, run.profile.weight_bytes)
    busiest = sent * run.busiest_share * (degree - 1) / degree
    bandwidth = run.hardware.intra_node * efficiency
    return layers * (2 * busiest / bandwidth + 3 * CALL_SECONDS)


def byte_seconds(run: PlannedRun, bandwidth: float, efficiency: float) -> float:
    """Return the seconds to send one byte for every value of a rank in a ring over the ranks that
    have it.

    Args:
        bandwidth: bytes per second of a ring over all ranks.
        efficiency: share of a link's bandwidth that a collective reaches.
    """
    shapes, ranks = run.shapes_of_rank
    layout, per_host = run.layout, min(run.devices, run.devices_per_node)
    experts = 0
    if layout.experts > 1:
        names = filter(is_routed_expert, shapes)
        experts = sum(math.prod(shapes[name]) for name in names)
    seconds = (num_parameters(shapes) - experts) * (ranks - 1) / ranks / bandwidth
    copies = layout.axis("expert_copies").size
    if experts and copies > 1:  # the groups on a host share its links
        local = max(1, per_host // layout.experts)
        link = run.hardware.intra_node if local > 1 else float("inf")
        if run.num_nodes > 1:
            link = min(link, run.hardware.inter_node * local)
        seconds += experts * (copies - 1) / copies / (link * efficiency)
    return seconds
