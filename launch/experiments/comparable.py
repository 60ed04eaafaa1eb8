"""Determine whether the final losses of runs can be compared: same data, sequences and mask.

Validation data is compared by the fingerprints in run.json, else by the fingerprints of the shards,
else, if these are unreadable, by the paths.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from zerolm.common.errors import ShardError
from zerolm.common.url import is_url
from zerolm.parts.settings import STATIC_DEFAULTS
from zerolm.report.run_history import RunHistory
from zerolm.shards.reader import open_source

Meaning = Mapping[str, str]

# Settings that change what a validation loss measures.
SETTINGS = ("seq_len", "eval_tokens", "document_mask", "packing")
VOCABULARY, VALIDATION, TRAINING = "vocab_size", "validation data", "training data"


def meanings(runs: Mapping[str, RunHistory], metrics: Mapping[str, str]) -> dict[str, Meaning]:
    """Return {run: {property: value}} with the properties that must match to compare losses.

    Args:
        metrics: {run: name of its final loss}.
    """
    evaluated = [run for name, run in runs.items() if not metrics[name].startswith("train/")]
    has_fingerprints = all(_fingerprints(run) is not None for run in evaluated)
    return {name: _meaning(run, metrics[name], has_fingerprints) for name, run in runs.items()}


def _meaning(run: RunHistory, metric: str, has_fingerprints: bool) -> Meaning:
    settings, model = run.settings, run.record.get("model_config") or {}
    found = {name: settings.get(name, STATIC_DEFAULTS.get(name)) for name in SETTINGS}
    found |= {"metric": metric.partition(",")[0], VOCABULARY: model.get("vocab_size")}
    if metric.startswith("train/"):
        found[TRAINING] = run.record.get("data_fingerprint")
    else:
        found[VALIDATION] = sorted((has_fingerprints and _fingerprints(run)) or _paths(run))
    return {name: json.dumps(value) for name, value in found.items()}


def _fingerprints(run: RunHistory) -> list[str] | None:
    """Return the fingerprints of a run's validation data; None if any fingerprint is unknown."""
    if "val_fingerprints" in run.record:
        return list(run.record["val_fingerprints"])
    found = [_fingerprint(path) for path in _paths(run)]
    return None if None in found else [each for each in found if each is not None]


def _paths(run: RunHistory) -> list[str]:
    """Return the paths of a run's validation data, relative to the run's working directory.

    They are absolute if run.json contains that directory.
    """
    top = run.record.get("working_directory") or ""
    return [
        path.rstrip("/") if is_url(path) else os.path.normpath(os.path.join(top, path))  # noqa: PTH118
        for path in run.settings.get("val_data") or []
    ]


@cache
def _fingerprint(path: str) -> str | None:
    """Return the fingerprint of the shards at a path; None if they are remote or unreadable."""
    if is_url(path):
        return None
    try:
        return open_source(path).fingerprint
    except ShardError:
        return None


def differences(found: Mapping[str, Meaning]) -> dict[str, str]:
    """Return {property: text} for the properties that differ between runs.

    The text lists each value of the property with the runs that have this value.
    """
    differ = {}
    for what in dict.fromkeys(what for each in found.values() for what in each):
        names: dict[str | None, list[str]] = {}
        for name, each in found.items():
            names.setdefault(each.get(what), []).append(name)
        if len(names) > 1:
            differ[what] = "; ".join(
                f"{_some(runs)}: {value or 'none'}" for value, runs in names.items()
            )
    return differ


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def law_differences(runs: Sequence[RunHistory]) -> list[str]:
    """Return the properties that differ between runs and affect their scaling law.

    Losses can still be compared across these differences.
    """
    return [
        what
        for what, value_of in _OF_THE_LAW.items()
        if len({json.dumps(value_of(run.record), sort_keys=True) for run in runs}) > 1
    ]


def _block(record: Mapping[str, Any], *path: str) -> Any:
    value: Any = record
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


_OF_THE_LAW: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    TRAINING: lambda record: record.get("data_fingerprint"),
    "weights of the sources": lambda record: [
        stage[1] for stage in _block(record, "mixture", "stages") or []
    ],
    "architectures": lambda record: _block(record, "model_config", "model_type"),
    "optimizers": lambda record: _block(record, "ds_config", "optimizer", "type"),
    "parametrizations": lambda record: _block(record, "settings", "parametrization") or "standard",
}
