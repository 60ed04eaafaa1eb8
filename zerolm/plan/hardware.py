"""Devices to plan for: peak FLOP/s, memory, bandwidths and prices, each with a source.

The data is in hardware.json next to this module; a user's file in the same format adds or replaces
devices.
"""

import dataclasses
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerolm.common.errors import ConfigError, did_you_mean
from zerolm.common.records import read_json
from zerolm.distributed.device import ABSENT, CPU, EMULATED_RATIO, Device
from zerolm.plan.peak_flops import TF32

FILE = Path(__file__).with_name("hardware.json")


@dataclass(frozen=True)
class Hardware:
    """One device and its share of the host. Bandwidths are in bytes per second in each direction.

    Attributes:
        match: regular expression for the device name that the driver reports; starts with `cpu` for
            a CPU.
        bf16, fp16, fp8, fp32: dense peak FLOP/s; None if not supported.
        attained: fraction of the peak FLOP/s that training reaches, excluding communication.
        intra_node: bandwidth between two devices on a host.
        inter_node: network bandwidth of the host, per device.
        host_link: bandwidth between the device and host memory.
        host_memory_bytes, host_bandwidth: size and bandwidth of host memory, per device.
    """

    name: str
    match: str
    bf16: float | None
    fp16: float | None
    fp8: float | None
    fp32: float | None
    attained: float
    memory_bytes: float
    memory_bandwidth: float
    intra_node: float
    inter_node: float
    host_link: float
    host_memory_bytes: float
    host_bandwidth: float
    price_per_hour: float | None
    price_date: str
    price_source: str
    source: str

    @property
    def device(self) -> Device:
        """The device in the form that ranks detect; GPUs are marked as absent from this machine."""
        if self.is_cpu:
            ratio = (self.fp32 or 0.0) / (self.bf16 or 1.0)
            lacks = f"multiplies bf16 {ratio:.3g} times slower than float32"
            lacks = lacks if ratio > EMULATED_RATIO else ""
            return Device(CPU, None, True, self.name, lacks, ratio)
        lacks = "" if self.bf16 else "has no native bf16"
        return Device(ABSENT, int(self.memory_bytes), bool(self.bf16), self.name, lacks)

    @property
    def is_cpu(self) -> bool:
        return self.match.startswith(CPU)

    def peak(self, precision: str) -> float | None:
        """Return the dense peak FLOP/s in a precision, or None if the device does not support
        it.
        """
        if precision == TF32:
            return self.bf16 and self.bf16 / 2
        return getattr(self, precision)


def load(named: str | None, changed: Mapping[str, float | None]) -> Hardware:
    """Return the named device from hardware.json or a user's file, with the values in `changed`.

    Args:
        named: a device name, a JSON file that defines one device, or `FILE:NAME`; None means
            `H100`.
    """
    devices = devices_of(FILE)
    requested = named or "H100"
    path, colon, name = requested.rpartition(":")
    if Path(requested).is_file():  # its name has a colon
        path, colon = requested, ""
    file = Path(path if colon else requested)
    if colon or file.suffix == ".json" or file.is_file():
        own = devices_of(file, devices)
        if not colon and len(own) != 1:
            raise ConfigError(
                f"{file}: devices: defines {len(own)} devices, but --hardware takes one. Choose "
                f"one, for example --hardware {file}:{next(iter(own))}."
            )
        devices, requested = {**devices, **own}, name if colon else next(iter(own))
    by_lower_name = {key.lower(): key for key in devices}
    aliases = {"a100": "a100-80gb", "a100-80": "a100-80gb", "a100-40": "a100-40gb"}
    lowered = requested.lower()
    key = by_lower_name.get(lowered) or by_lower_name.get(aliases.get(lowered, ""))
    if key is None:
        raise ConfigError(
            f"command line: --hardware: {requested}: no such device."
            f"{did_you_mean(requested, devices)} Use one of {', '.join(devices)}, cpu for this "
            f"machine, or a file like zerolm/plan/hardware.json."
        )
    given: dict[str, Any] = {name: value for name, value in changed.items() if value is not None}
    return dataclasses.replace(devices[key], **given)


def devices_of(path: Path, base: Mapping[str, Hardware] | None = None) -> dict[str, Hardware]:
    """Read the devices in a file; an entry with `"like": NAME` inherits another device's values."""
    values = read_json(path, "a file like zerolm/plan/hardware.json")
    return parse(values.get("devices") or {}, path, base)


def parse(
    entries: Mapping[str, Any], path: Path, base: Mapping[str, Hardware] | None = None
) -> dict[str, Hardware]:
    """Parse the `devices` object in a file; see `devices_of`."""
    fields = [field.name for field in dataclasses.fields(Hardware) if field.name != "name"]
    texts = {"match", "price_date", "price_source", "source"}
    devices: dict[str, Hardware] = {}
    problems = []
    for name, entry in entries.items():
        known: dict[str, Any] = {}
        entry = dict(entry)
        like = entry.pop("like", None)
        if like is not None:
            if like not in (base or {}):
                hint = did_you_mean(str(like), base or {}) or " Correct it."
                problems.append(f"{path}: devices.{name}.like: {like}: no such device.{hint}")
                continue
            known = dataclasses.asdict((base or {})[like])
        known.update(entry)
        known.pop("name", None)
        for key in [*fields, *known]:
            if key not in fields:
                hint = did_you_mean(key, fields) or " Remove it."
                problems.append(f"{path}: devices.{name}.{key}: no such key.{hint}")
            elif key not in known:
                problems.append(f"{path}: devices.{name}.{key}: missing. Add it.")
            elif key not in texts and not _is_figure(known[key]):
                problems.append(
                    f"{path}: devices.{name}.{key}: {json.dumps(known[key])} must be a positive "
                    f"number. Correct it."
                )
        if not any(f"devices.{name}." in problem for problem in problems):
            devices[name] = Hardware(name=name, **known)
    if not devices and not problems:
        problems.append(f"{path}: devices: missing. Write it like zerolm/plan/hardware.json.")
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    return devices


def assumed() -> dict[str, Any]:
    """Return the device-independent assumptions: fault rate, restart time, storage."""
    return read_json(FILE, "zerolm/plan/hardware.json")["assumed"]


def recognize(device_name: str) -> Hardware | None:
    """Return the device whose pattern has the longest match in a device name, or None without a
    match.
    """
    found = [
        (len(match[0]), one)
        for one in devices_of(FILE).values()
        if (match := re.search(one.match, device_name))
    ]
    return max(found, key=lambda pair: pair[0])[1] if found else None


def _is_figure(value: Any) -> bool:
    return value is None or (
        isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0
    )
