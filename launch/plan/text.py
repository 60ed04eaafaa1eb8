"""A plan as it is printed: a line for each figure."""

from launch.plan.estimate import Estimate
from launch.plan.step_time import LARGEST_ERROR, TYPICAL_ERROR, WHOLE_RUNS
from zerolm.common.values import shown_bytes
from zerolm.model import activation_checkpointing


def as_text(found: Estimate, mfu: float | None) -> str:
    """Return the plan as it is printed."""
    lines = [*_model_lines(found), ("", ""), *_memory_lines(found), ("", "")]
    lines += [*_time_lines(found, mfu), ("", ""), *_storage_lines(found)]
    width = max(len(name) for name, _ in lines)
    return "\n".join(f"{name:<{width}}  {value}".rstrip() for name, value in lines)


def _model_lines(found: Estimate) -> list[tuple[str, str]]:
    subject = found.subject
    model, settings = subject.model, subject.settings
    dense = subject.flops_per_token - subject.attention_flops
    recomputed = found.hardware_flops_per_token - subject.flops_per_token
    active = ""
    if model.num_active_parameters != model.num_parameters:
        active = f", {model.num_active_parameters:,} of them active for a token"
    flops = f"{subject.flops_per_token:.4g}: {dense:.4g} of matrices, {subject.attention_flops:.4g}"
    flops += " of attention" + (f", and {recomputed:.4g} computed again" if recomputed else "")
    optimizer, weights = subject.profile.offloads.values()
    offload = f", optimizer on {optimizer}" if optimizer != "none" else ""
    offload += f", weights on {weights}" if weights != "none" else ""
    again = activation_checkpointing.title(settings.gradient_checkpointing)
    form = subject.layout.describe()
    whose = "replicas" if form else "devices"
    return [
        ("model", f"{model.path}: {model.num_parameters:,} parameters{active}"),
        ("FLOPs per token", flops),
        ("FLOPs of the run", f"{subject.flops_per_token * settings.total_tokens:.4g}"),
        ("tokens", f"{settings.total_tokens:,}, "
         f"{settings.total_tokens / model.num_parameters:.3g} per parameter"),
        ("batch", f"{settings.batch_tokens:,} tokens = {subject.accumulation} x micro-batch "
         f"{settings.micro_batch_size} x {subject.layout.replicas} {whose} x {settings.seq_len:,}"),
        ("profile", f"ZeRO-{subject.profile.zero_stage}, {subject.profile.precision}{offload}"
         f"{again and f', {again}'}"),
        ("devices", f"{subject.devices} x {subject.hardware.name} on {subject.num_nodes} host(s)"
         f"{form and f', {form}'}"),
    ]  # fmt: skip


def _memory_lines(found: Estimate) -> list[tuple[str, str]]:
    memory = found.memory
    settings = found.subject.settings
    other = found.activations[
        "without_checkpointing" if settings.gradient_checkpointing else "with_checkpointing"
    ]
    without = "without" if settings.gradient_checkpointing else "with"
    over = memory.used + memory.margin - memory.capacity
    verdict = f"{shown_bytes(memory.capacity)}: fits" if over <= 0 else (
        f"{shown_bytes(memory.capacity)}: DOES NOT FIT, {shown_bytes(over)} too much"
    )  # fmt: skip
    host = f"{shown_bytes(memory.host)} of {shown_bytes(memory.host_capacity)}"
    if memory.host > memory.host_capacity:
        host += ": DOES NOT FIT"
    return [
        ("memory per device", ""),
        ("  weights", shown_bytes(memory.weights)),
        ("  gradients", shown_bytes(memory.gradients)),
        ("  optimizer states", shown_bytes(memory.optimizer)),
        ("  fp32 master weights", shown_bytes(memory.master)),
        ("  ZeRO buckets", shown_bytes(memory.buckets)),
        ("  gathered and prefetched", shown_bytes(memory.gathered)),
        ("  activations", f"{shown_bytes(memory.activations)} ({shown_bytes(other)} with the loss "
         f"{without} gradient checkpointing)"),
        ("  logits and loss", shown_bytes(memory.loss)),
        ("  sum", shown_bytes(memory.used)),
        ("  margin", f"{shown_bytes(memory.margin)} for the context, NCCL and fragmentation"),
        ("  of", verdict),
        ("host memory per device", host),
    ]  # fmt: skip


def _time_lines(found: Estimate, mfu: float | None) -> list[tuple[str, str]]:
    step, subject = found.step, found.subject
    if mfu is None:
        spent = f"{step.compute:.3g} s matrices, {step.elementwise:.3g} s element-wise, "
        spent += f"{step.exposed:.3g} s of {step.communication:.3g}"
        spent += f" s communication not hidden, {step.offload + step.optimizer:.3g} s optimizer"
    else:
        spent = "by --mfu"
    price = "not known; give --price_per_hour"
    if found.price is not None:
        hardware = subject.hardware
        price = f"${found.price:,.0f} at ${hardware.price_per_hour:g} a device-hour"
        price += f" ({hardware.price_source}, {hardware.price_date})"
    return [
        ("step", f"{step.seconds:.3g} s: {spent}"),
        ("bound by", step.bound if mfu is None else "--mfu"),
        ("MFU", f"{found.mfu:.1%}"),
        ("tokens per second", f"{found.tokens_per_second:,.0f}, "
         f"{found.tokens_per_second / subject.devices:,.0f} a device"),
        ("steps", f"{found.steps:,}"),
        ("uncertainty", _uncertainty(mfu, subject.layout.replica_size > 1)),
        ("days", f"{found.days:.3g} of training, {found.calendar_days:.3g} with interruptions"),
        ("device-hours", f"{found.device_hours:,.0f}"),
        ("price", price),
    ]  # fmt: skip


def _uncertainty(mfu: float | None, replicas: bool) -> str:
    if mfu is not None:
        return "that of --mfu"
    low, high = WHOLE_RUNS
    exchange = "what a replica exchanges was compared with none; " if replicas else ""
    return exchange + (
        f"benchmarks were within {LARGEST_ERROR:.0%}, half of them within {TYPICAL_ERROR:.0%}; "
        f"half of others' whole runs took {low:g} to {high:g} times their arithmetic"
    )


def _storage_lines(found: Estimate) -> list[tuple[str, str]]:
    lost = found.interruptions
    every = f"{lost.interval_seconds / 60:.3g} minutes = --checkpoint_interval "
    return [
        ("data", f"{shown_bytes(found.data_bytes_per_second)}/s to be read"),
        ("checkpoint", f"{shown_bytes(found.checkpoint_bytes)}, training waits "
         f"{found.stall_seconds:.2g} s, whole after {found.checkpoint_seconds:.3g} s"),
        ("interruptions", f"{lost.expected:.2g} expected, one in "
         f"{lost.mean_seconds / 3600:,.3g} hours"),
        ("save every", f"{every}{found.interval_steps} (Young/Daly); {lost.lost_share:.2%} of the "
         f"time is lost"),
    ]  # fmt: skip
