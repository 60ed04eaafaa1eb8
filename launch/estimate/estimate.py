"""Compute the figures of a plan: memory per device, time, price, data rate and checkpoints.

Takes a resolved `PlannedRun`; `text` and `to_json` format the result. Reads no files.
"""

from dataclasses import asdict, dataclass
from typing import Any

from launch.estimate.planned_run import PlannedRun
from launch.estimate.reliability import Interruptions, interruptions
from launch.estimate.step_time import StepTime, step_time
from zerolm.config import defaults
from zerolm.model.activation_memory import Activations
from zerolm.model.flops import head_flops_per_token, recomputed_flops_per_token
from zerolm.plan import exchange, memory
from zerolm.plan.rank_share import config_of_rank, shapes_of_rank

# Published memory use divided by the bytes of the tensors that a plan counts: the median and
# (minimum, maximum) of benchmarks/published_runs.
RESERVED_RATIO, RESERVED_RATIOS = 1.31, (1.21, 1.41)
UINT16_TOKENS = 1 << 16  # larger vocabularies need four bytes per token (docs/formats.md)


@dataclass(frozen=True)
class Assumptions:
    """What no config file says and what does not depend on the device type.

    The defaults are under `assumed` in hardware.json, but for that of the last one.

    Attributes:
        rank_imbalance: see `exchange.busiest_share`.
    """

    failures_per_device_hour: float
    restart_seconds: float
    storage_write_bytes_per_second: float
    rank_imbalance: float = exchange.IMBALANCE


@dataclass(frozen=True)
class DeviceMemory:
    """Peak memory of one device in bytes, by component. Fields are JSON keys.

    `host` and `host_capacity` refer to the device's share of host memory.
    """

    weights: int
    gradients: int
    optimizer: int
    master: int
    secondary: int
    buckets: int
    gathered: int
    activations: int
    loss: int
    margin: int
    capacity: int
    host: int
    host_capacity: int

    @property
    def used(self) -> int:
        states = self.weights + self.gradients + self.optimizer + self.master
        states += self.secondary + self.buckets + self.gathered
        return states + self.activations + self.loss

    @property
    def reserved(self) -> int:
        """Bytes that the device is expected to report as used, including the allocator's cache."""
        return round(RESERVED_RATIO * self.used)

    @property
    def fits(self) -> bool:
        """Whether the live tensors and the margin fit.

        Cached blocks do not count, since the allocator frees them before it fails.
        """
        return self.used + self.margin <= self.capacity and self.host <= self.host_capacity


@dataclass(frozen=True)
class Estimate:
    """All figures of a plan.

    Attributes:
        hardware_flops_per_token: FLOPs per token, including recomputation.
        activations: peak activation bytes of a micro-batch, with and without gradient
            checkpointing.
        mfu: model FLOP/s utilization, which excludes recomputation.
        days: days of training without interruptions.
        calendar_days: days of training including interruptions and checkpoints.
        checkpoint_seconds: time to write a checkpoint completely.
        stall_seconds: time that training waits for each checkpoint.
        interval_steps: number of steps between checkpoints that minimizes the expected lost time.
    """

    run: PlannedRun
    hardware_flops_per_token: float
    memory: DeviceMemory
    activations: dict[str, int]
    step: StepTime
    steps: int
    tokens_per_second: float
    mfu: float
    days: float
    calendar_days: float
    device_hours: float
    price: float | None
    data_bytes_per_second: float
    checkpoint_bytes: int
    checkpoint_seconds: float
    stall_seconds: float
    interruptions: Interruptions
    interval_steps: int


def estimate(run: PlannedRun, assumed: Assumptions, mfu: float | None = None) -> Estimate:
    """Compute the figures of a plan.

    Args:
        mfu: see `step_time`.
    """
    step = step_time(run, mfu)
    settings, hardware, model = run.settings, run.hardware, run.model
    steps = -(-run.tokens // run.settings.batch_tokens)
    run_seconds = steps * step.seconds
    rate = run.settings.batch_tokens / step.seconds
    peak = hardware.peak(run.profile.compute_precision)
    assert peak is not None
    size = memory.checkpoint_bytes(
        model.shapes, run.profile, kept_bytes=settings.kept_bytes(), experts=run.layout.experts
    )
    write = size / assumed.storage_write_bytes_per_second
    copy = size / run.layout.ranks_per_copy / hardware.host_link
    stall = copy if settings.async_checkpoint else copy + write
    lost = interruptions(
        run_seconds,
        run.devices,
        assumed.failures_per_device_hour,
        stall,
        write,
        assumed.restart_seconds,
    )
    calendar = run_seconds / max(1e-9, 1 - lost.lost.total)
    hours = calendar / 3600 * run.devices
    price = hardware.price_per_hour
    recomputed = 0.0
    if settings.gradient_checkpointing is True:  # selective repeats no matmul
        recomputed = recomputed_flops_per_token(model.config, model.shapes, run.settings.seq_len)
    if settings.loss_chunk_tokens:
        recomputed += head_flops_per_token(model.config, model.shapes)
    recomputed += run.feature_flops
    activations = activations_of_rank(run)
    if run.layout.stages > 1:  # the first stage stores the most micro-batches
        layers = run.profile.stage_layers
        activations = memory.stage_activations(activations, layers, 0, run.accumulation)
    micro = run.settings.micro_batch_size
    token_bytes = 2 if model.config.get_text_config().vocab_size <= UINT16_TOKENS else 4
    return Estimate(
        run=run,
        hardware_flops_per_token=run.flops_per_token + recomputed,
        memory=device_memory(run),
        activations={
            "with_checkpointing": activations.peak(True, micro),
            "without_checkpointing": activations.peak(False, micro),
        },
        step=step,
        steps=steps,
        tokens_per_second=rate,
        mfu=run.flops_per_token * rate / (run.devices * peak),
        days=run_seconds / 86400,
        calendar_days=calendar / 86400,
        device_hours=hours,
        price=None if price is None else hours * price,
        data_bytes_per_second=rate * token_bytes,
        checkpoint_bytes=size,
        checkpoint_seconds=write,
        stall_seconds=stall,
        interruptions=lost,
        interval_steps=max(1, round(min(lost.interval_seconds, run_seconds) / step.seconds)),
    )


def device_memory(run: PlannedRun) -> DeviceMemory:
    """Return the peak memory use of one device and of its share of host memory; of pipeline stages,
    of the stage that uses most.
    """
    if run.layout.stages == 1:
        return _memory_of(run)
    stages = (_memory_of(run, stage) for stage in range(run.layout.stages))
    return max(stages, key=lambda each: each.used)


def _memory_of(run: PlannedRun, stage: int | None = None) -> DeviceMemory:
    model, hardware, settings = run.model, run.hardware, run.settings
    kept = settings.kept_bytes()
    states = memory.model_states(
        model.shapes, run.profile, run.layout, kept_bytes=kept, stage=stage
    )
    shapes, _ = shapes_of_rank(model.shapes, run.layout, run.profile.stage_layers, stage)
    buckets, gathered = memory.buffer_bytes(shapes, run.profile)
    activations, stored = activations_of_rank(run), 1
    if stage is not None:
        layers = run.profile.stage_layers
        activations = memory.stage_activations(activations, layers, stage, run.accumulation)
        stored = min(len(layers) - stage, run.accumulation)
    micro, checkpointing = settings.micro_batch_size, settings.gradient_checkpointing
    exchanged = exchange.memory_bytes(
        model.config, shapes, run.layout, micro * run.rank_tokens,
        run.profile.weight_bytes, bool(checkpointing), run.rank_imbalance, stored,
    )  # fmt: skip
    peak = activations.peak(checkpointing, micro) + exchanged
    loss = min(activations.loss_bytes(micro), peak)
    return DeviceMemory(
        weights=states.weights,
        gradients=states.gradients,
        optimizer=states.optimizer,
        master=states.master,
        secondary=states.secondary,
        buckets=buckets,
        gathered=gathered,
        activations=peak - loss,
        loss=loss,
        host=states.host,
        margin=int(hardware.memory_bytes * (1 - defaults.MEMORY_SHARE)),
        capacity=int(hardware.memory_bytes),
        host_capacity=int(hardware.host_memory_bytes),
    )


def activations_of_rank(run: PlannedRun) -> Activations:
    """Return the activation memory of a sequence, or of one device's shard of the sequence."""
    return memory.activations_of(
        config_of_rank(run.model.config, run.layout),
        run.rank_tokens,
        run.profile.precision,
        eager=run.settings.attn_implementation == "eager",
        compiled=run.settings.compile,
        chunk_tokens=run.settings.loss_chunk_tokens,
    )


def _step_seconds(found: Estimate) -> dict[str, float]:
    seconds = asdict(found.step) | {"total": found.step.seconds}
    if found.run.layout.stages == 1:
        del seconds["idle"]
    return seconds


def to_json(found: Estimate) -> dict[str, Any]:
    """Return the figures that `--json` prints and the tests compare with a golden table."""
    run = found.run
    settings = run.settings
    return {
        "model": run.model.path,
        "hardware": run.hardware.name,
        "devices": run.devices,
        "tensor_parallel": run.layout.tensor,
        "sequence_parallel": run.layout.sequence,
        "shard_within": run.layout.shard_within or None,
        "expert_parallel": run.layout.experts,
        "rank_imbalance": run.busiest_share,
        "zero_stage": run.profile.zero_stage,
        "offload": list(run.profile.offloads.values()),
        "precision": run.profile.precision,
        "parameters": run.model.num_parameters,
        "active_parameters": run.model.num_active_parameters,
        "flops_per_token": run.flops_per_token,
        "attention_flops_per_token": run.attention_flops,
        "hardware_flops_per_token": found.hardware_flops_per_token,
        "total_flops": run.flops_per_token * run.tokens,
        "total_tokens": run.settings.total_tokens,
        "seq_len": run.settings.seq_len,
        "batch_tokens": run.settings.batch_tokens,
        "micro_batch_size": run.settings.micro_batch_size,
        "accumulation": run.accumulation,
        "gradient_checkpointing": settings.gradient_checkpointing,
        "memory": {
            **asdict(found.memory),
            **{name: getattr(found.memory, name) for name in ("used", "reserved", "fits")},
        },
        "activations": found.activations,
        **({"stages": list(run.profile.stage_layers)} if run.layout.stages > 1 else {}),
        "step_seconds": _step_seconds(found),
        "steps": found.steps,
        "tokens_per_second": found.tokens_per_second,
        "mfu": found.mfu,
        "days": found.days,
        "calendar_days": found.calendar_days,
        "device_hours": found.device_hours,
        "price": found.price,
        "data_bytes_per_second": found.data_bytes_per_second,
        "checkpoint_bytes": found.checkpoint_bytes,
        "checkpoint_seconds": found.checkpoint_seconds,
        "checkpoint_stall_seconds": found.stall_seconds,
        "interruptions": found.interruptions.expected,
        "checkpoint_interval_seconds": found.interruptions.interval_seconds,
        "checkpoint_interval_steps": found.interval_steps,
        "lost_share": found.interruptions.lost.total,
        "lost": asdict(found.interruptions.lost),
        "lost_with_hourly_faults": asdict(found.interruptions.hourly),
    }
