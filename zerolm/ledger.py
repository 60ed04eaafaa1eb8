"""Which sequences each step really trained on, as the ranks saw them: evidence for tests.

`ZEROLM_LEDGER=DIRECTORY` makes each rank append a line a step, `{"step": 12, "sequences": [...],
"sources": [...]}`, to a file of its own there. Without it nothing is done. A step that is taken
again after a restart is there again; the last line of a step counts. Standard library only.
"""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

VARIABLE = "ZEROLM_LEDGER"


def record(step: int, micro_batches: Iterable[Mapping[str, Any]]) -> None:
    """Append what this rank trained on in a step, if a ledger is asked for.

    Args:
        micro_batches: with the `sequence_ids` and the `sources` of their rows, as tensors.
    """
    directory = os.environ.get(VARIABLE)
    if directory:
        line: dict[str, Any] = {"step": step, "sequences": [], "sources": []}
        for batch in micro_batches:
            line["sequences"] += batch["sequence_ids"].tolist()
            line["sources"] += batch["sources"].tolist()
        with open(Path(directory, f"rank-{int(os.environ.get('RANK', 0)):05d}.jsonl"), "a") as file:
            file.write(json.dumps(line) + "\n")


def read(directory: str | Path) -> dict[int, list[int]]:
    """Return {step: sequence numbers, ascending} over all ranks; the last line of a step counts."""
    return {
        step: sorted(number for entry in entries for number in entry["sequences"])
        for step, entries in _last_lines(directory).items()
    }


def read_sources(directory: str | Path) -> dict[int, dict[int, int]]:
    """Return {step: {sequence number: source}} over all ranks; the last line of a step counts."""
    return {
        step: {
            number: source
            for entry in entries
            for number, source in zip(entry["sequences"], entry["sources"], strict=True)
        }
        for step, entries in _last_lines(directory).items()
    }


def _last_lines(directory: str | Path) -> dict[int, list[dict[str, Any]]]:
    """Return {step: the last line that each rank wrote of it}, steps ascending."""
    steps: dict[int, dict[str, dict[str, Any]]] = {}
    for path in sorted(Path(directory).glob("rank-*.jsonl")):
        for line in path.read_text().splitlines():
            entry = json.loads(line)
            steps.setdefault(entry["step"], {})[path.name] = entry
    return {step: list(ranks.values()) for step, ranks in sorted(steps.items())}
