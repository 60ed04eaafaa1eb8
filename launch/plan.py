"""`python -m launch plan`: what a run needs, how long it takes and what it costs, before it starts.

Puts the parts together: what is planned (subject), its figures (estimate), and the questions around
them: which profile (search), which size (scaling), against what was published (published), against
a few steps here (probing). Heavy imports stay inside the functions: `--help` is quick.
"""

import argparse
import json
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from launch.flag_types import count
from zerolm.errors import ConfigError
from zerolm.values import parse_number, shown_bytes

if TYPE_CHECKING:
    from launch.estimate import Assumptions, Estimate
    from launch.hardware import Hardware

# Flags that mean what they mean to pretrain.py, and are read by the same code.
SETTINGS = {
    "model_config": ("PATH", "a Hugging Face config.json"),
    "deepspeed_config": ("PATH", "DeepSpeed's JSON (default: ds_configs/zero2.json)"),
    "total_tokens": ("TOKENS", "tokens to train on (default: 20 per parameter)"),
    "batch_tokens": ("TOKENS", "tokens of an optimizer step (default: by compute)"),
    "seq_len": ("TOKENS", "tokens of a sequence (default: 2048, or the model's positions)"),
    "micro_batch_size": ("SEQUENCES|auto", "sequences a device takes at once (default: auto)"),
    "attn_implementation": ("NAME", "eager keeps all its scores; others are alike here"),
}
FIGURES = {
    "price_per_hour": ("DOLLARS", "of a device"),
    "memory_bytes": ("BYTES", "of a device"),
    "attained": ("X", "share of the peak that training reaches with nothing to wait for"),
    "intra_node": ("BYTES", "per second between devices of a host, one direction"),
    "inter_node": ("BYTES", "per second of a device's share of the network"),
    "host_memory_bytes": ("BYTES", "a device's share of its host's memory"),
}
DEFAULT_DS_CONFIG = "ds_configs/zero2.json"


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Describe the command and its flags."""
    words = commands.add_parser(
        "plan",
        help="memory, time and price of a run, before it starts",
        description="Say what a run needs on each device, how long it takes and what it costs, "
        "from its three files. No GPU is needed, and no weights are allocated.",
    )
    group = words.add_argument_group("the run, as for pretrain.py")
    for name, (shows, text) in SETTINGS.items():
        group.add_argument(f"--{name}", metavar=shows, help=text)
    group.add_argument(
        "--gradient_checkpointing", action="store_true", help="compute activations again"
    )
    group.add_argument(
        "--no-async_checkpoint", dest="synchronous", action="store_true",
        help="training waits for each checkpoint",
    )  # fmt: skip
    group = words.add_argument_group("the devices")
    group.add_argument(
        "--hardware", metavar="NAME|FILE",
        help="H100, A100-80GB, ... of launch/hardware.json, or a file of that form (default: H100)",
    )  # fmt: skip
    group.add_argument("--devices", metavar="N", type=count, default=8, help="(default: 8)")
    group.add_argument(
        "--devices_per_node", metavar="N", type=count, default=8, help="(default: 8)"
    )
    for name, (shows, text) in FIGURES.items():
        group.add_argument(f"--{name}", metavar=shows, type=_number, help=f"{text}, if not theirs")
    group = words.add_argument_group("what is assumed")
    group.add_argument(
        "--mfu", metavar="X", type=_number, help="share of the peak, instead of our model of time"
    )
    group.add_argument(
        "--failures_per_device_hour", metavar="X", type=_number,
        help="interruptions (default: Llama 3's, 466 in 54 days on 16,384 devices)",
    )  # fmt: skip
    group.add_argument(
        "--restart_seconds", metavar="X", type=_number, help="until training goes on (default: 600)"
    )
    group.add_argument(
        "--storage_bandwidth", metavar="BYTES", type=_number,
        help="per second, of the checkpoints' storage (default: 2e9)",
    )  # fmt: skip
    group = words.add_argument_group("other questions")
    group.add_argument(
        "--search", action="store_true", help="which profile is fastest, and why not the others"
    )
    group.add_argument(
        "--write", metavar="FILE", help="with --search: the DeepSpeed JSON of the best one"
    )
    group.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace, command: Sequence[str] = ()) -> int:
    """Answer what the flags ask for; the return value is the exit code.

    Raises:
        ConfigError: every problem, a line each.
    """
    if arguments.write and not arguments.search:
        raise ConfigError("command line: --write, is for --search. Add it, or remove this.")
    if not arguments.model_config:
        raise ConfigError("command line: --model_config: missing, name a config.json.")
    logging.disable(logging.WARNING)  # DeepSpeed warns that it finds no accelerator
    try:
        return _search(arguments) if arguments.search else _plan(arguments)
    finally:
        logging.disable(logging.NOTSET)


# -------------------------------------------------------------------------------------------------
# One plan


def _plan(arguments: argparse.Namespace) -> int:
    from launch.estimate import estimate, to_json

    found = estimate(_subject(arguments), assumptions(arguments), arguments.mfu)
    if arguments.json:
        print(json.dumps(to_json(found), indent=2))
    else:
        print(as_text(found, arguments.mfu))
    return 0


def _subject(arguments: argparse.Namespace) -> Any:
    from launch.subject import Model, resolve_subject
    from zerolm.ds_config import load_ds_config
    from zerolm.ds_schema import schema_problems

    settings = settings_of(arguments)
    name = settings.deepspeed_config or DEFAULT_DS_CONFIG
    raw = load_ds_config(name)
    problems = schema_problems(raw, name)
    if problems:
        raise ConfigError(problems)
    model = Model.load(arguments.model_config)
    return resolve_subject(
        model, raw, name, settings, hardware_of(arguments), arguments.devices, per_node(arguments)
    )


def settings_of(arguments: argparse.Namespace) -> Any:
    """Read the flags that pretrain.py has too, with its own rules."""
    from zerolm.settings import parse_settings

    words = []
    for name in SETTINGS:
        value = getattr(arguments, name)
        words += [] if value is None else [f"--{name}", value]
    words += ["--gradient_checkpointing"] if arguments.gradient_checkpointing else []
    words += ["--no-async_checkpoint"] if arguments.synchronous else []
    settings, problems = parse_settings(words)
    if problems:
        raise ConfigError(problems)
    return settings


def hardware_of(arguments: argparse.Namespace) -> "Hardware":
    from launch import hardware

    return hardware.load(arguments.hardware, {name: getattr(arguments, name) for name in FIGURES})


def per_node(arguments: argparse.Namespace) -> int:
    devices, each = arguments.devices, min(arguments.devices, arguments.devices_per_node)
    if devices % each:
        raise ConfigError(
            f"command line: --devices: {devices}, must be a multiple of --devices_per_node {each}. "
            f"Use {devices // each * each} or {-(-devices // each) * each}."
        )
    return each


def assumptions(arguments: argparse.Namespace) -> "Assumptions":
    from launch import hardware
    from launch.estimate import Assumptions

    usual = hardware.assumed()

    def chosen(flag: str, key: str) -> float:
        given = getattr(arguments, flag)
        return usual[key] if given is None else given

    return Assumptions(
        chosen("failures_per_device_hour", "failures_per_device_hour"),
        chosen("restart_seconds", "restart_seconds"),
        chosen("storage_bandwidth", "storage_write_bytes_per_second"),
    )


def as_text(found: "Estimate", mfu: float | None) -> str:
    """Return the plan as it is printed."""
    lines = [*_model_lines(found), ("", ""), *_memory_lines(found), ("", "")]
    lines += [*_time_lines(found, mfu), ("", ""), *_storage_lines(found)]
    width = max(len(name) for name, _ in lines)
    return "\n".join(f"{name:<{width}}  {value}".rstrip() for name, value in lines)


def _model_lines(found: "Estimate") -> list[tuple[str, str]]:
    subject = found.subject
    model, settings = subject.model, subject.settings
    dense = subject.flops_per_token - subject.attention_flops
    recomputed = found.hardware_flops_per_token - subject.flops_per_token
    active = ""
    if model.num_active_parameters != model.num_parameters:
        active = f", {model.num_active_parameters:,} of them active for a token"
    flops = f"{subject.flops_per_token:.4g}: {dense:.4g} of matrices, {subject.attention_flops:.4g}"
    flops += " of attention" + (f", and {recomputed:.4g} computed again" if recomputed else "")
    optimizer, weights = subject.offload
    offload = f", optimizer on {optimizer}" if optimizer != "none" else ""
    offload += f", weights on {weights}" if weights != "none" else ""
    again = ", gradient checkpointing" if settings.gradient_checkpointing else ""
    return [
        ("model", f"{model.path}: {model.num_parameters:,} parameters{active}"),
        ("FLOPs per token", flops),
        ("FLOPs of the run", f"{subject.flops_per_token * subject.total_tokens:.4g}"),
        ("tokens", f"{subject.total_tokens:,}, "
         f"{subject.total_tokens / model.num_parameters:.3g} per parameter"),
        ("batch", f"{subject.batch_tokens:,} tokens = {subject.accumulation} x micro-batch "
         f"{subject.micro_batch_size} x {subject.devices} devices x {subject.seq_len:,}"),
        ("profile", f"ZeRO-{subject.stage}, {subject.precision}{offload}{again}"),
        ("devices", f"{subject.devices} x {subject.hardware.name} on {subject.num_nodes} host(s)"),
    ]  # fmt: skip


def _memory_lines(found: "Estimate") -> list[tuple[str, str]]:
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


def _time_lines(found: "Estimate", mfu: float | None) -> list[tuple[str, str]]:
    step, subject = found.step, found.subject
    if mfu is None:
        spent = f"{step.compute:.3g} s arithmetic, {step.exposed:.3g} s of {step.communication:.3g}"
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
        ("days", f"{found.days:.3g} of training, {found.calendar_days:.3g} with interruptions"),
        ("device-hours", f"{found.device_hours:,.0f}"),
        ("price", price),
    ]  # fmt: skip


def _storage_lines(found: "Estimate") -> list[tuple[str, str]]:
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


# -------------------------------------------------------------------------------------------------
# Which profile


def _search(arguments: argparse.Namespace) -> int:
    from launch import search
    from launch.subject import Model

    model = Model.load(arguments.model_config)
    candidates = search.search(
        model,
        settings_of(arguments),
        hardware_of(arguments),
        arguments.devices,
        per_node(arguments),
        assumptions(arguments),
    )
    print(json.dumps(search.to_json(candidates), indent=2) if arguments.json
          else search.as_text(candidates))  # fmt: skip
    best = next((one for one in candidates if one.rejected is None), None)
    if best is None:
        return 2
    if arguments.write:
        from pathlib import Path

        from zerolm.files import write_json

        write_json(Path(arguments.write), best.ds)
        if not arguments.json:
            print(search.next_words(best, arguments.write))
    return 0


def _number(text: str) -> float:
    """Read a positive number, also as 3e9, 3B or 500M."""
    try:
        value = float(parse_number(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text!r}: must be positive. Give a larger number.")
    return value
