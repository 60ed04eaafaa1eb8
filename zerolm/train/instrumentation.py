"""Instrumentation for tests and `zerolm plan --probe`: a rank's memory and training sequences.

Off unless one of these environment variables names a directory. Each rank then writes a file to it:
for `ZEROLM_MEMORY_PROBE` the bytes of weights, gradients, optimizer states and buffers before each
optimizer step, for `ZEROLM_LEDGER` the sequences in each step.
"""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from zerolm.common.faults import FLIP, fault_point
from zerolm.common.files import write_json
from zerolm.engine.protocol import Engine
from zerolm.engine.states import MASTERS, model_state_bytes, states

MEMORY_VARIABLE, LEDGER_VARIABLE = "ZEROLM_MEMORY_PROBE", "ZEROLM_LEDGER"


def record_memory(engine: Engine, step: int) -> None:
    """Write this rank's `model_state_bytes` if `ZEROLM_MEMORY_PROBE` names a directory."""
    directory = os.environ.get(MEMORY_VARIABLE)
    if directory:
        found = {"step": step, **model_state_bytes(engine)}
        write_json(Path(directory) / f"rank-{engine.global_rank:05d}.json", found)


def record_sequences(step: int, micro_batches: Iterable[Mapping[str, Any]]) -> None:
    """Append a step's sequences to this rank's ledger if `ZEROLM_LEDGER` names a directory.

    Args:
        micro_batches: each has tensors `sequence_ids` and `sources`, with one entry per row.
    """
    directory = os.environ.get(LEDGER_VARIABLE)
    if directory:
        line: dict[str, Any] = {"step": step, "sequences": [], "sources": []}
        for batch in micro_batches:
            line["sequences"] += batch["sequence_ids"].tolist()
            line["sources"] += batch["sources"].tolist()
        with open(Path(directory, f"rank-{int(os.environ.get('RANK', 0)):05d}.jsonl"), "a") as file:
            file.write(json.dumps(line) + "\n")


def read_sequences(directory: str | Path) -> dict[int, list[int]]:
    """Return {step: all ranks' sequence numbers, sorted}; a step's last repetition counts."""
    return {
        step: sorted(number for entry in entries for number in entry["sequences"])
        for step, entries in _last_lines(directory).items()
    }


def read_sources(directory: str | Path) -> dict[int, dict[int, int]]:
    """Return {step: {sequence number: source}} over all ranks; a step's last repetition counts."""
    return {
        step: {
            number: source
            for entry in entries
            for number, source in zip(entry["sequences"], entry["sources"], strict=True)
        }
        for step, entries in _last_lines(directory).items()
    }


def _last_lines(directory: str | Path) -> dict[int, list[dict[str, Any]]]:
    """Return {step: each rank's last line}, with steps ascending."""
    steps: dict[int, dict[str, dict[str, Any]]] = {}
    for path in sorted(Path(directory).glob("rank-*.jsonl")):
        for line in path.read_text().splitlines():
            entry = json.loads(line)
            steps.setdefault(entry["step"], {})[path.name] = entry
    return {step: list(ranks.values()) for step, ranks in sorted(steps.items())}


def fault_after_step(engine: Engine, step: int) -> None:
    """Trigger faults after an optimizer step; a flip changes one of this rank's master weights."""
    if fault_point("step.end", step) == FLIP:
        from zerolm.integrity.checks import flip_bit

        flip_bit(next(each.values for each in states(engine) if each.kind == MASTERS))
