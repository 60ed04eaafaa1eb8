"""Read the files in which W&B keeps a run (`run-ID.wandb`), to know what a W&B run has already.

The files are logs in LevelDB's format: records in parts, in blocks of 32 KiB, after a header of
seven bytes. A file whose writer was killed ends in the middle of a record; what is before counts.
Source: https://github.com/google/leveldb/blob/main/doc/log_format.md
"""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

BLOCK_BYTES, HEADER_BYTES = 32768, 7
WHOLE, FIRST, MIDDLE, LAST = 1, 2, 3, 4

Row = dict[str, Any]


def files_of(run_dir: Path, run_id: str) -> list[Path]:
    """Return the files of a W&B run below a run directory, in the order of its starts."""
    found = (Path(run_dir) / "wandb").glob(f"*run-*-{run_id}/run-{run_id}.wandb")
    return sorted(found, key=lambda path: path.parent.name.rpartition("run-2")[2])


def raw_records(path: Path) -> Iterator[bytes]:
    """Yield the records of a file that are whole."""
    content = path.read_bytes()
    position, parts = HEADER_BYTES, b""
    while position + HEADER_BYTES <= len(content):
        left = BLOCK_BYTES - position % BLOCK_BYTES
        if left < HEADER_BYTES:  # the rest of a block that no header fits into
            position += left
            continue
        size = int.from_bytes(content[position + 4 : position + 6], "little")
        kind = content[position + 6]
        end = position + HEADER_BYTES + size
        if kind not in (WHOLE, FIRST, MIDDLE, LAST) or end > len(content):
            return
        parts = (b"" if kind in (WHOLE, FIRST) else parts) + content[position + HEADER_BYTES : end]
        if kind in (WHOLE, LAST):
            yield parts
        position = end


def records(path: Path) -> Iterator[Any]:
    """Yield the records of a file, as W&B's protocol buffers."""
    from wandb.proto import wandb_internal_pb2

    new_record: Any = wandb_internal_pb2.Record  # type: ignore[attr-defined]
    for data in raw_records(path):
        record = new_record()
        with contextlib.suppress(Exception):  # DecodeError, of a version of protobuf or another
            record.ParseFromString(data)
            yield record


class Contents(NamedTuple):
    """What a W&B run has.

    Attributes:
        rows: what was logged, with W&B's own `_step`, `_timestamp` and `_runtime`.
        alerts: their texts.
        artifacts: their aliases.
    """

    rows: list[Row]
    alerts: set[str]
    artifacts: set[str]


def supersede(files: list[Path]) -> None:
    """Have `wandb sync` pass over offline files: what a later start has written has all of it.

    It sends several files of one run one over the other, each from the first line (0.31).
    """
    for path in files:
        if path.parent.name.startswith("offline-"):
            path.with_name(f"{path.name}.synced").touch()


def contents(run_dir: Path, run_id: str) -> Contents:
    """Read what all starts of a W&B run have written, rows in the order of `_step`, each once.

    A later start takes its numbers from where the server was, an offline one from 0. What an
    earlier one had numbered beyond that has not arrived.
    """
    rows: dict[int, Row] = {}
    found = Contents([], set(), set())
    for path in files_of(run_dir, run_id):
        first = None
        for record in records(path):
            kind = record.WhichOneof("record_type")
            if kind == "alert":
                found.alerts.add(record.alert.text)
            elif kind == "artifact":
                found.artifacts.update(record.artifact.aliases)
            elif kind == "history":
                step = record.history.step.num
                if first is None:
                    first = step
                    rows = {number: row for number, row in rows.items() if number < first}
                rows[step] = {**_row(record.history), "_step": step}
    found.rows.extend(rows[step] for step in sorted(rows))
    return found


def _row(history: Any) -> Row:
    row: Row = {}
    for item in history.item:
        path = list(item.nested_key) or [item.key]
        inner = row
        for key in path[:-1]:
            inner = inner.setdefault(key, {})
        inner[path[-1]] = json.loads(item.value_json)
    return row
