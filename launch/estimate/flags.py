"""Flags of `launch plan`, and the devices and budget that they describe.

Imports nothing heavy, to keep `--help` fast.
"""

import argparse
import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from launch.command.hosts import (
    CHOOSE_PARTS,
    VISIBLE_DEVICES,
    read_hostfile,
    started_slots,
    visible_devices,
)
from launch.command.train import add_launcher_flags
from launch.estimate import measured_hosts
from zerolm.common.command_line import count, duration, file_to_write, number, size_bytes
from zerolm.common.errors import ConfigError
from zerolm.parts.parse import add_settings
from zerolm.parts.settings import FLAGS

if TYPE_CHECKING:
    from zerolm.plan.hardware import Hardware

RUN = (
    *("model_config", "init_from", "branch", "deepspeed_config", "total_tokens", "batch_tokens"),
    *("seq_len", "micro_batch_size", "gradient_checkpointing", "async_checkpoint", "shard_within"),
    *(name for name, about in FLAGS.items() if about["planned"]),
)
HARDWARE_FIGURES = {
    "price_per_hour": ("DOLLARS", "price of a device"),
    "memory_bytes": ("BYTES", "memory of a device"),
    "attained": ("X", "fraction of the peak FLOP/s that training reaches, without communication"),
    "intra_node": ("BYTES", "bandwidth per second between devices within a host, in one direction"),
    "inter_node": ("BYTES", "network bandwidth per second of one device"),
    "host_memory_bytes": ("BYTES", "host memory per device"),
}
DEFAULT_DEVICES = DEFAULT_PER_NODE = 8
LAUNCHER_CHOICES = ("hostfile", *CHOOSE_PARTS)  # flags of DeepSpeed's launcher
DEFAULT_DS_CONFIG = "ds_configs/zero2.json"


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Estimate the memory per device, the time and the price of a run from its config "
        "files. Needs no GPU and allocates no weights."
    )
    own = {"deepspeed_config": f"DeepSpeed JSON file (default: {DEFAULT_DS_CONFIG})"}
    add_settings(
        parser.add_argument_group("flags of the run, as for zerolm train"), RUN, own_help=own
    )
    group = parser.add_argument_group("the devices")
    add_devices(group)
    add_launcher_flags(group, LAUNCHER_CHOICES)
    _add_assumptions(parser.add_argument_group("assumptions"))
    _add_modes(parser.add_argument_group("instead of one plan"))


def add_devices(group: argparse._ArgumentGroup) -> None:
    """Add the flags that `hardware_of` reads."""
    group.add_argument(
        "--hardware", metavar="NAME|FILE",
        help="a name from zerolm/plan/hardware.json (H100, A100-80GB, ...), a file in that "
        "format, or cpu for this machine, whose rates are measured (default: H100)",
    )  # fmt: skip
    group.add_argument(
        "--devices", metavar="N", type=count,
        help="number of devices; with --hardware cpu, ranks that share this machine (default: 8; "
        "cpu: 1)",
    )  # fmt: skip
    group.add_argument(
        "--devices_per_node", metavar="N", type=count, help="devices per host (default: 8)"
    )
    group.add_argument(
        "--measured", metavar="FILE",
        help="hosts that zerolm doctor --write FILE has measured: their devices, and the links "
        "between them; the other flags replace its values",
    )  # fmt: skip
    for name, (metavar, text) in HARDWARE_FIGURES.items():
        read = size_bytes if metavar == "BYTES" else number
        help_text = f"{text} (default: from --hardware)"
        group.add_argument(f"--{name}", metavar=metavar, type=read, help=help_text)


def _add_assumptions(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--mfu", metavar="X", type=number,
        help="model FLOP/s utilization to assume instead of estimating the step time",
    )  # fmt: skip
    group.add_argument(
        "--failures_per_device_hour", metavar="X", type=number,
        help="interruptions per device-hour (default: 2.2e-5, from Llama 3: 466 in 54 days on "
        "16,384 devices)",
    )  # fmt: skip
    group.add_argument(
        "--restart_seconds", metavar="DURATION", type=duration,
        help="time from an interruption until training resumes (default: 600)",
    )  # fmt: skip
    group.add_argument(
        "--restarts_of", metavar="RUN",
        help="median recovery time logged by this run, in place of --restart_seconds",
    )  # fmt: skip
    group.add_argument(
        "--storage_bandwidth", metavar="BYTES", type=size_bytes,
        help="write bandwidth per second to the checkpoint storage (default: 2e9)",
    )  # fmt: skip
    group.add_argument(
        "--rank_imbalance", metavar="X", type=number,
        help="with --expert_parallel: tokens that the experts of the busiest device get, divided "
        "by the mean, as the metric router/rank_imbalance says; the pace and the memory are those "
        "of this device (default: 1.2)",
    )  # fmt: skip


def _add_modes(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--search", action="store_true",
        help="rank all profiles by speed; list profiles that do not fit, with the reason",
    )  # fmt: skip
    group.add_argument(
        "--write", type=file_to_write, metavar="FILE",
        help="with --search: write the best profile as DeepSpeed JSON",
    )  # fmt: skip
    group.add_argument(
        "--budget", metavar="FLOPS|MONEY|DAYS",
        help="recommend a model size and a token count for 1e22 (FLOPs), $50000, or 14d on the "
        "devices",
    )  # fmt: skip
    group.add_argument("--json", action="store_true", help="print JSON")


def hardware_of(arguments: argparse.Namespace) -> "Hardware":
    """Return the hardware that the flags describe; set `arguments.devices` if it is None."""
    import dataclasses

    from zerolm.plan import hardware

    launcher = {name: getattr(arguments, name, None) for name in LAUNCHER_CHOICES}
    chosen = {name: value for name, value in launcher.items() if value}
    if arguments.measured is not None:
        measured_hosts.fill(arguments, counts_devices=bool(chosen))
    _count_launch(arguments, chosen)
    if arguments.devices is None:
        arguments.devices = 1 if is_cpu(arguments) else DEFAULT_DEVICES
    if arguments.devices_per_node is None:
        arguments.devices_per_node = DEFAULT_PER_NODE
    figures = {name: getattr(arguments, name) for name in HARDWARE_FIGURES}
    if not is_cpu(arguments):
        return hardware.load(arguments.hardware, figures)
    from launch.estimate import this_machine

    found = this_machine.measure(min(arguments.devices, arguments.devices_per_node))
    given = {name: value for name, value in figures.items() if value is not None}
    return dataclasses.replace(found, **given)


def _count_launch(arguments: argparse.Namespace, given: dict[str, str]) -> None:
    """Set the devices to those that DeepSpeed's launcher would use, if its flags are given.

    Without a hostfile, a host has `--devices_per_node` devices.
    """
    if not given:
        if arguments.devices is None and not is_cpu(arguments):
            _count_visible(arguments)
        return
    hostfile, number = given.pop("hostfile", None), given.get("num_nodes", "1")
    if hostfile:
        slots = {host.name: host.num_slots for host in read_hostfile(Path(hostfile))}
    else:
        slots = {"localhost": arguments.devices_per_node or DEFAULT_PER_NODE}
        given.pop("num_nodes", None)
    used = started_slots(slots, given)
    devices = sum(used.values()) * (1 if hostfile else int(number))
    if arguments.devices not in (None, devices):
        raise ConfigError(
            f"command line: --devices: {arguments.devices}, but the flags of the launcher start "
            f"{devices} ranks. Remove one of them."
        )
    arguments.devices, arguments.devices_per_node = devices, max(used.values())


def _count_visible(arguments: argparse.Namespace) -> None:
    """Set the devices to those in CUDA_VISIBLE_DEVICES, if it is set to numbers; print a note."""
    with contextlib.suppress(ConfigError):  # a plan may be for another machine
        if number := len(visible_devices({})):
            line = f"note: {number} device(s), as {VISIBLE_DEVICES} says; for others use --devices"
            print(line, file=sys.stderr)
            arguments.devices = arguments.devices_per_node = number


def budget_of(arguments: argparse.Namespace) -> tuple[float, str]:
    """Return the FLOPs that --budget allows, and text that says how they were derived."""
    from launch.estimate import scaling

    hardware = hardware_of(arguments)
    return scaling.flops_of(arguments.budget, hardware, arguments.devices, arguments.mfu)


def is_cpu(arguments: argparse.Namespace) -> bool:
    return str(arguments.hardware).lower() == "cpu"
