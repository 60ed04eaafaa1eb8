"""Estimate the time of a step's collectives from the bytes sent over each link and their latency.

Models the collectives of DeepSpeed 0.19.8, with zerolm's gradient reduction at stages 1 and 2.
`step_time` computes which part of this time is not overlapped.
"""

import math
from dataclasses import dataclass

from launch.estimate.expert_exchange import byte_seconds, exchange_seconds
from launch.estimate.pipeline import transfer_seconds
from launch.estimate.planned_run import PlannedRun
from zerolm.ds_config.gathering import gathers_blocks, prefetch_bucket
from zerolm.ds_config.profile import Profile
from zerolm.engine import reduction_choice
from zerolm.engine.reduction_choice import HOP_SECONDS
from zerolm.model.architecture import num_parameters
from zerolm.plan import memory

# Large all-gathers reach about this share of the link bandwidth (nccl-tests, DGX A100 and H100).
COLLECTIVE_EFFICIENCY = 0.8
# Latency of one step in NCCL's ring all-gathers and reduce-scatters, within a host and between
# hosts. Source: hwLatencies and ncclTopoTuneModel in NCCL's src/graph/tuning.cc, protocol Simple.
LOCAL_STEP_SECONDS, NETWORK_STEP_SECONDS = 3.4e-6, 14e-6
NUM_GROUPS = 2  # parameter groups: with and without weight decay
QUANTIZED_WEIGHT_BYTES, QUANTIZED_GRADIENT_BYTES = 1.0, 0.5
# Memory traffic per value: a gathered weight is read, written in fp16 and cast to bf16; a gradient
# is read, then written and read in 4 bits at both levels.
DEQUANTIZED_BYTES, REQUANTIZED_BYTES = 7.0, 5.0


@dataclass(frozen=True)
class Collectives:
    """Seconds that a step's collectives take without overlap.

    Attributes:
        passes: part that can overlap with all forward and backward passes.
        last: part that can overlap only with the last backward pass.
        serial: part that overlaps with nothing.
    """

    passes: float
    last: float
    serial: float

    @property
    def seconds(self) -> float:
        return self.passes + self.last + self.serial


@dataclass(frozen=True)
class Calls:
    """How many collectives another trainer's step runs; replaces DeepSpeed's counts.

    Attributes:
        rings: number of all-gathers and reduce-scatters over all ranks per micro-batch.
        chains: number of broadcasts and reductions to one rank at the end of a step.
    """

    rings: int
    chains: int


def collectives(run: PlannedRun, calls: Calls | None = None) -> Collectives:
    """Return the time that a step spends in ZeRO's collectives and in collectives within a replica.

    Source: Rajbhandari et al. 2020 (arXiv 1910.02054), section 7: a reduce-scatter and an
    all-gather each move all values once; ZeRO-3 gathers the weights in both passes.
    """
    ranks, profile = run.shapes_of_rank[1], run.profile
    inside = replica_seconds(run) + exchange_seconds(run, COLLECTIVE_EFFICIENCY)
    if ranks == 1:
        return Collectives(0.0, 0.0, inside)
    inside += copies_seconds(run)
    if profile.zero_stage == 3:
        seconds = _gather_seconds(run, calls) + run.accumulation * _scatter_seconds(run, calls)
        return Collectives(seconds, 0.0, inside)
    neighbours = run.layout.shards if run.layout.stages > 1 else run.layout.shard_within
    bandwidth = bus_bandwidth(run, neighbours)
    each = byte_seconds(run, bandwidth, COLLECTIVE_EFFICIENCY)
    gathers = profile.weight_bytes * each + NUM_GROUPS * ring_seconds(run)
    reduced, overlaps = _reduction_seconds(run, each)
    if calls is not None:
        reduced, overlaps = profile.communication_bytes * each, True
        gathers = profile.weight_bytes * each + calls.chains * chain_seconds(run)
    if profile.zero_stage == 2:
        return Collectives(reduced * run.accumulation, 0.0, gathers + inside)
    last, serial = (reduced, 0.0) if overlaps else (0.0, reduced)
    return Collectives(0.0, last, serial + gathers + inside)


def ring_seconds(run: PlannedRun, ranks: int | None = None) -> float:
    """Return the latency of an all-gather or reduce-scatter.

    Args:
        ranks: number of neighbouring ranks that take part; None means all.
    """
    ranks = ranks or run.shapes_of_rank[1]
    hosts = -(-ranks * run.layout.tensor // run.devices_per_node)
    return (ranks - hosts) * LOCAL_STEP_SECONDS + (hosts - 1) * NETWORK_STEP_SECONDS


def chain_seconds(run: PlannedRun) -> float:
    """Return the latency of a broadcast or a reduction to one rank, which traverses all ranks.

    HOP_SECONDS agrees with InternEvo's broadcasts on 128 to 1,024 A100s
    (benchmarks/results/published_runs.md).
    """
    ranks = run.shapes_of_rank[1]
    is_local = ranks * run.layout.tensor <= run.devices_per_node
    return (ranks - 1) * (LOCAL_STEP_SECONDS if is_local else HOP_SECONDS)


def copies_seconds(run: PlannedRun) -> float:
    """Return the seconds per step to sum each shard's gradient over the `--shard_within` groups.

    All shards are summed concurrently, and the shards on one host share its links.
    """
    copies, shards = run.layout.copies, run.layout.shards
    if copies == 1:
        return 0.0
    hardware, local = run.hardware, max(1, run.devices_per_node // shards)
    bandwidth, hop = hardware.intra_node, LOCAL_STEP_SECONDS
    if run.num_nodes > 1:
        bandwidth = hardware.inter_node * local
        bandwidth = min(bandwidth, hardware.intra_node) if local > 1 else bandwidth
        hop = NETWORK_STEP_SECONDS
    sent = num_parameters(run.shapes_of_rank[0]) / shards * run.profile.communication_bytes
    moved = 2 * sent * (copies - 1) / copies  # each value is sent twice: to be summed, and back
    latency = 2 * (copies - 1) * NUM_GROUPS * hop
    return moved / (bandwidth * COLLECTIVE_EFFICIENCY) + latency


def bus_bandwidth(run: PlannedRun, ranks: int | None = None) -> float:
    """Return the bandwidth of a collective in bytes per second, which the slowest link limits.

    Between hosts, each byte enters a host once, and all links of the host share the traffic.

    Args:
        ranks: number of neighbouring ranks that take part; None means all.
    """
    hardware, ranks = run.hardware, ranks or run.devices
    local = min(ranks, run.devices_per_node)
    slowest = hardware.intra_node if local > 1 else float("inf")
    if ranks > run.devices_per_node:  # tensor-parallel ranks share the links
        slowest = min(slowest, hardware.inter_node * local / run.layout.tensor)
    return slowest * COLLECTIVE_EFFICIENCY


def replica_seconds(run: PlannedRun) -> float:
    """Return the seconds per step for what the ranks of a replica send each other: collectives of a
    tensor- or sequence-parallel group, or transfers between pipeline stages.

    These collectives occur inside a layer and overlap with nothing. In DeepSpeed 0.19.8 AutoTP
    all-reduces two outputs per layer in the forward pass, all-reduces the input gradients of q, k,
    v, gate, up and the head one by one in the backward pass, and gathers the logits
    (module_inject/layers.py). Ulysses runs an all-to-all on q, k, v and the output (ulysses_sp.py).
    Gradient checkpointing repeats the forward collectives.
    """
    layout, text = run.layout, run.model.config.get_text_config()
    size = layout.replica_size
    if size == 1:
        return 0.0
    if layout.stages > 1:
        return transfer_seconds(run)
    value = run.profile.weight_bytes
    layers, sent_share = text.num_hidden_layers, (size - 1) / size
    forwards = 2 if run.settings.gradient_checkpointing else 1
    if layout.tensor > 1:
        reductions = layers * (2 * forwards + 5) + 1
        # An all-reduce moves every value twice.
        widths = 2 * reductions * text.hidden_size + 2 * text.vocab_size
    else:
        head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        heads = 2 * text.num_attention_heads + 2 * text.num_key_value_heads
        widths = layers * (forwards + 1) * heads * head
    moved = run.settings.micro_batch_size * run.rank_tokens * value * sent_share * widths
    hardware = run.hardware
    bandwidth = hardware.intra_node
    if size > run.devices_per_node:
        bandwidth = min(bandwidth, hardware.inter_node)
    return moved * run.accumulation / (bandwidth * COLLECTIVE_EFFICIENCY)


def quantization_bytes(run: PlannedRun) -> float:
    """Return the bytes of device memory traffic per step for quantizing messages (ZeRO++)."""
    values, moved = num_parameters(run.shapes_of_rank[0]), 0.0
    if run.profile.zero_stage == 3 and run.devices > 1:
        moved += 2 * DEQUANTIZED_BYTES * _quantizes(run.profile, "weights")
        moved += REQUANTIZED_BYTES * _quantizes(run.profile, "gradients")
    return moved * values * run.accumulation


# -------------------------------------------------------------------------------------------------
# Stage 3


def _gather_seconds(run: PlannedRun, calls: Calls | None) -> float:
    """Return the seconds per step for gathering weights in each pass of each micro-batch.

    With hpZ, only the first forward pass of a step gathers over all ranks; later passes gather
    within a group, which holds a copy of all weights by then. `zero_quantized_weights` sends 8 bits
    per weight in both cases (`all_gather_coalesced` in partition_parameters.py).
    """
    shapes, ranks = run.shapes_of_rank
    value: float = run.profile.weight_bytes
    if _quantizes(run.profile, "weights"):
        value = QUANTIZED_WEIGHT_BYTES
    num_calls = _gathers_of_a_pass(run) if calls is None else calls.rings / 3
    passes, group = 2 * run.accumulation, memory.secondary_ranks(run.profile, run.devices)

    def seconds(size: int) -> float:
        moved = value * num_parameters(shapes) * (size - 1) / size / bus_bandwidth(run, size)
        return moved + num_calls * ring_seconds(run, size)

    if group == 1:
        each = byte_seconds(run, bus_bandwidth(run), COLLECTIVE_EFFICIENCY)
        return passes * (value * each + num_calls * ring_seconds(run, ranks))
    return seconds(ranks) + (passes - 1) * seconds(group)


def _gathers_of_a_pass(run: PlannedRun) -> int:
    """Return the number of all-gathers that DeepSpeed runs per pass, as counted on two ranks.

    A block that is gathered as a whole needs one all-gather, or two if it exceeds the prefetch
    bucket. Otherwise each matrix is gathered separately.
    """
    block = run.model.block_sizes
    if gathers_blocks(
        run.profile,
        block,
        hidden_size=run.model.hidden_size,
        ranks=run.shapes_of_rank[1],
        compiled=run.settings.compile,
    ):
        ahead = run.profile.buckets.prefetch >= prefetch_bucket(run.profile, block, 1)
        return (1 if ahead else 2) * run.model.config.get_text_config().num_hidden_layers + 1
    threshold = run.profile.buckets.persistence_threshold
    return sum(math.prod(shape) > threshold for shape in run.shapes_of_rank[0].values())


def _scatter_seconds(run: PlannedRun, calls: Calls | None) -> float:
    """Return the seconds to reduce the gradients of a micro-batch.

    `zero_quantized_gradients` sends each gradient twice in 4 bits: first within a host, then
    between hosts, where each device sends its share of the host's sums (`all_to_all_quant_reduce`
    in coalesced_collectives.py). Tensors that have one dimension or whose size is not divisible by
    2 x ranks are not quantized.
    """
    shapes, ranks = run.shapes_of_rank
    quantized: list[int] = []
    if _quantizes(run.profile, "gradients") and run.num_nodes > 1:
        numels = [math.prod(shape) for shape in shapes.values() if len(shape) > 1]
        quantized = [numel for numel in numels if numel % (2 * ranks) == 0]
    values, local, nodes = sum(quantized), run.devices_per_node, run.num_nodes
    rest = num_parameters(shapes) - values
    num_calls = -(-rest // run.profile.buckets.reduce) if calls is None else calls.rings / 3
    each = byte_seconds(run, bus_bandwidth(run), COLLECTIVE_EFFICIENCY) / num_parameters(shapes)
    seconds = rest * run.profile.communication_bytes * each
    seconds += num_calls * ring_seconds(run)
    sent = QUANTIZED_GRADIENT_BYTES * values
    inside = sent * (local - 1) / local / (run.hardware.intra_node * COLLECTIVE_EFFICIENCY)
    between = sent / local * (nodes - 1) / nodes
    between /= run.hardware.inter_node * COLLECTIVE_EFFICIENCY
    latency = (local - 1) * LOCAL_STEP_SECONDS + (nodes - 1) * NETWORK_STEP_SECONDS
    return seconds + inside + between + len(quantized) * latency


def _quantizes(profile: Profile, what: str) -> bool:
    return profile.zero.get(f"zero_quantized_{what}") is True


# -------------------------------------------------------------------------------------------------
# Stages 1 and 2


def all_reduces(run: PlannedRun) -> bool:
    """Return whether every rank receives all summed gradients, not only those that it owns."""
    profile = run.profile
    if profile.all_reduces or profile.uses_bf16_optimizer:
        return profile.all_reduces
    return not _pieces_pay(run)


def _pieces_pay(run: PlannedRun) -> bool:
    """Return whether a bucket is reduced by separate collectives, one for each owner's part."""
    key = run.profile.zero.get(reduction_choice.KEY)
    values, ranks = num_parameters(run.shapes_of_rank[0]), run.shapes_of_rank[1]
    if key is False:
        return True
    if run.profile.zero_stage == 2:
        return reduction_choice.pieces_save_time(values, _piece_calls(run), ranks, run.num_nodes)
    return reduction_choice.small_pieces_pay(values, _piece_calls(run), ranks)


def _piece_calls(run: PlannedRun) -> int:
    values, ranks = num_parameters(run.shapes_of_rank[0]), run.shapes_of_rank[1]
    return reduction_choice.bucket_calls(values, run.profile.buckets.reduce, ranks, NUM_GROUPS)


def _reduction_seconds(run: PlannedRun, each: float) -> tuple[float, bool]:
    """Return the seconds to reduce all gradients, and whether stage 1 can overlap the reduction.

    Args:
        each: seconds to send one byte of every value.
    """
    profile = run.profile
    sent = profile.communication_bytes * each
    if all_reduces(run):  # each value is sent twice: to be summed, and back
        return 2 * sent, False
    if _pieces_pay(run):
        seconds = sent + _piece_calls(run) * chain_seconds(run)
        return seconds, profile.uses_bf16_optimizer  # overlaps with the last micro-batch only
    return sent + NUM_GROUPS * ring_seconds(run), False
