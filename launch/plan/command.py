"""`python -m launch plan`: what a run needs, how long it takes and what it costs, before it starts.

Puts the parts together: what is planned (subject), its figures (estimate), and the questions around
them: which profile (search), which size (scaling), against what was published (published), against
a few steps here (probing). Heavy imports stay inside the functions: `--help` is quick.
"""

import argparse
import json
import logging
from typing import TYPE_CHECKING, Any

from zerolm.common.command_line import count, duration, number, size_bytes
from zerolm.common.errors import ConfigError

if TYPE_CHECKING:
    from launch.plan.estimate import Assumptions
    from launch.plan.hardware import Hardware

# Flags that mean what they mean to pretrain.py, and are read by the same code.
SETTINGS = {
    "model_config": ("PATH", "a Hugging Face config.json"),
    "deepspeed_config": ("PATH", "DeepSpeed's JSON (default: ds_configs/zero2.json)"),
    "total_tokens": ("TOKENS", "tokens to train on (default: 20 per parameter)"),
    "batch_tokens": ("TOKENS", "tokens of an optimizer step (default: by compute)"),
    "seq_len": ("TOKENS", "tokens of a sequence (default: 2048, or the model's positions)"),
    "micro_batch_size": ("SEQUENCES|auto", "sequences a device takes at once (default: auto)"),
    "loss_chunk_tokens": ("N", "tokens whose logits are there at a time (default: by their size)"),
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


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Say what a run needs on each device, how long it takes and what it costs, "
        "from its three files. No GPU is needed, and no weights are allocated."
    )
    group = parser.add_argument_group("the run, as for pretrain.py")
    for name, (shows, text) in SETTINGS.items():
        group.add_argument(f"--{name}", metavar=shows, help=text)
    group.add_argument(
        "--gradient_checkpointing", nargs="?", const="full", metavar="full|selective|off",
        help="compute activations again; selective: but matrix products and attention",
    )  # fmt: skip
    group.add_argument(
        "--no-async_checkpoint", dest="synchronous", action="store_true",
        help="training waits for each checkpoint",
    )  # fmt: skip
    group = parser.add_argument_group("the devices")
    group.add_argument(
        "--hardware", metavar="NAME|FILE",
        help="H100, A100-80GB, ... of launch/plan/hardware.json, or a file like it (default: H100)",
    )  # fmt: skip
    group.add_argument("--devices", metavar="N", type=count, default=8, help="(default: 8)")
    group.add_argument(
        "--devices_per_node", metavar="N", type=count, default=8, help="(default: 8)"
    )
    for name, (shows, text) in FIGURES.items():
        read = size_bytes if shows == "BYTES" else number
        group.add_argument(f"--{name}", metavar=shows, type=read, help=f"{text}, if not theirs")
    group = parser.add_argument_group("what is assumed")
    group.add_argument(
        "--mfu", metavar="X", type=number, help="share of the peak, instead of our model of time"
    )
    group.add_argument(
        "--failures_per_device_hour", metavar="X", type=number,
        help="interruptions (default: Llama 3's, 466 in 54 days on 16,384 devices)",
    )  # fmt: skip
    group.add_argument(
        "--restart_seconds",
        metavar="DURATION",
        type=duration,
        help="until training goes on (default: 600)",
    )
    group.add_argument(
        "--storage_bandwidth", metavar="BYTES", type=size_bytes,
        help="per second, of the checkpoints' storage (default: 2e9)",
    )  # fmt: skip
    group = parser.add_argument_group("other questions")
    group.add_argument(
        "--search", action="store_true", help="which profile is fastest, and why not the others"
    )
    group.add_argument(
        "--write", metavar="FILE", help="with --search: the DeepSpeed JSON of the best one"
    )
    group.add_argument(
        "--probe", action="store_true",
        help="run three real steps here first, compare, and plan with what was measured",
    )  # fmt: skip
    group.add_argument(
        "--probe_ranks", metavar="N", type=count, help="(default: this machine's devices)"
    )
    group.add_argument(
        "--probe_timeout", metavar="DURATION", type=duration, default=1800.0,
        help="(default: 30m)",
    )  # fmt: skip
    group.add_argument(
        "--budget", metavar="FLOPS|MONEY|DAYS",
        help="what to train for 1e22 operations, $50000 or 14d of the devices: size and tokens",
    )  # fmt: skip
    group.add_argument(
        "--published", action="store_true",
        help="what would have been predicted of published runs (docs/published_runs.md)",
    )  # fmt: skip
    group.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Answer what the flags ask for; the return value is the exit code.

    Raises:
        ConfigError: every problem, a line each.
    """
    if arguments.write and not arguments.search:
        raise ConfigError("command line: --write, is for --search. Add it, or remove this.")
    if arguments.published:
        return _published()
    if arguments.budget:
        return _budget(arguments)
    if not arguments.model_config:
        raise ConfigError("command line: --model_config: missing, name a config.json.")
    logging.disable(logging.WARNING)  # DeepSpeed warns that it finds no accelerator
    try:
        if arguments.search:
            return _search(arguments)
        return _probe(arguments) if arguments.probe else _plan(arguments)
    finally:
        logging.disable(logging.NOTSET)


# -------------------------------------------------------------------------------------------------
# One plan


def _plan(arguments: argparse.Namespace) -> int:
    from launch.plan.estimate import estimate, to_json

    found = estimate(_subject(arguments), assumptions(arguments), arguments.mfu)
    if arguments.json:
        print(json.dumps(to_json(found), indent=2))
    else:
        from launch.plan.text import as_text

        _print_notices(arguments)
        print(as_text(found, arguments.mfu))
    return 0


def _print_notices(arguments: argparse.Namespace) -> None:
    """Print which config files are those that come with zerolm."""
    from zerolm.common.shipped import shipped_notice

    for name in (arguments.model_config, arguments.deepspeed_config or DEFAULT_DS_CONFIG):
        if notice := shipped_notice(name):
            print(f"note: {notice}")


def _subject(arguments: argparse.Namespace) -> Any:
    from launch.plan.subject import resolve_subject
    from zerolm.ds_config.profile import Profile
    from zerolm.ds_config.schema import schema_problems
    from zerolm.model.model import Model

    settings = settings_of(arguments)
    profile = Profile.read(settings.deepspeed_config or DEFAULT_DS_CONFIG)
    problems = schema_problems(profile)
    if problems:
        raise ConfigError(problems)
    model, hardware = Model.load(arguments.model_config), hardware_of(arguments)
    return resolve_subject(
        model, profile, settings, hardware, arguments.devices, per_node(arguments)
    )


def settings_of(arguments: argparse.Namespace) -> Any:
    """Read the flags that pretrain.py has too, with its own rules."""
    from zerolm.config.flags import parse_settings

    words = []
    for name in SETTINGS:
        value = getattr(arguments, name)
        words += [] if value is None else [f"--{name}", value]
    again = arguments.gradient_checkpointing
    words += [f"--gradient_checkpointing={again}"] if again else []
    words += ["--no-async_checkpoint"] if arguments.synchronous else []
    settings, problems = parse_settings(words)
    if problems:
        raise ConfigError(problems)
    return settings


def hardware_of(arguments: argparse.Namespace) -> "Hardware":
    from launch.plan import hardware

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
    from launch.plan import hardware
    from launch.plan.estimate import Assumptions

    usual = hardware.assumed()

    def chosen(flag: str, key: str) -> float:
        given = getattr(arguments, flag)
        return usual[key] if given is None else given

    return Assumptions(
        chosen("failures_per_device_hour", "failures_per_device_hour"),
        chosen("restart_seconds", "restart_seconds"),
        chosen("storage_bandwidth", "storage_write_bytes_per_second"),
    )


# -------------------------------------------------------------------------------------------------
# A few steps here


def _probe(arguments: argparse.Namespace) -> int:
    from dataclasses import asdict

    from launch.plan import hardware, probe
    from launch.plan.estimate import estimate, to_json
    from launch.plan.text import as_text

    subject = _subject(arguments)  # what is refused is refused before anything runs
    settings = settings_of(arguments)
    name = settings.deepspeed_config or DEFAULT_DS_CONFIG
    ranks = arguments.probe_ranks or probe.local_ranks()
    found = probe.probe(subject.model, settings, name, ranks, arguments.probe_timeout)
    here = hardware.recognise(found.device)
    same = here is not None and here.name == subject.hardware.name
    mfu = arguments.mfu or (found.mfu if same else None)
    planned = estimate(subject, assumptions(arguments), mfu, found.memory_ratio)
    days = subject.settings.total_tokens / found.tokens_per_second / 86400
    if arguments.json:
        ratio = {"memory_ratio": found.memory_ratio, "mfu": found.mfu, "days_here": days}
        print(json.dumps({"probe": asdict(found) | ratio, "plan": to_json(planned)}, indent=2))
        return 0
    print(probe.as_text(found))
    tokens = f"{subject.settings.total_tokens:,} tokens"
    print(f"these {ranks} device(s) would train {tokens} in {days:,.3g} days")
    time = f"its MFU, {mfu:.1%}" if mfu and same else "our model of time: other devices than here"
    print(f"\nPlan with {found.memory_ratio:.4f} x the predicted memory, and {time}\n")
    print(as_text(planned, mfu))
    return 0


# -------------------------------------------------------------------------------------------------
# Which profile


def _search(arguments: argparse.Namespace) -> int:
    from launch.plan import search
    from zerolm.model.model import Model

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

        from zerolm.common.files import write_json

        write_json(Path(arguments.write), best.profile.json)
        if not arguments.json:
            print(search.next_words(best, arguments.write))
    return 0


# -------------------------------------------------------------------------------------------------
# Which size, and what others found


def _published() -> int:
    from launch.plan import published

    print(published.document())
    return 0


def _budget(arguments: argparse.Namespace) -> int:
    from dataclasses import asdict

    from launch.plan import scaling

    flops, said = scaling.flops_of(
        arguments.budget, hardware_of(arguments), arguments.devices, arguments.mfu
    )
    found = scaling.choices(flops)
    if arguments.json:
        print(json.dumps({"flops": flops, "choices": [asdict(one) for one in found]}, indent=2))
    else:
        print(f"{said}{scaling.as_text(flops, found)}")
    return 0
