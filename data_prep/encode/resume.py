"""Determines which files from an interrupted tokenization can be reused, and removes all others."""

import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from data_prep.files.documents import InputRules
from data_prep.read.readers import Input
from data_prep.read.work_units import WorkUnit
from data_prep.tasks.phases import Phase, Record, fingerprint, valid_records
from zerolm.common.errors import RecordError
from zerolm.common.files import write_json
from zerolm.common.records import read_record
from zerolm.shards.directory import PARTS, ShardDirectory

STATE_FILE = "state.json"  # in the parts directory
PARTS_VERSION = 5  # version of the parts' content; parts of other versions are encoded again
CHECKING_THREADS = 4


def parts_settings(
    rules: InputRules,
    val_fraction: float | None,
    tokenizer_fingerprint: str,
    bos_id: int | None = None,
) -> dict[str, Any]:
    """Return the settings that determine the content of parts; their keys are shown in messages."""
    content_rules = rules.content()
    for key in ("on_bad_input", "max_bad_fraction"):  # these do not affect which documents are read
        del content_rules[key]
    return {
        "version": PARTS_VERSION,
        "--tokenizer": tokenizer_fingerprint,
        "--val_fraction": val_fraction,
        "--bos": bos_id,
        "rules of input": content_rules,
    }


def unit_fingerprint(settings: dict[str, Any], inputs: Sequence[Input], unit: WorkUnit) -> str:
    """Return a fingerprint of everything that determines the parts of a unit."""
    pieces = []
    for piece in unit.ranges:
        each = inputs[piece.input]
        revision = each.hub.revision if each.hub else None
        stored = [each.name, each.suffix, each.size_bytes, each.modified_ns, revision]
        pieces.append([*piece, *stored, *each.identity()])
    return fingerprint([settings, pieces])


def resume_or_clear(
    directories: Sequence[ShardDirectory], inputs: Sequence[Input], settings: dict[str, Any]
) -> None:
    """Keep the parts of an interrupted run of the same command; remove any other run's parts."""
    state = {
        **settings,
        "--input": [each.name for each in inputs],
        "outputs": [
            os.fsencode(each.directory.resolve()).decode(errors="backslashreplace")
            for each in directories
        ],
    }
    output = directories[0].directory
    path = output / PARTS / STATE_FILE
    try:
        before = read_record(path, dict)
    except RecordError:
        before = None
    changed = [] if before is None else [key for key in state if before.get(key) != state[key]]
    if before is not None and not changed:
        log(f"{output}: resuming the interrupted run of this command.")
        return
    if before is not None:
        log(
            f"{output}: removing the parts of an interrupted run of another command (it differs "
            f"in {', '.join(changed)})."
        )
    for each in directories:
        each.clear()
    path.parent.mkdir()
    write_json(path, state)


def discard_damaged(phase: Phase, is_intact: Callable[[int, Record], bool]) -> list[int]:
    """Remove the records of tasks whose outputs are damaged; return the tasks with intact outputs.

    Args:
        is_intact: returns whether a task's outputs are intact; called from several threads.
    """

    def check(task: int, record: Record | None) -> bool:
        if record is None:
            return False
        if is_intact(task, record):
            return True
        phase.path(task).unlink()
        return False

    records = valid_records(phase)
    if not any(records):
        return []
    with ThreadPoolExecutor(CHECKING_THREADS) as threads:
        intact = list(threads.map(check, range(phase.num_tasks), records))
    return [task for task, kept in enumerate(intact) if kept]


def log(line: str) -> None:
    """Print a line to standard error."""
    print(line, file=sys.stderr, flush=True)
