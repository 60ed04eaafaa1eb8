"""The settings of a run as flat `section.key: value` pairs, with secrets hidden.

zerolm writes no credentials to run.json, but the DeepSpeed JSON may contain some (such as API keys
for its monitors), and so may URLs.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from zerolm.common.secrets import redacted

SECTIONS = ("settings", "initial_weights", "ds_config", "model_config", "versions")
SINGLE = ("world_size", "zero_stage", "git_commit", "data_fingerprint", "host")

Flat = dict[str, str]


def flatten(record: Mapping[str, Any]) -> Flat:
    """Return {dotted name: value} for the settings in run.json, in file order."""
    flat: Flat = {}
    for name in SINGLE:
        if record.get(name) is not None:
            flat[name] = redacted(name, record[name])
    for section in SECTIONS:
        _add(section, record.get(section), flat)
    return flat


def _add(name: str, value: Any, flat: Flat) -> None:
    """Add a value to `flat` under its name; add a mapping key by key."""
    if isinstance(value, Mapping) and value:
        for key, part in value.items():
            _add(f"{name}.{key}", part, flat)
    elif value is not None and value != []:
        flat[name] = redacted(name, value)


def differences(settings: Sequence[Flat]) -> list[dict[str, Any]]:
    """Return the settings that differ between runs, with each run's value."""
    keys = list(dict.fromkeys(key for flat in settings for key in flat))
    return [
        {"key": key, "values": [flat.get(key) for flat in settings]}
        for key in keys
        if len({flat.get(key) for flat in settings}) > 1
    ]
