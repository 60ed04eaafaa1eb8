"""Read the files in which W&B keeps a run (`run-ID.wandb`), to know what a W&B run has already.

The files are logs in LevelDB's format: records in parts, in blocks of 32 KiB, after a header of
seven bytes. A file whose writer was killed ends in the middle of a record; what is before counts.
Source: https://github.com/google/leveldb/blob/main/doc/log_format.md
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

BLOCK_BYTES, HEADER_BYTES = 32768, 7
WHOLE, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def files_of(run_dir: Path, run_id: str) -> list[Path]:
    """Return the files of a W&B run below a run directory, in the order of its starts."""
    found = (Path(run_dir) / "wandb").glob(f"*run-*-{run_id}/run-{run_id}.wandb")
    return sorted(found, key=lambda path: path.parent.name.rpartition("run-2")[2])


def raw_records(path: Path) -> Iterator[bytes]:
    """Yield the records of a file that are whole."""
    position, parts, size_bytes = HEADER_BYTES, b"", path.stat().st_size
    with open(path, "rb") as file:
        file.seek(position)
        while position + HEADER_BYTES <= size_bytes:
            left = BLOCK_BYTES - position % BLOCK_BYTES
            if left < HEADER_BYTES:  # the rest of a block that no header fits into
                position += len(file.read(left))
                continue
            header = file.read(HEADER_BYTES)
            size, kind = int.from_bytes(header[4:6], "little"), header[6]
            data = file.read(size)
            if kind not in (WHOLE, FIRST, MIDDLE, LAST) or len(data) < size:
                return
            parts = (b"" if kind in (WHOLE, FIRST) else parts) + data
            if kind in (WHOLE, LAST):
                yield parts
            position += HEADER_BYTES + size


def records(path: Path) -> Iterator[Any]:
    """Yield the records of a file, as W&B's protocol buffers."""
    from wandb.proto import wandb_internal_pb2

    new_record: Any = wandb_internal_pb2.Record  # type: ignore[attr-defined]
    for data in raw_records(path):
        record = new_record()
        with contextlib.suppress(Exception):  # DecodeError, of a version of protobuf or another
            record.ParseFromString(data)
            yield record


class Told(NamedTuple):
    """What else than rows a W&B run has.

    Attributes:
        alerts: their texts.
        artifacts: their aliases.
    """

    alerts: set[str]
    artifacts: set[str]


def supersede(files: list[Path]) -> None:
    """Have `wandb sync` pass over offline files: what a later start has written has all of it.

    It sends several files of one run one over the other, each from the first line (0.31).
    """
    for path in files:
        if path.parent.name.startswith("offline-"):
            path.with_name(f"{path.name}.synced").touch()


def told(run_dir: Path, run_id: str) -> Told:
    """Read what all starts of a W&B run have written here."""
    found = Told(set(), set())
    for path in files_of(run_dir, run_id):
        for record in records(path):
            kind = record.WhichOneof("record_type")
            if kind == "alert":
                found.alerts.add(record.alert.text)
            elif kind == "artifact":
                found.artifacts.update(record.artifact.aliases)
    return found
