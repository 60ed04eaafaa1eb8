"""Read W&B's own files (`run-ID.wandb`) to find what a W&B run already contains.

The files are logs in LevelDB's format: a 7-byte header is followed by 32 KiB blocks of records,
which may be split into fragments. If the writer of a file was killed, the file may end within a
record; all earlier records are valid.
Source: https://github.com/google/leveldb/blob/main/doc/log_format.md
"""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zerolm.run_dir.files import RunFiles

BLOCK_BYTES, HEADER_BYTES = 32768, 7
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4  # fragment types


def files_of(run_dir: Path, run_id: str) -> list[Path]:
    """Return the files of a W&B run in a run directory, in the order in which they were created."""
    paths = RunFiles(run_dir).tracker("wandb").glob(f"*run-*-{run_id}/run-{run_id}.wandb")
    return sorted(paths, key=lambda path: path.parent.name.rpartition("run-2")[2])


def raw_records(path: Path) -> Iterator[bytes]:
    """Yield the complete records in a file."""
    position, record, size_bytes = HEADER_BYTES, b"", path.stat().st_size
    with open(path, "rb") as file:
        file.seek(position)
        while position + HEADER_BYTES <= size_bytes:
            left = BLOCK_BYTES - position % BLOCK_BYTES
            if left < HEADER_BYTES:  # too short for a header, so the block ends here
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
    """Yield the records in a file as W&B protocol buffers."""
    from wandb.proto import wandb_internal_pb2

    new_record: Any = wandb_internal_pb2.Record  # type: ignore[attr-defined]
    for data in raw_records(path):
        record = new_record()
        with contextlib.suppress(Exception):  # DecodeError, whose class depends on the version
            record.ParseFromString(data)
            yield record


def retire(files: list[Path]) -> None:
    """Mark offline files from earlier starts as sent; remove their directories except the newest.

    The files must be in the order of the starts; the file from the next start contains all rows.
    Without the marks, `wandb sync` would send every file of a run from its first line, each
    overwriting the previous file's data (W&B 0.31).
    """
    offline = [path for path in files if path.parent.name.startswith("offline-")]
    for path in offline:
        path.with_name(f"{path.name}.synced").touch()
    for path in offline[:-1]:
        shutil.rmtree(path.parent, ignore_errors=True)


def logged(run_dir: Path, run_id: str) -> set[str]:
    """Return the texts of all alerts and the aliases of all artifacts in a W&B run."""
    found: set[str] = set()
    for path in files_of(run_dir, run_id):
        for record in records(path):
            kind = record.WhichOneof("record_type")
            if kind == "alert":
                found.add(record.alert.text)
            elif kind == "artifact":
                found.update(record.artifact.aliases)
    return found
