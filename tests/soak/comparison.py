"""Compares a run with faults with one without: every row, tensor, number and sequence."""

import json
from pathlib import Path
from typing import Any

from tests.end_to_end import run_digest
from zerolm.parts.metrics import METRICS, metric_of

# Metrics of the time and memory that a run took. All others are compared.
MEASURED = {metric.key for name in ("Speed", "Checkpoints") for metric in METRICS[name]}


def digest(run_dir: Path, ledger_dir: Path) -> dict[str, Any]:
    """Return all that a run has learned and logged, and every sequence that it was trained on.

    JSON values only, so that the digest of a reference can be kept in a file.
    """
    found = run_digest.digest(run_dir, ledger_dir)
    ledger, replays = read_ledger(ledger_dir)
    return {
        "rows": rows(run_dir),
        "progress": {key: shown(value) for key, value in found["progress"].items()},
        "tensors": found["tensors"],
        "sequences": ledger,
        "replays": replays,
    }


def rows(run_dir: Path) -> dict[str, str]:
    """Return {step and key: value} of metrics.jsonl, numbers in hex.

    A save writes a row of its own, with its times; a run that was asked to stop has more of them.
    """
    found: dict[str, str] = {}
    for line in (run_dir / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        step, tokens = row.pop("step"), row.pop("tokens")
        for key, value in row.items():
            metric = metric_of(key)
            if metric is None or metric.key not in MEASURED:
                name = f"step {step}: {key}"
                assert name not in found, f"{name} was logged twice"
                found[name] = shown(value)
                found[f"step {step}: tokens"] = shown(tokens)
    return found


def read_ledger(directory: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Return {rank and step: sequences}, and of those the steps that differ when repeated."""
    found: dict[str, str] = {}
    replays: dict[str, str] = {}
    for path in sorted(directory.glob("rank-*.jsonl")):
        for line in path.read_text().splitlines():
            entry = json.loads(line)
            key, value = f"{path.stem}, step {entry.pop('step')}", json.dumps(entry)
            if found.setdefault(key, value) != value:
                replays[key] = value
    return found, replays


def shown(value: Any) -> str:
    return value.hex() if isinstance(value, float) else json.dumps(value)


def differences(run: dict[str, Any], reference: dict[str, Any]) -> list[str]:
    """Return one line for each difference, in the order of the steps; none if all is equal."""
    found = []
    for part, theirs in reference.items():
        ours = run[part]
        keys = [*theirs, *(key for key in ours if key not in theirs)]
        found += [
            f"{part}: {key}: {ours.get(key, 'absent')}, expected {theirs.get(key, 'absent')}"
            for key in keys
            if ours.get(key) != theirs.get(key)
        ]
    return found


def step_seconds(run_dir: Path) -> float:
    """Return how long all steps of a run took together."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return sum(json.loads(line).get("throughput/step_seconds", 0.0) for line in lines)
