"""Instrumentation for tests: record the sequences that a rank trains on, and inject faults.

If `ZEROLM_LEDGER` names a directory, each rank writes the sequences in each step to a file there.
"""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from zerolm.common.faults import FLIP, fault_point
from zerolm.engine.protocol import Engine
from zerolm.engine.states import MASTERS, states

LEDGER_VARIABLE = "ZEROLM_LEDGER"


def record_sequences(step: int, micro_batches: Iterable[Mapping[str, Any]]) -> None:
    """Append the sequences in a step to this rank's ledger if `ZEROLM_LEDGER` names a directory.

    Args:
        micro_batches: each contains the tensors `sequence_ids` and `sources`, with one entry per
            row.
    """
    directory = os.environ.get(LEDGER_VARIABLE)
    if directory:
        line: dict[str, Any] = {"step": step, "sequences": [], "sources": []}
        for batch in micro_batches:
            line["sequences"] += batch["sequence_ids"].tolist()
            line["sources"] += batch["sources"].tolist()
        with open(Path(directory, f"rank-{int(os.environ.get('RANK', 0)):05d}.jsonl"), "a") as file:
            file.write(json.dumps(line) + "\n")


def fault_after_step(engine: Engine, step: int) -> None:
    """Trigger the faults planned for the end of an optimizer step.

    A flip changes one bit in this rank's master weights.
    """
    if fault_point("step.end", step) == FLIP:
        from zerolm.integrity.checks import flip_bit

        flip_bit(next(each.values for each in states(engine) if each.kind == MASTERS))
