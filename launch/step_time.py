"""How long an optimizer step takes: arithmetic, what ranks exchange, and what offload moves.

A model with one fitted number a device (`attained`, in hardware.json). What it is worth is in
docs/published_runs.md, which `python -m launch plan --published` computes.
"""

from dataclasses import dataclass

from launch.subject import Subject
from zerolm import ds_config, memory
from zerolm.flops import recomputed_flops_per_token

# Large all-gathers reach about this share of the links (nccl-tests on DGX A100 and H100).
COLLECTIVE_EFFICIENCY = 0.8
# Of communication that arithmetic hides, this share still shows: kernels compete for the device.
CONTENTION = 0.1
ADAM_BYTES = 28  # of traffic a value: weight, two moments and gradient read; three written


@dataclass(frozen=True)
class StepTime:
    """Seconds of an optimizer step by what they are spent on.

    Attributes:
        compute: matrix products and what goes with them, recomputation included.
        communication: all that ranks exchange, were nothing hidden.
        exposed: the part of it that the step waits for.
        offload: moves over the host's link, and the host's optimizer.
        optimizer: on the device.
        bound: what the step spends most on.
    """

    compute: float
    communication: float
    exposed: float
    offload: float
    optimizer: float

    @property
    def seconds(self) -> float:
        return self.compute + self.exposed + self.offload + self.optimizer

    @property
    def bound(self) -> str:
        parts = {
            "arithmetic": self.compute,
            "communication": self.exposed,
            "offload": self.offload,
            "the optimizer": self.optimizer,
        }
        return max(parts, key=lambda name: parts[name])


def step_time(subject: Subject, mfu: float | None = None) -> StepTime:
    """Return the predicted time of a step.

    Args:
        mfu: share of the peak, recomputation not counted, that was measured or is believed; the
            model is then not asked.
    """
    hardware = subject.hardware
    peak = hardware.peak(ds_config.compute_precision(subject.ds))
    assert peak is not None
    tokens = subject.batch_tokens / subject.devices
    flops = subject.flops_per_token
    if mfu is not None:
        return StepTime(tokens * flops / (peak * mfu), 0.0, 0.0, 0.0, 0.0)
    if subject.settings.gradient_checkpointing:
        model = subject.model
        flops += recomputed_flops_per_token(model.config, model.shapes, subject.seq_len)
    compute = tokens * flops / (peak * hardware.attained)
    each, once = _exchanged(subject)
    share = subject.model.num_parameters / (subject.devices if subject.stage else 1)
    offload = _offload(subject, share)
    optimizer = 0.0 if offload else ADAM_BYTES * share / hardware.memory_bandwidth
    bandwidth = bus_bandwidth(subject)
    each, once = each / bandwidth * subject.accumulation, once / bandwidth
    zero = ds_config.block(subject.ds, "zero_optimization")
    exposed = each
    if zero.get("overlap_comm", subject.stage == 3):
        exposed = max(0.0, each - compute) + CONTENTION * min(each, compute)
    return StepTime(compute, each + once, exposed + once, offload, optimizer)


def bus_bandwidth(subject: Subject) -> float:
    """Return the bytes per second at which a rank sees a collective go, over the slowest link.

    Between hosts each byte enters a host once, over all its links together.
    """
    hardware = subject.hardware
    local = min(subject.devices, subject.devices_per_node)
    slowest = hardware.intra_node if local > 1 else float("inf")
    if subject.num_nodes > 1:
        slowest = min(slowest, hardware.inter_node * local)
    return slowest * COLLECTIVE_EFFICIENCY


def _exchanged(subject: Subject) -> tuple[float, float]:
    """Return the bytes that a rank exchanges: (in each micro-batch, once a step).

    Source: Rajbhandari et al. 2020 (arXiv 1910.02054), section 7: a reduce-scatter and an
    all-gather move all values once each; ZeRO-3 gathers the weights in both passes.
    """
    total, devices = subject.model.num_parameters, subject.devices
    part = total * (devices - 1) / devices
    weights = part * (4 if subject.precision == "fp32" else 2)
    gradients = part * memory.communication_bytes(subject.ds)
    if subject.stage == 3:
        return 2 * weights + gradients, 0.0
    if subject.stage == 2:
        return gradients, weights
    return 0.0, gradients + weights


def _offload(subject: Subject, share: float) -> float:
    """Return the seconds a step that a rank moves its share over the host's link, and updates it.

    Source: Ren et al. 2021 (arXiv 2101.06840), section 4, for what is moved.
    """
    hardware = subject.hardware
    optimizer, weights = subject.offload
    if optimizer == "none":
        return 0.0
    value = 4 if subject.precision == "fp32" else 2
    moved = share * (memory.gradient_bytes(subject.ds) * subject.accumulation + value)
    if weights != "none":
        moved += share * value * 2 * subject.accumulation
    return moved / hardware.host_link + ADAM_BYTES * share / hardware.host_bandwidth
