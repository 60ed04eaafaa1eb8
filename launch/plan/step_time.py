"""Estimate the time of an optimizer step: compute, communication and offload.

The estimate has one fitted number per device, `attained` in hardware.json. Its errors are in
docs/published_runs.md, which `python -m launch plan --published` writes.
"""

from dataclasses import dataclass

from launch.plan.planned_run import PlannedRun
from zerolm.model.architecture import num_parameters
from zerolm.model.flops import (
    TRAINING_TO_FORWARD,
    head_flops_per_token,
    recomputed_flops_per_token,
)
from zerolm.plan import memory
from zerolm.plan.rank_share import config_of_rank

# Large all-gathers reach about this share of the links (nccl-tests on DGX A100 and H100).
COLLECTIVE_EFFICIENCY = 0.8
# Fitted, with `attained`, to 33 benchmarks (docs/published_runs.md, 2026-11-20): the time of a
# recomputed FLOP relative to the mean FLOP, and how often a step moves each byte of activations to
# or from device memory. The errors are those of eleven other benchmarks.
RECOMPUTATION_COST = 0.5
ACTIVATION_PASSES = 5
MEDIAN_ERROR, MAX_ERROR = 0.04, 0.41  # absolute
PUBLISHED_RUNS = (1.4, 2.1)  # reported over predicted hours of published runs, middle half
# Overlapped communication still costs this share of its time, because its kernels compete for the
# device.
CONTENTION = 0.1
ADAM_BYTES = 28  # memory traffic per value: weight, two moments, gradient read; three written


@dataclass(frozen=True)
class StepTime:
    """Seconds of an optimizer step by component. Fields are JSON keys.

    Attributes:
        compute: matmuls, including recomputation.
        elementwise: norms, activation functions and the like, limited by device memory bandwidth.
        communication: of all collectives, if nothing overlapped.
        exposed: the part of `communication` that the step waits for.
        offload: transfers between device and host, and the optimizer on the host.
        optimizer: on the device.
    """

    compute: float
    elementwise: float
    communication: float
    exposed: float
    offload: float
    optimizer: float

    @property
    def seconds(self) -> float:
        return self.compute + self.elementwise + self.exposed + self.offload + self.optimizer

    @property
    def bound(self) -> str:
        """The component that takes the most time."""
        components = {
            "compute": self.compute,
            "device memory bandwidth": self.elementwise,
            "communication": self.exposed,
            "offload": self.offload,
            "the optimizer": self.optimizer,
        }
        return max(components, key=lambda name: components[name])


def step_time(
    run: PlannedRun, mfu: float | None = None, kept_bytes: float | None = None
) -> StepTime:
    """Return the estimated time of a step.

    Args:
        mfu: measured or assumed model FLOP/s utilization, without recomputation; it replaces the
            estimate.
        kept_bytes: of activations that the layers keep per token; None traces the model.
    """
    hardware = run.hardware
    peak = hardware.peak(run.profile.compute_precision)
    assert peak is not None
    tokens = run.settings.batch_tokens / run.devices
    flops = run.flops_per_token
    if mfu is not None:
        return StepTime(tokens * flops / (peak * mfu), 0.0, 0.0, 0.0, 0.0, 0.0)
    kept = kept_bytes or _kept_bytes(run)
    if run.settings.gradient_checkpointing:
        model = run.model
        if run.settings.gradient_checkpointing is True:  # selective repeats no matmul
            flops += RECOMPUTATION_COST * recomputed_flops_per_token(
                model.config, model.shapes, run.settings.seq_len
            )
        kept *= 1 + RECOMPUTATION_COST / TRAINING_TO_FORWARD
    if run.settings.loss_chunk_tokens:
        flops += head_flops_per_token(run.model.config, run.model.shapes)
    flops += run.measured_flops
    compute = tokens * flops / (peak * hardware.attained)
    elementwise = tokens * kept * ACTIVATION_PASSES / hardware.memory_bandwidth
    shapes, ranks = run.shapes_of_rank
    shard = num_parameters(shapes) / (ranks if run.profile.zero_stage else 1)
    offload = _offload_seconds(run, shard)
    optimizer = 0.0 if offload else ADAM_BYTES * shard / hardware.memory_bandwidth
    bandwidth = bus_bandwidth(run)
    per_micro_batch, per_step = _exchanged_bytes(run)
    overlappable = per_micro_batch / bandwidth * run.accumulation
    serial = per_step / bandwidth + replica_seconds(run)
    exposed, overlap = overlappable, run.profile.overlap_comm
    if run.profile.zero_stage == 3 if overlap is None else overlap:
        hidden = min(overlappable, compute + elementwise)
        exposed = overlappable - hidden + CONTENTION * hidden
    communication = overlappable + serial
    return StepTime(compute, elementwise, communication, exposed + serial, offload, optimizer)


def _kept_bytes(run: PlannedRun) -> float:
    kept = memory.activations_of(
        config_of_rank(run.model.config, run.layout),
        run.rank_tokens,
        run.profile.precision,
        eager=run.settings.attn_implementation == "eager",
    )
    return (kept.layers + kept.outside) * run.layout.tensor / run.rank_tokens


def bus_bandwidth(run: PlannedRun) -> float:
    """Return the bytes per second of a collective over all ranks, limited by the slowest link.

    Between hosts each byte enters a host once, over all of its links together.
    """
    hardware = run.hardware
    local = min(run.devices, run.devices_per_node)
    slowest = hardware.intra_node if local > 1 else float("inf")
    if run.num_nodes > 1:  # tensor-parallel ranks share the links
        slowest = min(slowest, hardware.inter_node * local / run.layout.tensor)
    return slowest * COLLECTIVE_EFFICIENCY


def replica_seconds(run: PlannedRun) -> float:
    """Return the seconds per step of collectives within a tensor- or sequence-parallel group.

    They are in the middle of a layer and overlap with nothing. In DeepSpeed 0.19.8 AutoTP
    all-reduces two outputs per layer in the forward pass, and in the backward pass the input
    gradients of q, k, v, gate, up and the head one by one, and gathers the logits
    (module_inject/layers.py). Ulysses runs an all-to-all on q, k, v and the output
    (ulysses_sp.py). Gradient checkpointing repeats the forward part.
    """
    layout, text = run.layout, run.model.config.get_text_config()
    size = layout.replica_size
    if size == 1:
        return 0.0
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


def _exchanged_bytes(run: PlannedRun) -> tuple[float, float]:
    """Return the bytes that ZeRO's collectives move per rank: (per micro-batch, per step).

    Source: Rajbhandari et al. 2020 (arXiv 1910.02054), section 7: a reduce-scatter and an
    all-gather move all values once each; ZeRO-3 gathers the weights in both passes.
    """
    shapes, ranks = run.shapes_of_rank
    moved = num_parameters(shapes) * (ranks - 1) / ranks
    weights = moved * run.profile.weight_bytes
    gradients = moved * run.profile.communication_bytes
    if run.profile.zero_stage == 3:
        return 2 * weights + gradients, 0.0
    if run.profile.zero_stage == 2:
        return gradients, weights
    return 0.0, gradients + weights


def _offload_seconds(run: PlannedRun, shard: float) -> float:
    """Return the seconds per step to transfer a rank's shard and update it on the host.

    Source: Ren et al. 2021 (arXiv 2101.06840), section 4, for the transfers.
    """
    hardware = run.hardware
    if run.profile.optimizer_offload == "none":
        return 0.0
    value = run.profile.weight_bytes
    moved = shard * (run.profile.gradient_bytes * run.accumulation + value)
    if run.profile.param_offload != "none":
        moved += shard * value * 2 * run.accumulation
    return moved / hardware.host_link + ADAM_BYTES * shard / hardware.host_bandwidth
