"""Which sequences each step really trained on, as the ranks saw them: evidence for tests.

`ZEROLM_LEDGER=DIRECTORY` makes each rank append a line a step, `{"step": 12, "sequences": [...]}`,
to a file of its own there. Without it nothing is done. A step that is taken again after a restart
is there again; the last line of a step counts. Standard library only.
"""

import json
import os
from collections.abc import Iterable
from pathlib import Path

VARIABLE = "ZEROLM_LEDGER"


def record(step: int, sequence_ids: Iterable[int]) -> None:
    """Append what this rank trained on in a step, if a ledger is asked for."""
    directory = os.environ.get(VARIABLE)
    if directory:
        with open(Path(directory, f"rank-{int(os.environ.get('RANK', 0)):05d}.jsonl"), "a") as file:
            file.write(json.dumps({"step": step, "sequences": list(sequence_ids)}) + "\n")


def read(directory: str | Path) -> dict[int, list[int]]:
    """Return {step: sequence numbers, ascending} over all ranks; the last line of a step counts."""
    steps: dict[int, dict[str, list[int]]] = {}
    for path in sorted(Path(directory).glob("rank-*.jsonl")):
        for line in path.read_text().splitlines():
            entry = json.loads(line)
            steps.setdefault(entry["step"], {})[path.name] = entry["sequences"]
    return {
        step: sorted(number for numbers in ranks.values() for number in numbers)
        for step, ranks in sorted(steps.items())
    }
