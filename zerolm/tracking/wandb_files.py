"""Reads W&B's own files of a run (`run-ID.wandb`), to find what a W&B run already has.

The files are logs in LevelDB's format: after a header of 7 bytes, blocks of 32 KiB with records,
which may be divided into fragments. A file whose writer was killed ends within a record; the
records before it are valid.
Source: https://github.com/google/leveldb/blob/main/doc/log_format.md
"""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zerolm.run_dir.files import RunFiles

BLOCK_BYTES, HEADER_BYTES = 32768, 7
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4  # types of fragments


def files_of(run_dir: Path, run_id: str) -> list[Path]:
    """Return the files of a W&B run in a run directory, in the order of its starts."""
    paths = RunFiles(run_dir).tracker("wandb").glob(f"*run-*-{run_id}/run-{run_id}.wandb")
    return sorted(paths, key=lambda path: path.parent.name.rpartition("run-2")[2])


def raw_records(path: Path) -> Iterator[bytes]:
    """Yield the complete records of a file."""
    position, record, size_bytes = HEADER_BYTES, b"", path.stat().st_size
    with open(path, "rb") as file:
        file.seek(position)
        while position + HEADER_BYTES <= size_bytes:
            left = BLOCK_BYTES - position % BLOCK_BYTES
            if left < HEADER_BYTES:  # the end of a block has no room for a header
                position += len(file.read(left))
                continue
            header = file.read(HEADER_BYTES)
            size, fragment_type = int.from_bytes(header[4:6], "little"), header[6]
            data = file.read(size)
            if fragment_type not in (FULL, FIRST, MIDDLE, LAST) or len(data) < size:
                return
            record = (b"" if fragment_type in (FULL, FIRST) else record) + data
            if fragment_type in (FULL, LAST):
                yield record
            position += HEADER_BYTES + size


def records(path: Path) -> Iterator[Any]:
    """Yield the records of a file, as W&B's protocol buffers."""
    from wandb.proto import wandb_internal_pb2

    new_record: Any = wandb_internal_pb2.Record  # type: ignore[attr-defined]
    for data in raw_records(path):
        record = new_record()
        with contextlib.suppress(Exception):  # DecodeError, whose class depends on the version
            record.ParseFromString(data)
            yield record


def retire(files: list[Path]) -> None:
    """Mark offline files of earlier starts as sent; remove all but the newest one's directory.

    The files are in the order of the starts, and the next start's file has all their rows. If they
    are not marked, `wandb sync` sends every file of a run from the first line, each overwriting the
    one before (W&B 0.31).
    """
    offline = [path for path in files if path.parent.name.startswith("offline-")]
    for path in offline:
        path.with_name(f"{path.name}.synced").touch()
    for path in offline[:-1]:
        shutil.rmtree(path.parent, ignore_errors=True)


def logged(run_dir: Path, run_id: str) -> set[str]:
    """Return the texts of all alerts and the aliases of all artifacts of a W&B run."""
    found: set[str] = set()
    for path in files_of(run_dir, run_id):
        for record in records(path):
            kind = record.WhichOneof("record_type")
            if kind == "alert":
                found.add(record.alert.text)
            elif kind == "artifact":
                found.update(record.artifact.aliases)
    return found
