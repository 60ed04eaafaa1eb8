"""Instrumentation for tests and `zerolm plan --probe`: what a rank keeps and trains on.

Off unless an environment variable names a directory, in which each rank then writes a file:
`ZEROLM_MEMORY_PROBE`: bytes of weights, gradients, optimizer states and buffers, before each
optimizer step; `ZEROLM_LEDGER`: the sequences of each step.
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
    """Write `model_state_bytes` of this rank, if `ZEROLM_MEMORY_PROBE` names a directory."""
    directory = os.environ.get(MEMORY_VARIABLE)
    if directory:
        found = {"step": step, **model_state_bytes(engine)}
        write_json(Path(directory) / f"rank-{engine.global_rank:05d}.json", found)


def record_sequences(step: int, micro_batches: Iterable[Mapping[str, Any]]) -> None:
    """Append the sequences of a step to this rank's ledger, if `ZEROLM_LEDGER` names a directory.

    Args:
        micro_batches: tensors `sequence_ids` and `sources`, one entry per row.
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


def fault_after_step(engine: Engine, step: int) -> None:
    """Trigger the faults after an optimizer step; a flip is one of this rank's master weights."""
    if fault_point("step.end", step) == FLIP:
        from zerolm.integrity.checks import flip_bit

        flip_bit(next(each.values for each in states(engine) if each.kind == MASTERS))
