"""Devices that a run may be planned for: peaks, memory, bandwidths, prices, all with a source.

hardware.json beside this file has them; a user's file of the same form adds or replaces entries.
"""

import dataclasses
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerolm.common.errors import ConfigError, did_you_mean
from zerolm.common.values import read_json

FILE = Path(__file__).with_name("hardware.json")


@dataclass(frozen=True)
class Hardware:
    """One device and its share of its host. Bandwidths: bytes per second, one direction.

    Attributes:
        match: a pattern for the name that its driver gives it.
        bf16, fp16, fp8, fp32: dense peaks, operations per second; None where it has none.
        attained: share of the peak that training reaches when nothing waits for a network.
        inter_node: the device's share of its host's network.
        host_link: between device and host memory.
        host_memory_bytes, host_bandwidth: the device's share of its host's memory.
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

    def peak(self, precision: str) -> float | None:
        """Return the dense peak in operations per second, None where the device has none."""
        return getattr(self, precision)


def load(named: str | None, changed: Mapping[str, float | None]) -> Hardware:
    """Return a device by name, from our table or a file; some of its figures may be given.

    Args:
        named: `H100`, a JSON file with one device, or `FILE:NAME`.
        changed: figures of flags, None where a flag was not given.

    Raises:
        ConfigError: there is no such device, or the file is not of that form.
    """
    devices = devices_of(FILE)
    wanted = named or "H100"
    path, colon, name = wanted.rpartition(":")
    file = Path(path if colon else wanted)
    if colon or file.suffix == ".json" or file.is_file():
        own = devices_of(file, devices)
        if not colon and len(own) != 1:
            raise ConfigError(
                f"{file}: devices: {len(own)}, say which one: --hardware {file}:{next(iter(own))}"
            )
        devices, wanted = {**devices, **own}, name if colon else next(iter(own))
    found = {key.lower(): key for key in devices}
    short = {"a100": "a100-80gb", "a100-80": "a100-80gb", "a100-40": "a100-40gb"}
    lowered = wanted.lower()
    key = found.get(lowered) or found.get(short.get(lowered, ""))
    if key is None:
        raise ConfigError(
            f"command line: --hardware: {wanted}, no such device.{did_you_mean(wanted, devices)} "
            f"Known are {', '.join(devices)}; or give a file like launch/plan/hardware.json."
        )
    given: dict[str, Any] = {name: value for name, value in changed.items() if value is not None}
    return dataclasses.replace(devices[key], **given)


def devices_of(path: Path, base: Mapping[str, Hardware] | None = None) -> dict[str, Hardware]:
    """Read the devices of a file; an entry with `"like": NAME` changes another one.

    Raises:
        ConfigError: a key is missing, unknown or not a number.
    """
    values = read_json(path, "a file like launch/plan/hardware.json")
    fields = [field.name for field in dataclasses.fields(Hardware) if field.name != "name"]
    texts = {"match", "price_date", "price_source", "source"}
    devices: dict[str, Hardware] = {}
    problems = []
    for name, entry in (values.get("devices") or {}).items():
        known: dict[str, Any] = {}
        entry = dict(entry)
        like = entry.pop("like", None)
        if like is not None:
            if like not in (base or {}):
                problems.append(f"{path}: devices.{name}.like: {like}, no such device. Correct it.")
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
                    f"{path}: devices.{name}.{key}: {json.dumps(known[key])}, must be a positive "
                    f"number. Correct it."
                )
        if not any(f"devices.{name}." in problem for problem in problems):
            devices[name] = Hardware(name=name, **known)
    if not devices and not problems:
        problems.append(f"{path}: devices: missing. Write it like launch/plan/hardware.json.")
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    return devices


def assumed() -> dict[str, Any]:
    """Return the figures that belong to no device: failures, restarts, storage."""
    return read_json(FILE, "launch/plan/hardware.json")["assumed"]


def recognise(device_name: str) -> Hardware | None:
    """Return the device by the name that its driver gives it, None where it is not known."""
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
