"""Format an `Estimate` for the console, one line per figure."""

from launch.estimate.estimate import RESERVED_RATIO, RESERVED_RATIOS, Estimate
from launch.estimate.pipeline import busiest_share
from launch.estimate.planned_run import PlannedRun
from launch.estimate.step_time import (
    LARGEST_BENCHMARKS,
    MANY_DEVICES,
    MAX_ERROR,
    MAX_MANY,
    MEDIAN_ERROR,
    MEDIAN_MANY,
    PUBLISHED_RUNS,
)
from zerolm.common.values import duration, shown_bytes, shown_seconds
from zerolm.model import activation_checkpointing


def as_text(found: Estimate, mfu: float | None) -> str:
    """Return the text of a plan."""
    lines = [*_model_lines(found), ("", ""), *_memory_lines(found), ("", "")]
    lines += [*_time_lines(found, mfu), ("", ""), *_storage_lines(found)]
    width = max(len(name) for name, _ in lines)
    return "\n".join(f"{name:<{width}}  {value}".rstrip() for name, value in lines)


def _model_lines(found: Estimate) -> list[tuple[str, str]]:
    run = found.run
    model, settings = run.model, run.settings
    dense = run.flops_per_token - run.attention_flops
    recomputed = found.hardware_flops_per_token - run.flops_per_token
    active = ""
    if model.num_active_parameters != model.num_parameters:
        active = f", {model.num_active_parameters:,} active per token"
    flops = f"{run.flops_per_token:.4g}: {dense:.4g} in parameters, {run.attention_flops:.4g}"
    flops += " in attention" + (f", plus {recomputed:.4g} recomputed" if recomputed else "")
    optimizer, weights = run.profile.offloads.values()
    offload = f", optimizer on {optimizer}" if optimizer != "none" else ""
    offload += f", weights on {weights}" if weights != "none" else ""
    checkpointing = activation_checkpointing.describe(settings.gradient_checkpointing)
    parallelism = run.layout.describe()
    unit = "replicas" if run.layout.replica_size > 1 else "devices"
    measured = [("rates", run.hardware.source)] if run.hardware.is_cpu else []
    if run.layout.experts > 1:
        share = f"{run.busiest_share:g} times the mean (--rank_imbalance)"
        measured.insert(0, ("tokens of the busiest", share))
    stages = []
    if run.layout.stages > 1:
        blocks = ", ".join(map(str, run.profile.stage_layers))
        cost = f"the costliest at {busiest_share(run):.2f} of the mean"
        stages = [("stages", f"{blocks} blocks, {cost}")]
    return [
        ("model", f"{model.path}: {model.num_parameters:,} parameters{active}"),
        ("FLOPs per token", flops),
        ("FLOPs of the run", f"{run.flops_per_token * run.tokens:.4g}"),
        ("tokens", f"{settings.total_tokens:,}, "
         f"{settings.total_tokens / model.num_parameters:.3g} per parameter"
         f"{f', {run.tokens:,} from the branch point' if run.begun_tokens else ''}"),
        ("batch", f"{settings.batch_tokens:,} tokens = {run.accumulation} x micro-batch "
         f"{settings.micro_batch_size} x {run.layout.replicas} {unit} x {settings.seq_len:,}"),
        ("profile", f"ZeRO-{run.profile.zero_stage}, {run.profile.precision}{offload}"
         f"{checkpointing and f', {checkpointing}'}"),
        ("devices", f"{run.devices} x {run.hardware.name} on {run.num_nodes} host(s)"
         f"{parallelism and f', {parallelism}'}"),
        *stages,
        *measured,
    ]  # fmt: skip


def _memory_lines(found: Estimate) -> list[tuple[str, str]]:
    memory = found.memory
    settings = found.run.settings
    alternative = "without" if settings.gradient_checkpointing else "with"
    other = found.activations[f"{alternative}_checkpointing"]
    over = memory.used + memory.margin - memory.capacity
    verdict = f"{shown_bytes(memory.capacity)}: "
    if over > 0:
        verdict += f"DOES NOT FIT, {shown_bytes(over)} short for the live tensors and the margin"
    elif memory.reserved > memory.capacity:
        verdict += (
            "fits, but is tight: the allocator has to free cached blocks, which takes time; "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True reduces them"
        )
    else:
        verdict += "fits"
    low, high = RESERVED_RATIOS
    reserved = (
        f"{shown_bytes(memory.reserved)} in nvidia-smi: {RESERVED_RATIO:g} times the live "
        f"tensors, as others reported ({low:g} to {high:g})"
    )
    host = f"{shown_bytes(memory.host)} of {shown_bytes(memory.host_capacity)}"
    if memory.host > memory.host_capacity:
        host += ": DOES NOT FIT"
    second = []
    if memory.secondary:
        second = [("  hpZ's second weights", shown_bytes(memory.secondary))]
    return [
        ("memory per device", ""),
        ("  weights", shown_bytes(memory.weights)),
        ("  gradients", shown_bytes(memory.gradients)),
        ("  optimizer states", shown_bytes(memory.optimizer)),
        ("  fp32 master weights", shown_bytes(memory.master)),
        *second,
        ("  ZeRO buckets", shown_bytes(memory.buckets)),
        ("  gathered and prefetched", shown_bytes(memory.gathered)),
        ("  activations", f"{shown_bytes(memory.activations)} ({shown_bytes(other)} {alternative} "
         f"gradient checkpointing, including the loss)"),
        ("  logits and loss", shown_bytes(memory.loss)),
        ("  sum of live tensors", shown_bytes(memory.used)),
        ("  expected reserved", reserved),
        ("  margin", f"{shown_bytes(memory.margin)} for the context, NCCL and fragmentation"),
        ("  available", verdict),
        ("host memory per device", host),
    ]  # fmt: skip


def _time_lines(found: Estimate, mfu: float | None) -> list[tuple[str, str]]:
    step, run = found.step, found.run
    if mfu is None:
        spent = f"{shown_seconds(step.compute)} matmuls, {shown_seconds(step.elementwise)} "
        spent += f"element-wise, {shown_seconds(step.exposed)} of "
        spent += f"{shown_seconds(step.communication)} communication exposed, "
        spent += f"{shown_seconds(step.offload + step.optimizer)} optimizer"
        spent += f", {shown_seconds(step.idle)} idle" if step.idle else ""
    else:
        spent = "from the given MFU"
    price = "unknown; give --price_per_hour"
    if found.price is not None:
        hardware = run.hardware
        price = f"${found.price:,.0f} at ${hardware.price_per_hour:g} per device-hour"
        price += f" ({hardware.price_source}, {hardware.price_date})"
    return [
        ("step", f"{shown_seconds(step.seconds)}: {spent}"),
        ("bound by", step.bound if mfu is None else "--mfu"),
        ("MFU", f"{found.mfu:.1%}"),
        ("tokens per second", f"{found.tokens_per_second:,.0f}, "
         f"{found.tokens_per_second / run.devices:,.0f} per device"),
        ("steps", f"{found.steps:,}"),
        ("uncertainty", _uncertainty(mfu, run)),
        ("days", f"{found.days:.3g} of training ({duration(found.days * 86400)}), "
         f"{found.calendar_days:.3g} with interruptions"),
        ("device-hours", f"{found.device_hours:,.0f}"),
        ("price", price),
    ]  # fmt: skip


def _uncertainty(mfu: float | None, run: PlannedRun) -> str:
    if mfu is not None:
        return "depends on the given MFU"
    if run.hardware.is_cpu:
        return (
            "estimates were within a third of the measured time in three runs on one type of CPU; "
            "other programs slow down training"
        )
    low, high = PUBLISHED_RUNS
    median, largest, where = MEDIAN_ERROR, MAX_ERROR, ""
    if run.devices > MANY_DEVICES:
        median, largest = MEDIAN_MANY, MAX_MANY
        where = f" on more than {MANY_DEVICES} devices"
    return "; ".join(
        [
            *_not_compared(run),
            f"benchmarks of dense models{where} were within {largest:.0%}, half of them within "
            f"{median:.0%}",
            f"the middle half of the published runs took {low:g} to {high:g} times their compute "
            f"time",
        ]
    )


def _not_compared(run: PlannedRun) -> list[str]:
    """Return a message for each property of a run that few or no published benchmarks cover."""
    found, stage = [], run.profile.zero_stage
    largest = LARGEST_BENCHMARKS.get(stage)
    if largest is None and run.devices > 1:
        found.append(f"ZeRO-{stage} has not been compared with any benchmark")
    elif largest is not None and run.devices > largest:
        found.append(f"NO BENCHMARK of ZeRO-{stage} has more than {largest:,} devices")
    if run.layout.stages > 1:
        found.append("pipeline stages have not been compared with any benchmark")
    if run.layout.tensor > 1:
        found.append("tensor parallelism has been compared with only 5 benchmarks")
    elif run.layout.sequence > 1:
        found.append("communication within a replica has not been compared with any benchmark")
    keys = ("zero_hpz_partition_size", "zero_quantized_weights", "zero_quantized_gradients")
    if any(run.profile.zero.get(key) not in (None, False, 1) for key in keys):
        found.append("ZeRO++ has not been compared with any benchmark")
    return found


def _storage_lines(found: Estimate) -> list[tuple[str, str]]:
    lost = found.interruptions
    every = f"{lost.interval_seconds / 60:.3g} minutes = --checkpoint_interval "
    return [
        ("data", f"{shown_bytes(found.data_bytes_per_second)}/s read"),
        ("checkpoint", f"{shown_bytes(found.checkpoint_bytes)}, training waits "
         f"{found.stall_seconds:.2g} s, written in {shown_seconds(found.checkpoint_seconds)}"),
        ("interruptions", f"{lost.expected:.2g} expected, one per "
         f"{lost.mean_seconds / 3600:,.3g} hours"),
        ("save every", f"{every}{found.interval_steps} (Young/Daly)"),
        ("time", str(lost.lost)),
        ("a fault an hour", f"{lost.hourly}; saving every {lost.hourly_seconds / 60:.3g} minutes"),
    ]  # fmt: skip
