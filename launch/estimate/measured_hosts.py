"""Hosts as `zerolm doctor --write FILE` has measured them, and plans of them: `--measured FILE`."""

import argparse
from pathlib import Path
from typing import TypedDict

from zerolm.common.errors import ConfigError
from zerolm.common.files import write_json
from zerolm.common.records import read_record

AGAIN = "Write it again: zerolm doctor --hostfile HOSTS --write FILE."
DEVICES = ("devices", "devices_per_node")
FLAGS = ("hardware", *DEVICES, "inter_node")  # of the plan, which a file has values for


class MeasuredHosts(TypedDict):
    """The content of the file. Flags of a plan that are given replace its values.

    Attributes:
        hardware: `cpu`, or a name in hardware.json.
        devices: of all hosts; `devices_per_node` of the host with most.
        inter_node: bytes per second that a device of the slowest host sends to another host while
            it receives as many, and all devices of the host do.
        hosts: their names.
        date: of the measurement.
    """

    hardware: str
    devices: int
    devices_per_node: int
    inter_node: float
    hosts: list[str]
    date: str


def write(path: Path, found: MeasuredHosts) -> str:
    """Write the file; return a line with the command that reads it."""
    write_json(path, found)
    return f"wrote {path}; for a plan of these hosts: zerolm plan --search --measured {path}"


def fill(arguments: argparse.Namespace, *, counts_devices: bool) -> None:
    """Set the flags of a plan that were not given to the values in the file of `--measured`.

    Args:
        counts_devices: whether flags of the launcher say how many devices there are.
    """
    path = arguments.measured
    found = read_record(path, MeasuredHosts, AGAIN)
    if found is None:
        raise ConfigError(f"command line: --measured: {path}: no such file. {AGAIN}")
    problems = [
        f"{path}: {name}: {value} must be above 0. {AGAIN}"
        for name, value in found.items()
        if isinstance(value, (int, float)) and value <= 0
    ]
    if problems:
        raise ConfigError(problems)
    for name in FLAGS:
        if getattr(arguments, name) is None and not (counts_devices and name in DEVICES):
            setattr(arguments, name, found[name])  # type: ignore[literal-required]
