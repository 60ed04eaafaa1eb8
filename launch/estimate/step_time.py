"""Estimate the time of an optimizer step: compute, exposed collectives, and offload.

`COSTS` and each device's `attained` in hardware.json are fitted to published benchmarks.
`python -m benchmarks.published_runs` writes the errors of the estimates to
benchmarks/results/published_runs.md.
"""

from dataclasses import dataclass
from typing import NamedTuple

from launch.estimate import pipeline
from launch.estimate.collectives import Calls, all_reduces, collectives, quantization_bytes
from launch.estimate.planned_run import PlannedRun
from zerolm.model.architecture import num_parameters
from zerolm.model.flops import TRAINING_TO_FORWARD
from zerolm.plan import memory
from zerolm.plan.rank_share import config_of_rank, shard_values

PUBLISHED_RUNS = (1.9, 2.6)  # quartiles of reported / predicted hours of published runs
# Overlapped communication still costs this share of its time, as its kernels slow down compute.
CONTENTION = 0.1
BACKWARD_SHARE = 2 / 3  # of a micro-batch's time
ADAM_BYTES = 28  # per value: reads weight, two moments and gradient; writes all but the gradient
FP32_STATE_BYTES = 12  # master weight and two moments; a step reads and writes each


class Moved(NamedTuple):
    """Bytes that DeepSpeed 0.19.8 reads and writes in device memory, with fp32 sums and states.

    tests/zerolm/plan/test_moved_bytes.py counts them, excluding collectives at stages 1 and 2.

    Attributes:
        all_values: bytes per value of the model.
        shard: bytes per value of a rank's shard.
    """

    all_values: float
    shard: float

    def total(self, values: int, shard: float) -> float:
        return self.all_values * values + self.shard * shard


# By ZeRO stage, for a micro-batch's gradients and for a step. `ALONE` is for a single rank.
GRADIENT_BYTES = {1: Moved(10, 0), 2: Moved(14, 25), 3: Moved(45, 0)}
STEP_BYTES = {1: Moved(4, 58), 2: Moved(0, 74), 3: Moved(0, 66)}
ALONE_GRADIENT_BYTES = GRADIENT_BYTES | {2: Moved(19, 0)}
ALL_REDUCED_GRADIENT_BYTES = Moved(24, 19)  # at stage 2
ALONE_STEP_BYTES = STEP_BYTES | {1: Moved(16, 38)}


@dataclass(frozen=True)
class Costs:
    """Cost factors, fitted together with the devices' `attained` by benchmarks.published_runs.fit.

    Attributes:
        recomputation: time of a recomputed FLOP relative to the mean FLOP.
        attention: time of an attention FLOP relative to the mean FLOP; masked FLOPs, which are
            half of them, count.
        fp8: attained share of the fp8 peak, relative to the attained share of the bf16 peak.
        compiled_passes, eager_passes: number of times that a step reads or writes each activation
            byte in device memory, with and without torch.compile.
        fp8_passes: additional passes for scaling and casting to fp8.
        experts: time of a routed-expert FLOP relative to the mean FLOP. This value is not fitted.
            It lowers MFU from 0.46 to 0.35, as `torch._grouped_mm` did in karpathy/nanochat
            (dev/LOG.md, 2026-02-19): two of eight experts plus a shared expert, with as many FLOPs
            as the dense model.
    """

    recomputation: float = 0.69
    attention: float = 1.58
    fp8: float = 0.837
    compiled_passes: float = 5.98
    eager_passes: float = 10.4
    fp8_passes: float = 2.48
    experts: float = 1.9


COSTS = Costs()
# Absolute relative errors on held-out benchmarks of dense models: all, and with many devices.
MEDIAN_ERROR, MAX_ERROR = 0.039, 0.36
MANY_DEVICES, MEDIAN_MANY, MAX_MANY = 128, 0.029, 0.084
LARGEST_BENCHMARKS = {1: 1024, 3: 512}  # {stage: devices}, without tensor parallelism


@dataclass(frozen=True)
class StepTime:
    """Seconds of an optimizer step by component. Fields are JSON keys.

    Attributes:
        compute: matmuls, including recomputation.
        elementwise: norms, activation functions and other operations limited by device memory
            bandwidth.
        communication: all collectives, if none were overlapped.
        exposed: the part of `communication` that is not overlapped.
        offload: transfers between device and host, and optimizer updates on the host.
        optimizer: optimizer updates on the device, and accumulation of micro-batch gradients.
        idle: a pipeline stage waits while the pipeline fills and drains.
    """

    compute: float
    elementwise: float
    communication: float
    exposed: float
    offload: float
    optimizer: float
    idle: float = 0.0

    @property
    def seconds(self) -> float:
        passes = self.compute + self.elementwise + self.idle
        return passes + self.exposed + self.offload + self.optimizer

    @property
    def bound(self) -> str:
        """Name of the component that takes the most time."""
        components = {
            "compute": self.compute,
            "device memory bandwidth": self.elementwise,
            "communication": self.exposed,
            "offload": self.offload,
            "the optimizer": self.optimizer,
            "idle stages": self.idle,
        }
        return max(components, key=lambda name: components[name])


def step_time(
    run: PlannedRun,
    mfu: float | None = None,
    kept_bytes: float | None = None,
    *,
    repeated: float | None = None,
    costs: Costs = COSTS,
    calls: Calls | None = None,
) -> StepTime:
    """Return the estimated time of a step.

    Args:
        mfu: measured or assumed model FLOP/s utilization, which excludes recomputation; replaces
            the estimate.
        kept_bytes: activation bytes per token that the layers keep for the backward pass; None
            traces the model.
        repeated: share of the layers' matrix products that the backward pass recomputes; None means
            all or none, depending on `--gradient_checkpointing`.
        calls: another trainer's numbers of collectives; None uses DeepSpeed's.
    """
    hardware = run.hardware
    peak = hardware.peak(run.profile.compute_precision)
    assert peak is not None
    tokens = run.settings.batch_tokens / run.devices
    if mfu is not None:
        return StepTime(tokens * run.flops_per_token / (peak * mfu), 0.0, 0.0, 0.0, 0.0, 0.0)
    if repeated is None:
        # Selective checkpointing recomputes no matrix product.
        repeated = float(run.settings.gradient_checkpointing is True)
    compute = tokens * _flop_seconds(run, peak * hardware.attained, repeated, costs)
    kept = kept_bytes or _kept_bytes(run)
    if run.settings.gradient_checkpointing:
        kept *= 1 + costs.recomputation / TRAINING_TO_FORWARD
    passes = costs.compiled_passes if run.settings.compile else costs.eager_passes
    passes += run.fp8_share * costs.fp8_passes
    elementwise = tokens * kept * passes / hardware.memory_bandwidth
    compute, elementwise = (each * pipeline.busiest_share(run) for each in (compute, elementwise))
    shapes, _ = run.shapes_of_rank
    values = num_parameters(shapes)
    shard = shard_values(shapes, run.layout) if run.profile.zero_stage else values
    offload = _offload_seconds(run, shard)
    optimizer = _update_bytes(run, values, shard) / hardware.memory_bandwidth
    sent, overlap = collectives(run, calls), run.profile.overlap_comm
    elementwise += quantization_bytes(run) / hardware.memory_bandwidth
    exposed = sent.seconds
    if run.profile.zero_stage == 3 if overlap is None else overlap:
        last_backward = BACKWARD_SHARE * (compute + elementwise) / run.accumulation
        hidden = min(sent.passes, compute + elementwise) + min(sent.last, last_backward)
        exposed -= (1 - CONTENTION) * hidden
    idle = (compute + elementwise + pipeline.transfer_seconds(run)) * pipeline.idle_ratio(run)
    return StepTime(compute, elementwise, sent.seconds, exposed, offload, optimizer, idle)


def _flop_seconds(run: PlannedRun, rate: float, repeated: float, costs: Costs) -> float:
    """Return the seconds per token for matrix products.

    Args:
        rate: attained FLOP/s in the run's precision.
    """
    layers = run.flops_per_token - run.attention_flops - run.head_flops
    if run.fp8_share:
        assert run.hardware.fp8 and run.hardware.bf16
        faster = costs.fp8 * run.hardware.fp8 / run.hardware.bf16
        layers *= 1 - run.fp8_share * (1 - 1 / faster)
    busiest = run.busiest_share
    layers += (costs.experts * busiest - 1) * run.routed_flops
    attention = costs.attention * run.attention_flops
    again = costs.recomputation / TRAINING_TO_FORWARD
    layers *= 1 + again * repeated
    attention *= 1 + again * (repeated == 1)
    head = run.head_flops
    if run.settings.loss_chunk_tokens:
        head *= 1 + 1 / TRAINING_TO_FORWARD
    return (layers + attention + head + run.feature_flops) / rate


def _update_bytes(run: PlannedRun, values: int, shard: float) -> float:
    """Return the memory traffic per step and rank of summing gradients and updating weights."""
    profile, stage = run.profile, max(1, run.profile.zero_stage)
    saved = FP32_STATE_BYTES - profile.master_bytes - 2 * profile.moment_bytes
    gradients, step = GRADIENT_BYTES[stage], STEP_BYTES[stage]
    if run.devices == 1:
        gradients, step = ALONE_GRADIENT_BYTES[stage], ALONE_STEP_BYTES[stage]
    elif stage == 2 and all_reduces(run):
        gradients = ALL_REDUCED_GRADIENT_BYTES
    if profile.optimizer_offload != "none":  # the optimizer's shard is on the host
        return gradients.all_values * values * run.accumulation
    moved = gradients.total(values, shard) * run.accumulation + step.total(values, shard)
    return moved - 2 * saved * shard


def _kept_bytes(run: PlannedRun) -> float:
    kept = memory.activations_of(
        config_of_rank(run.model.config, run.layout),
        run.rank_tokens,
        run.profile.precision,
        eager=run.settings.attn_implementation == "eager",
    )
    return (kept.layers + kept.outside) * run.layout.tensor / run.rank_tokens


def _offload_seconds(run: PlannedRun, shard: float) -> float:
    """Return the seconds per step to transfer a rank's shard and update it on the host.

    The transfers follow Ren et al. 2021 (arXiv 2101.06840), section 4.
    """
    hardware = run.hardware
    if run.profile.optimizer_offload == "none":
        return 0.0
    value = run.profile.weight_bytes
    moved = shard * (run.profile.gradient_bytes * run.accumulation + value)
    if run.profile.param_offload != "none":
        moved += shard * value * 2 * run.accumulation
    return moved / hardware.host_link + ADAM_BYTES * shard / hardware.host_bandwidth
