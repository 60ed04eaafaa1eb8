"""Everything that a run was set to, as flat `section.key: value` pairs that may be shown. Pure.

run.json holds no credentials of ours, but DeepSpeed's JSON may (its monitors have an API key), and
so may a URL: what looks like one is not shown.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

HIDDEN = "(hidden)"
SECTIONS = ("settings", "ds_config", "model_config", "versions")
SINGLE = ("world_size", "zero_stage", "git_commit", "data_fingerprint", "host")
SECRET_KEY = re.compile(
    r"(^|_|\b)(api_?key|key|secret|password|passwd|credentials?|auth|access_token|token)$", re.I
)
URL_PASSWORD = re.compile(r"(\w+://)[^/@\s]*@")
SECRET_VALUE = re.compile(r"\b(hf_|sk-|ghp_|AKIA|local-)[A-Za-z0-9_-]{12,}")

Flat = dict[str, str]


def flat(record: Mapping[str, Any]) -> Flat:
    """Return the settings of a run's record by their dotted names, in its order."""
    found: Flat = {}
    for name in SINGLE:
        if record.get(name) is not None:
            found[name] = shown(name, record[name])
    for section in SECTIONS:
        _flatten(section, record.get(section), found)
    return found


def _flatten(name: str, value: Any, found: Flat) -> None:
    if isinstance(value, Mapping) and value:
        for key, part in value.items():
            _flatten(f"{name}.{key}", part, found)
    elif value is not None and value != []:
        found[name] = shown(name, value)


def shown(name: str, value: Any) -> str:
    """Return a value as text, unless it is a secret."""
    if isinstance(value, str) and SECRET_KEY.search(name.rpartition(".")[2]):
        return HIDDEN
    if isinstance(value, (list, tuple)):
        return ", ".join(shown(name, part) for part in value)
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return SECRET_VALUE.sub(HIDDEN, URL_PASSWORD.sub(rf"\1{HIDDEN}@", text))


def differences(settings: Sequence[Flat]) -> list[dict[str, Any]]:
    """Return the settings that are not the same in all runs, with the value of each run."""
    keys = list(dict.fromkeys(key for flat in settings for key in flat))
    return [
        {"key": key, "values": [flat.get(key) for flat in settings]}
        for key in keys
        if len({flat.get(key) for flat in settings}) > 1
    ]
