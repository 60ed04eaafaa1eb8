"""How long an optimizer step takes: arithmetic, what ranks exchange, and what offload moves.

A model with one fitted number a device (`attained`, in hardware.json). What it is worth is in
docs/published_runs.md, which `python -m launch plan --published` computes.
"""

from dataclasses import dataclass

from launch.plan.subject import Subject
from zerolm.model.architecture import num_parameters
from zerolm.model.flops import (
    BACKWARD_AND_FORWARD,
    head_flops_per_token,
    recomputed_flops_per_token,
)
from zerolm.plan import memory
from zerolm.plan.rank_share import config_of_rank

# Large all-gathers reach about this share of the links (nccl-tests on DGX A100 and H100).
COLLECTIVE_EFFICIENCY = 0.8
# What the operations of recomputation cost beside as many of the mean kind, and how often each byte
# that a layer keeps is moved to or from memory in a step: fitted, with `attained`, to 33 benchmarks
# (docs/published_runs.md, 2026-11-20). The errors are of eleven others.
RECOMPUTATION_COST = 0.5
PASSES = 5
TYPICAL_ERROR, LARGEST_ERROR = 0.04, 0.41  # without sign: median and largest
WHOLE_RUNS = (1.4, 2.1)  # hours of others' whole runs over those of their arithmetic: middle half
# Of communication that arithmetic hides, this share still shows: kernels compete for the device.
CONTENTION = 0.1
ADAM_BYTES = 28  # of traffic a value: weight, two moments and gradient read; three written


@dataclass(frozen=True)
class StepTime:
    """Seconds of an optimizer step by what they are spent on.

    Attributes:
        compute: matrix products, recomputation included.
        elementwise: norms, activations and the like, which wait for the device's memory.
        communication: all that ranks exchange, were nothing hidden.
        exposed: the part of it that the step waits for.
        offload: moves over the host's link, and the host's optimizer.
        optimizer: on the device.
        bound: what the step spends most on.
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
        parts = {
            "arithmetic": self.compute,
            "the device's memory": self.elementwise,
            "communication": self.exposed,
            "offload": self.offload,
            "the optimizer": self.optimizer,
        }
        return max(parts, key=lambda name: parts[name])


def step_time(
    subject: Subject, mfu: float | None = None, kept_bytes: float | None = None
) -> StepTime:
    """Return the predicted time of a step.

    Args:
        mfu: share of the peak, recomputation not counted, that was measured or is believed; the
            model is then not asked.
        kept_bytes: of activations that the layers keep of a token; None traces the model.
    """
    hardware = subject.hardware
    peak = hardware.peak(subject.profile.compute_precision)
    assert peak is not None
    tokens = subject.settings.batch_tokens / subject.devices
    flops = subject.flops_per_token
    if mfu is not None:
        return StepTime(tokens * flops / (peak * mfu), 0.0, 0.0, 0.0, 0.0, 0.0)
    moved = kept_bytes or _kept_bytes(subject)
    if subject.settings.gradient_checkpointing:
        if subject.settings.gradient_checkpointing is True:  # selective repeats no product
            model = subject.model
            again = recomputed_flops_per_token(model.config, model.shapes, subject.settings.seq_len)
            flops += again * RECOMPUTATION_COST
        moved *= 1 + RECOMPUTATION_COST / BACKWARD_AND_FORWARD
    if subject.settings.loss_chunk_tokens:
        flops += head_flops_per_token(subject.model.config, subject.model.shapes)
    compute = tokens * flops / (peak * hardware.attained)
    elementwise = tokens * moved * PASSES / hardware.memory_bandwidth
    each, once = _exchanged(subject)
    shapes, ranks = subject.shapes_of_rank
    share = num_parameters(shapes) / (ranks if subject.profile.zero_stage else 1)
    offload = _offload(subject, share)
    optimizer = 0.0 if offload else ADAM_BYTES * share / hardware.memory_bandwidth
    bandwidth = bus_bandwidth(subject)
    each, once = each / bandwidth * subject.accumulation, once / bandwidth
    exposed, overlap = each, subject.profile.overlap_comm
    if subject.profile.zero_stage == 3 if overlap is None else overlap:
        hidden = min(each, compute + elementwise)
        exposed = each - hidden + CONTENTION * hidden
    once += within_replica(subject)
    return StepTime(compute, elementwise, each + once, exposed + once, offload, optimizer)


def _kept_bytes(subject: Subject) -> float:
    kept = memory.activations_of(
        config_of_rank(subject.model.config, subject.layout),
        subject.rank_tokens,
        subject.profile.precision,
        eager=subject.settings.attn_implementation == "eager",
    )
    return (kept.layers + kept.outside) * subject.layout.tensor / subject.rank_tokens


def bus_bandwidth(subject: Subject) -> float:
    """Return the bytes per second at which a rank sees a collective go, over the slowest link.

    Between hosts each byte enters a host once, over all its links together.
    """
    hardware = subject.hardware
    local = min(subject.devices, subject.devices_per_node)
    slowest = hardware.intra_node if local > 1 else float("inf")
    if subject.num_nodes > 1:  # ranks with other parts of the matrices share the links
        slowest = min(slowest, hardware.inter_node * local / subject.layout.tensor)
    return slowest * COLLECTIVE_EFFICIENCY


def within_replica(subject: Subject) -> float:
    """Return the seconds a step that devices with one sequence between them exchange activations.

    Nothing hides it: each exchange is in the middle of a layer. What DeepSpeed 0.19.8 does: AutoTP
    sums two outputs of a layer forward, and backward the gradients of q, k, v, gate and up one by
    one (module_inject/layers.py), the head's too, whose logits it gathers; Ulysses exchanges q, k,
    v and the output for others' (ulysses_sp.py). Gradient checkpointing repeats the forward part.
    """
    layout, text = subject.layout, subject.model.config.get_text_config()
    size = layout.replica_size
    if size == 1:
        return 0.0
    value = subject.profile.weight_bytes
    layers, other = text.num_hidden_layers, (size - 1) / size
    again = 2 if subject.settings.gradient_checkpointing else 1
    if layout.tensor > 1:
        sums = layers * (2 * again + 5) + 1
        widths = 2 * sums * text.hidden_size + 2 * text.vocab_size  # a sum moves all values twice
    else:
        head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        heads = 2 * text.num_attention_heads + 2 * text.num_key_value_heads
        widths = layers * (again + 1) * heads * head
    moved = subject.settings.micro_batch_size * subject.rank_tokens * value * other * widths
    hardware = subject.hardware
    bandwidth = hardware.intra_node
    if size > subject.devices_per_node:
        bandwidth = min(bandwidth, hardware.inter_node)
    return moved * subject.accumulation / (bandwidth * COLLECTIVE_EFFICIENCY)


def _exchanged(subject: Subject) -> tuple[float, float]:
    """Return the bytes that a rank exchanges: (in each micro-batch, once a step).

    Source: Rajbhandari et al. 2020 (arXiv 1910.02054), section 7: a reduce-scatter and an
    all-gather move all values once each; ZeRO-3 gathers the weights in both passes.
    """
    shapes, ranks = subject.shapes_of_rank
    part = num_parameters(shapes) * (ranks - 1) / ranks
    weights = part * subject.profile.weight_bytes
    gradients = part * subject.profile.communication_bytes
    if subject.profile.zero_stage == 3:
        return 2 * weights + gradients, 0.0
    if subject.profile.zero_stage == 2:
        return gradients, weights
    return 0.0, gradients + weights


def _offload(subject: Subject, share: float) -> float:
    """Return the seconds a step that a rank moves its share over the host's link, and updates it.

    Source: Ren et al. 2021 (arXiv 2101.06840), section 4, for what is moved.
    """
    hardware = subject.hardware
    if subject.profile.optimizer_offload == "none":
        return 0.0
    value = subject.profile.weight_bytes
    moved = share * (subject.profile.gradient_bytes * subject.accumulation + value)
    if subject.profile.param_offload != "none":
        moved += share * value * 2 * subject.accumulation
    return moved / hardware.host_link + ADAM_BYTES * share / hardware.host_bandwidth
