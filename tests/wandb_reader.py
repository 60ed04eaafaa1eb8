"""Read W&B's offline files as `wandb sync` does, with code of the tests only."""

import json
from pathlib import Path
from typing import Any

BLOCK_BYTES, HEADER_BYTES = 32768, 7  # of LevelDB's log format, in which W&B stores records
FULL, LAST = 1, 4
OWN_KEYS = {"_step", "_timestamp", "_runtime"}


def wandb_records(path: Path) -> list[bytes]:
    """Return the records of an offline W&B file: blocks of parts, each a header and data."""
    content, position, parts, records = path.read_bytes(), HEADER_BYTES, b"", []
    while position + HEADER_BYTES <= len(content):
        left = BLOCK_BYTES - position % BLOCK_BYTES
        if left < HEADER_BYTES:
            position += left
            continue
        size = int.from_bytes(content[position + 4 : position + 6], "little")
        kind = content[position + 6]
        parts += content[position + HEADER_BYTES : position + HEADER_BYTES + size]
        position += HEADER_BYTES + size
        if kind in (FULL, LAST):
            records.append(parts)
            parts = b""
    return records


def wandb_runs(run_dir: Path) -> dict[str, list[Any]]:
    """Return {run id: its records} that `wandb sync` would send: those of one file per run."""
    from wandb.proto import wandb_internal_pb2

    runs: dict[str, list[Any]] = {}
    for path in sorted(run_dir.glob("wandb/offline-run-*/*.wandb")):
        if path.with_name(f"{path.name}.synced").exists():
            continue  # already sent, or all in the file of a later start
        records = runs.setdefault(path.stem.removeprefix("run-"), [])
        assert not records, f"{path}: wandb sync would overwrite the file of another start"
        for data in wandb_records(path):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            records.append(record)
    return runs


def of_kind(records: list[Any], kind: str) -> list[Any]:
    return [getattr(record, kind) for record in records if record.WhichOneof("record_type") == kind]


def wandb_rows(records: list[Any]) -> list[dict[str, Any]]:
    """Return the logged rows in order, without those of tables."""
    rows, steps = [], []
    for history in of_kind(records, "history"):
        items = {item.key or "/".join(item.nested_key): item.value_json for item in history.item}
        row = {key: json.loads(text) for key, text in items.items() if key not in OWN_KEYS}
        steps.append(history.step.num)
        if not any(key.startswith("samples/") for key in row):
            rows.append(row)
    assert steps == sorted(set(steps)), "W&B drops a row whose step is not above the last one"
    assert all(step // 100 == row["step"] for step, row in zip(steps, rows, strict=False)
               if len(steps) == len(rows)), "W&B's steps must follow from the run's"  # fmt: skip
    return rows


def own_rows(run_dir: Path, file: str = "metrics.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / file).read_text().splitlines()]
