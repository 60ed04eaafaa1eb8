"""The figures of a plan: memory of a device line by line, time, money, data, checkpoints."""

from dataclasses import asdict, dataclass
from typing import Any

from launch.plan.reliability import Interruptions, interruptions
from launch.plan.step_time import StepTime, step_time
from launch.plan.subject import Subject
from zerolm.config import defaults
from zerolm.model.activation_memory import Activations
from zerolm.model.flops import head_flops_per_token, recomputed_flops_per_token
from zerolm.plan import memory
from zerolm.plan.rank_share import config_of_rank

UINT16_TOKENS = 1 << 16  # a larger vocabulary takes four bytes a token (docs/formats.md)


@dataclass(frozen=True)
class Assumptions:
    """What belongs to the place and not to the model: see `assumed` in hardware.json."""

    failures_per_device_hour: float
    restart_seconds: float
    storage_write_bytes_per_second: float


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes of one device by what they hold, at the fullest moment of a step."""

    weights: int
    gradients: int
    optimizer: int
    master: int
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
        return states + self.buckets + self.gathered + self.activations + self.loss

    @property
    def fits(self) -> bool:
        return self.used + self.margin <= self.capacity and self.host <= self.host_capacity


@dataclass(frozen=True)
class Estimate:
    """All figures of a plan.

    Attributes:
        hardware_flops_per_token: with what gradient checkpointing computes again.
        activations: bytes of a micro-batch with gradient checkpointing and without.
        checkpoint_seconds: until a checkpoint is whole on the storage.
        stall_seconds: that training stands still for it.
        days: of training alone; `calendar_days` with interruptions and checkpoints.
    """

    subject: Subject
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


def estimate(
    subject: Subject, assumed: Assumptions, mfu: float | None = None, memory_ratio: float = 1.0
) -> Estimate:
    """Compute the figures of a plan.

    Args:
        mfu: as for `step_time`.
        memory_ratio: measured memory over predicted, of a probe.
    """
    step = step_time(subject, mfu)
    settings, hardware, model = subject.settings, subject.hardware, subject.model
    steps = -(-subject.settings.total_tokens // subject.settings.batch_tokens)
    run_seconds = steps * step.seconds
    rate = subject.settings.batch_tokens / step.seconds
    peak = hardware.peak(subject.profile.compute_precision)
    assert peak is not None
    size = memory.checkpoint_bytes(model.shapes, subject.profile)
    write = size / assumed.storage_write_bytes_per_second
    copy = size / subject.devices / hardware.host_link
    stall = copy if settings.async_checkpoint else copy + write
    lost = interruptions(
        run_seconds,
        subject.devices,
        assumed.failures_per_device_hour,
        stall,
        write,
        assumed.restart_seconds,
    )
    calendar = run_seconds / max(1e-9, 1 - lost.lost_share)
    hours = calendar / 3600 * subject.devices
    price = hardware.price_per_hour
    again = 0.0
    if settings.gradient_checkpointing is True:  # selective repeats no matrix product
        again = recomputed_flops_per_token(model.config, model.shapes, subject.settings.seq_len)
    if settings.loss_chunk_tokens:
        again += head_flops_per_token(model.config, model.shapes)
    each = own_activations(subject)
    micro = subject.settings.micro_batch_size
    width = 2 if model.config.get_text_config().vocab_size <= UINT16_TOKENS else 4
    return Estimate(
        subject=subject,
        hardware_flops_per_token=subject.flops_per_token + again,
        memory=device_memory(subject, memory_ratio),
        activations={
            "with_checkpointing": each.peak(True, micro),
            "without_checkpointing": each.peak(False, micro),
        },
        step=step,
        steps=steps,
        tokens_per_second=rate,
        mfu=subject.flops_per_token * rate / (subject.devices * peak),
        days=run_seconds / 86400,
        calendar_days=calendar / 86400,
        device_hours=hours,
        price=None if price is None else hours * price,
        data_bytes_per_second=rate * width,
        checkpoint_bytes=size,
        checkpoint_seconds=write,
        stall_seconds=stall,
        interruptions=lost,
        interval_steps=max(1, round(min(lost.interval_seconds, run_seconds) / step.seconds)),
    )


def device_memory(subject: Subject, ratio: float = 1.0) -> DeviceMemory:
    """Return the bytes of one device, and of its share of its host, times a measured ratio."""
    model, hardware, settings = subject.model, subject.hardware, subject.settings
    states = memory.model_states(model.shapes, subject.profile, subject.devices)
    buckets, gathered = memory.buffer_bytes(subject.shapes_of_rank[0], subject.profile)
    each = own_activations(subject)
    peak = each.peak(settings.gradient_checkpointing, subject.settings.micro_batch_size)
    loss = min(each.loss_bytes(subject.settings.micro_batch_size), peak)
    held = {
        "weights": states.weights,
        "gradients": states.gradients,
        "optimizer": states.optimizer,
        "master": states.master,
        "buckets": buckets,
        "gathered": gathered,
        "activations": peak - loss,
        "loss": loss,
        "host": states.host,
    }
    return DeviceMemory(
        **{name: round(size * ratio) for name, size in held.items()},
        margin=int(hardware.memory_bytes * (1 - defaults.MEMORY_SHARE)),
        capacity=int(hardware.memory_bytes),
        host_capacity=int(hardware.host_memory_bytes),
    )


def own_activations(subject: Subject) -> Activations:
    """Return what a device keeps of a sequence for its backward pass: all, or its part."""
    return memory.activations_of(
        config_of_rank(subject.model.config, subject.layout),
        subject.rank_tokens,
        subject.profile.precision,
        eager=subject.settings.attn_implementation == "eager",
        chunk_tokens=subject.settings.loss_chunk_tokens,
    )


def to_json(found: Estimate) -> dict[str, Any]:
    """Return the figures as they stand in `--json` and in the golden table."""
    subject = found.subject
    settings = subject.settings
    return {
        "model": subject.model.path,
        "hardware": subject.hardware.name,
        "devices": subject.devices,
        "tensor_parallel": subject.layout.tensor,
        "sequence_parallel": subject.layout.sequence,
        "zero_stage": subject.profile.zero_stage,
        "offload": list(subject.profile.offloads.values()),
        "precision": subject.profile.precision,
        "parameters": subject.model.num_parameters,
        "active_parameters": subject.model.num_active_parameters,
        "flops_per_token": subject.flops_per_token,
        "attention_flops_per_token": subject.attention_flops,
        "hardware_flops_per_token": found.hardware_flops_per_token,
        "total_flops": subject.flops_per_token * subject.settings.total_tokens,
        "total_tokens": subject.settings.total_tokens,
        "seq_len": subject.settings.seq_len,
        "batch_tokens": subject.settings.batch_tokens,
        "micro_batch_size": subject.settings.micro_batch_size,
        "accumulation": subject.accumulation,
        "gradient_checkpointing": settings.gradient_checkpointing,
        "memory": {**asdict(found.memory), "used": found.memory.used, "fits": found.memory.fits},
        "activations": found.activations,
        "step_seconds": asdict(found.step) | {"total": found.step.seconds},
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
        "lost_share": found.interruptions.lost_share,
    }
