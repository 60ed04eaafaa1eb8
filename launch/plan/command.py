"""The `launch plan` command: its flags, and which module handles each of them.

`plan_run` resolves the run, and `estimate` computes its figures. `--search` compares profiles,
`--budget` model sizes, `--published` predictions with published runs, and `--probe` predictions
with a few steps on this machine. Heavy imports are inside functions, so that `--help` is fast.
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

# Flags that pretrain.py has too, parsed by the same code.
SETTINGS = {
    "model_config": ("PATH", "a Hugging Face config.json"),
    "init_from": ("MODEL|RUN[@STEP]", "existing weights, whose config is used"),
    "branch": ("RUN[@STEP]", "a run to continue from a checkpoint, with its config and settings"),
    "deepspeed_config": ("PATH", "DeepSpeed JSON (default: ds_configs/zero2.json)"),
    "total_tokens": ("TOKENS", "tokens to train on (default: 20 per parameter)"),
    "batch_tokens": ("TOKENS", "tokens per optimizer step (default: depends on the compute)"),
    "seq_len": ("TOKENS", "tokens per sequence (default: 2048, or the model's maximum if less)"),
    "precision": ("bf16|fp16|fp32", 'of the weights, where the JSON has "auto" or nothing'),
    "micro_batch_size": ("SEQUENCES|auto", "sequences per micro-batch (default: auto)"),
    "loss_chunk_tokens": ("N", "tokens per chunk of the loss (default: by the size of the logits)"),
    "ema_tokens": ("TOKENS", "half-life of a moving average of the weights (default: none)"),
    "qk_clip": ("X", "largest attention logit of a head; measuring it takes FLOPs (default: off)"),
    "attn_implementation": (
        "NAME",
        "for the activations: eager keeps its score matrices, all others count alike",
    ),
}
HARDWARE_FIGURES = {
    "price_per_hour": ("DOLLARS", "price of a device"),
    "memory_bytes": ("BYTES", "memory of a device"),
    "attained": ("X", "fraction of the peak FLOP/s that training reaches, without communication"),
    "intra_node": ("BYTES", "bandwidth per second between devices of a host, one direction"),
    "inter_node": ("BYTES", "network bandwidth per second of one device"),
    "host_memory_bytes": ("BYTES", "host memory per device"),
}
DEFAULT_DS_CONFIG = "ds_configs/zero2.json"


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Estimate the memory per device, the time and the price of a run from its config "
        "files. Needs no GPU and allocates no weights."
    )
    group = parser.add_argument_group("the run, as for pretrain.py")
    for name, (metavar, text) in SETTINGS.items():
        group.add_argument(f"--{name}", metavar=metavar, help=text)
    group.add_argument(
        "--gradient_checkpointing", nargs="?", const="full", metavar="full|selective|off",
        help="recompute activations in the backward pass; selective keeps matmul and attention "
        "outputs",
    )  # fmt: skip
    group.add_argument(
        "--no-async_checkpoint", dest="synchronous", action="store_true",
        help="training waits until each checkpoint is written",
    )  # fmt: skip
    group = parser.add_argument_group("the devices")
    group.add_argument(
        "--hardware", metavar="NAME|FILE",
        help="H100, A100-80GB, ... in launch/plan/hardware.json, or a file of that form (default: "
        "H100)",
    )  # fmt: skip
    group.add_argument(
        "--devices", metavar="N", type=count, default=8, help="number of devices (default: 8)"
    )  # fmt: skip
    group.add_argument(
        "--devices_per_node", metavar="N", type=count, default=8,
        help="devices of each host (default: 8)",
    )  # fmt: skip
    for name, (metavar, text) in HARDWARE_FIGURES.items():
        read = size_bytes if metavar == "BYTES" else number
        help_text = f"{text} (default: that of --hardware)"
        group.add_argument(f"--{name}", metavar=metavar, type=read, help=help_text)
    group = parser.add_argument_group("assumptions")
    group.add_argument(
        "--mfu", metavar="X", type=number,
        help="model FLOP/s utilization to assume, instead of estimating the step time",
    )  # fmt: skip
    group.add_argument(
        "--failures_per_device_hour", metavar="X", type=number,
        help="interruptions per device-hour (default: 2.2e-5, from Llama 3: 466 in 54 days on "
        "16,384 devices)",
    )  # fmt: skip
    group.add_argument(
        "--restart_seconds", metavar="DURATION", type=duration,
        help="from an interruption until training resumes (default: 600)",
    )  # fmt: skip
    group.add_argument(
        "--restarts_of", metavar="RUN",
        help="the same, but the median of the recoveries that a run has logged",
    )  # fmt: skip
    group.add_argument(
        "--storage_bandwidth", metavar="BYTES", type=size_bytes,
        help="write bandwidth per second of the checkpoint storage (default: 2e9)",
    )  # fmt: skip
    group = parser.add_argument_group("instead of one plan")
    group.add_argument(
        "--search", action="store_true",
        help="rank all profiles by speed; list those that do not fit, with the reason",
    )  # fmt: skip
    group.add_argument(
        "--write", metavar="FILE", help="with --search: write the best profile as DeepSpeed JSON"
    )
    group.add_argument(
        "--probe", action="store_true",
        help="run three training steps on this machine, compare them with the estimate, and plan "
        "with the measurements",
    )  # fmt: skip
    group.add_argument(
        "--probe_ranks",
        metavar="N",
        type=count,
        help="ranks of the probe (default: all devices of this machine)",
    )
    group.add_argument(
        "--probe_timeout", metavar="DURATION", type=duration, default=1800.0,
        help="time limit of the probe (default: 30m)",
    )  # fmt: skip
    group.add_argument(
        "--budget", metavar="FLOPS|MONEY|DAYS",
        help="recommend a model size and a token count for 1e22 (FLOPs), $50000, or 14d on the "
        "devices",
    )  # fmt: skip
    group.add_argument(
        "--published", action="store_true",
        help="compare predictions with published runs (prints docs/published_runs.md)",
    )  # fmt: skip
    group.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Run the command, and return its exit code.

    Raises:
        ConfigError: every problem, one per line.
    """
    if arguments.write and not arguments.search:
        raise ConfigError("command line: --write, needs --search. Add it, or remove --write.")
    if arguments.published:
        return _published()
    if arguments.budget:
        return _budget(arguments)
    if not (arguments.model_config or arguments.init_from or arguments.branch):
        raise ConfigError("command line: --model_config: missing. Name a config.json.")
    if arguments.probe and (arguments.init_from or arguments.branch):
        raise ConfigError("command line: --probe: needs --model_config alone. Name a config.json.")
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

    run = _planned_run(arguments)
    found = estimate(run, assumptions(arguments), arguments.mfu)
    if arguments.json:
        print(json.dumps(to_json(found), indent=2))
    else:
        from launch.plan.text import as_text

        _print_notices(arguments)
        for notice in run.model.notices:
            print(f"note: {notice}")
        print(as_text(found, arguments.mfu))
    return 0


def _print_notices(arguments: argparse.Namespace) -> None:
    """Print which of the config files are zerolm's own because the directory has none."""
    from zerolm.common.shipped import shipped_notice

    for name in (arguments.model_config, arguments.deepspeed_config or DEFAULT_DS_CONFIG):
        if name and (notice := shipped_notice(name)):
            print(f"note: {notice}")


def _planned_run(arguments: argparse.Namespace) -> Any:
    from launch.plan.planned_run import plan_run
    from zerolm.ds_config.precision import with_precision
    from zerolm.ds_config.profile import Profile
    from zerolm.ds_config.schema import schema_problems

    settings, model, begun = _settings_and_model(arguments)
    profile = Profile.read(settings.deepspeed_config or DEFAULT_DS_CONFIG)
    problems = schema_problems(profile)
    profile, notices = with_precision(profile, settings, problems)
    for notice in [] if arguments.json else notices:
        print(f"note: {notice}")
    if problems:
        raise ConfigError(problems)
    return plan_run(
        model,
        profile,
        settings,
        hardware_of(arguments),
        arguments.devices,
        per_node(arguments),
        begun_tokens=begun,
    )


def _settings_and_model(arguments: argparse.Namespace) -> tuple[Any, Any, int]:
    """Return the settings, the model, and the tokens of a trunk before its branch.

    Reads the configs of other runs and of existing weights, but no weights.
    """
    from dataclasses import replace

    from transformers import AutoConfig

    from zerolm.common.errors import Findings
    from zerolm.model.model import Model
    from zerolm.preflight import branch, initial_weights

    settings, found = settings_of(arguments), Findings([])
    if arguments.branch:
        settings, start = branch.find(settings, found)
        if start is None or start.trunk is None or found.problems:
            raise ConfigError(found.problems)
        if "micro_batch_size" in settings.inherited:  # chosen for the devices of the trunk
            settings = replace(settings, micro_batch_size=None)
        values = dict(start.trunk["model_config"])
        config = AutoConfig.for_model(values.pop("model_type"), **values)
        return settings, Model.from_config(config, start.trunk_record), start.record["tokens"]
    given = Model.load(arguments.model_config) if arguments.model_config else None
    if arguments.init_from:
        opened = initial_weights.open_source(settings, found)
        given = initial_weights.model_of(opened, given, found) if opened is not None else None
    if found.problems or given is None:
        raise ConfigError(found.problems)
    return settings, given, 0


def settings_of(arguments: argparse.Namespace) -> Any:
    """Return the settings of the flags that pretrain.py has too, parsed by its rules."""
    from zerolm.config.flags import parse_settings

    flags = []
    for name in SETTINGS:
        value = getattr(arguments, name)
        flags += [] if value is None else [f"--{name}", value]
    checkpointing = arguments.gradient_checkpointing
    flags += [f"--gradient_checkpointing={checkpointing}"] if checkpointing else []
    flags += ["--no-async_checkpoint"] if arguments.synchronous else []
    settings, problems = parse_settings(flags)
    if problems:
        raise ConfigError(problems)
    return settings


def hardware_of(arguments: argparse.Namespace) -> "Hardware":
    from launch.plan import hardware

    figures = {name: getattr(arguments, name) for name in HARDWARE_FIGURES}
    return hardware.load(arguments.hardware, figures)


def per_node(arguments: argparse.Namespace) -> int:
    """Return the devices per node.

    Raises:
        ConfigError: the devices do not fill the nodes.
    """
    devices, local = arguments.devices, min(arguments.devices, arguments.devices_per_node)
    if devices % local:
        raise ConfigError(
            f"command line: --devices: {devices}, must be a multiple of --devices_per_node "
            f"{local}. Use {devices // local * local} or {-(-devices // local) * local}."
        )
    return local


def assumptions(arguments: argparse.Namespace) -> "Assumptions":
    from launch.plan import hardware
    from launch.plan.estimate import Assumptions

    defaults = hardware.assumed()

    def flag_or_default(flag: str, key: str) -> float:
        given = getattr(arguments, flag)
        return defaults[key] if given is None else given

    restart_seconds = flag_or_default("restart_seconds", "restart_seconds")
    if arguments.restarts_of is not None:
        restart_seconds = _measured_restart(arguments.restarts_of)
    return Assumptions(
        flag_or_default("failures_per_device_hour", "failures_per_device_hour"),
        restart_seconds,
        flag_or_default("storage_bandwidth", "storage_write_bytes_per_second"),
    )


def _measured_restart(run_dir: str) -> float:
    """Return the median seconds of a run's recoveries, without repeated steps.

    Raises:
        ConfigError: it has logged none.
    """
    from statistics import median

    from zerolm.common.jsonl import EventRow, read_rows
    from zerolm.common.run_files import RunFiles
    from zerolm.plan.lost_time import measured

    path = RunFiles(run_dir).events
    seconds = measured(read_rows(path, EventRow)).restart_seconds
    if not seconds:
        raise ConfigError(
            f"command line: --restarts_of: {path}, has no event `recovered`. Give a run that "
            f"launch supervise has restarted, or --restart_seconds."
        )
    return float(median(seconds))


# -------------------------------------------------------------------------------------------------
# --probe


def _probe(arguments: argparse.Namespace) -> int:
    from dataclasses import asdict

    from launch.plan import hardware, probe
    from launch.plan.estimate import estimate, to_json
    from launch.plan.text import as_text

    planned_run = _planned_run(arguments)  # raises before anything runs
    settings = settings_of(arguments)
    name = settings.deepspeed_config or DEFAULT_DS_CONFIG
    ranks = arguments.probe_ranks or probe.local_ranks()
    found = probe.probe(planned_run.model, settings, name, ranks, arguments.probe_timeout)
    local = hardware.recognize(found.device)
    same = local is not None and local.name == planned_run.hardware.name
    mfu = arguments.mfu or (found.mfu if same else None)
    planned = estimate(planned_run, assumptions(arguments), mfu, found.memory_ratio)
    days = planned_run.settings.total_tokens / found.tokens_per_second / 86400
    if arguments.json:
        ratio = {"memory_ratio": found.memory_ratio, "mfu": found.mfu, "days_here": days}
        print(json.dumps({"probe": asdict(found) | ratio, "plan": to_json(planned)}, indent=2))
        return 0
    print(probe.as_text(found))
    tokens = f"{planned_run.settings.total_tokens:,} tokens"
    print(f"these {ranks} device(s) would train on {tokens} in {days:,.3g} days")
    time = f"the measured MFU, {mfu:.1%}" if mfu and same else (
        f"the estimated step time, since {planned_run.hardware.name} is not the device here"
    )  # fmt: skip
    print(f"\nPlan with {found.memory_ratio:.4f} x the predicted memory and {time}\n")
    print(as_text(planned, mfu))
    return 0


# -------------------------------------------------------------------------------------------------
# --search


def _search(arguments: argparse.Namespace) -> int:
    from launch.plan import search

    settings, model, _ = _settings_and_model(arguments)
    candidates = search.search(
        model,
        settings,
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
            print(search.usage(best, arguments.write))
    return 0


# -------------------------------------------------------------------------------------------------
# --published and --budget


def _published() -> int:
    from launch.plan import published

    print(published.document())
    return 0


def _budget(arguments: argparse.Namespace) -> int:
    from dataclasses import asdict

    from launch.plan import scaling

    flops, derivation = scaling.flops_of(
        arguments.budget, hardware_of(arguments), arguments.devices, arguments.mfu
    )
    found = scaling.choices(flops)
    if arguments.json:
        print(json.dumps({"flops": flops, "choices": [asdict(one) for one in found]}, indent=2))
    else:
        print(f"{derivation}{scaling.as_text(flops, found)}")
    return 0
