"""Reads the ledgers of `zerolm.train.instrumentation`: which sequences each step has trained on."""

import json
from pathlib import Path
from typing import Any


def read_sequences(directory: str | Path) -> dict[int, list[int]]:
    """Return {step: sequence numbers of all ranks, ascending}; repeated steps: the last one."""
    return {
        step: sorted(number for entry in entries for number in entry["sequences"])
        for step, entries in _last_lines(directory).items()
    }


def read_sources(directory: str | Path) -> dict[int, dict[int, int]]:
    """Return {step: {sequence number: source}} of all ranks; repeated steps: the last one."""
    return {
        step: {
            number: source
            for entry in entries
            for number, source in zip(entry["sequences"], entry["sources"], strict=True)
        }
        for step, entries in _last_lines(directory).items()
    }


def _last_lines(directory: str | Path) -> dict[int, list[dict[str, Any]]]:
    """Return {step: the last line of each rank}, steps ascending."""
    steps: dict[int, dict[str, dict[str, Any]]] = {}
    for path in sorted(Path(directory).glob("rank-*.jsonl")):
        for line in path.read_text().splitlines():
            entry = json.loads(line)
            steps.setdefault(entry["step"], {})[path.name] = entry
    return {step: list(ranks.values()) for step, ranks in sorted(steps.items())}
