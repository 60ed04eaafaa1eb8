"""`TensorboardTracker`: copy metrics.jsonl to TensorBoard event files, with tokens as steps.

The files are local, so each start reads the files from earlier starts, finds the first row that is
missing or has changed, and writes this row and all later rows. A purge marker in the new file makes
TensorBoard ignore earlier versions of these rows. The rows discarded by a rollback become a
separate TensorBoard run in a subdirectory.
"""

import os
import shutil
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from zerolm.common.files import host_name
from zerolm.run_dir.files import rollback_name
from zerolm.run_dir.jsonl import MetricsRow, read_rows
from zerolm.tracking.tracker import Row, Tracker

Scalars = dict[str, np.float32]


def scalars(row: Row) -> Scalars:
    """Return the numbers in a row in single precision, as TensorBoard stores them."""
    return {
        key: np.float32(value)
        for key, value in row.items()
        if key not in ("step", "tokens") and isinstance(value, int | float)
    }


class TensorboardTracker(Tracker):
    """A copy of a run in TensorBoard event files."""

    package = "tensorboard"

    def __init__(self, run_dir: Path, of_process: int | None = None):
        super().__init__(run_dir, of_process)
        self.directory = self.files.tracker("tensorboard")
        self.where = f"tensorboard --logdir {self.directory}"

    def open(self) -> None:
        """Find the rows missing from the files, and start a new file.

        Raises:
            ImportError: the package tensorboard is not installed.
        """
        for path in self.files.all_archived_metrics():
            discarded = self.directory / rollback_name(path)
            if not discarded.is_dir():
                write_all(discarded, read_rows(path, MetricsRow))
        written, texts = read_back(self.directory)
        num_same, purge_tokens = _compare(written, read_rows(self.files.metrics, MetricsRow))
        if purge_tokens is not None:
            texts = {key for key in texts if key[0] < purge_tokens}
        self._num_to_skip, self._texts = num_same, texts
        self.writer = EventFile(self.directory, purge_tokens)

    def lacks(self, row: Row) -> bool:
        self._num_to_skip -= 1
        return self._num_to_skip < 0

    def log(self, row: Row) -> None:
        """Write a row as one event."""
        _add(self.writer, row)

    def samples(self, rows: list[Row]) -> None:
        """Write generated texts with one tag per prompt."""
        from tensorboard.plugins.text.summary_v2 import text_pb

        for row in rows:
            tag = f"samples/prompt_{row['prompt_number']}"
            if (row["tokens"], tag) not in self._texts:
                self._texts.add((row["tokens"], tag))
                summary = text_pb(tag, f"**{row['prompt']}**{row['text']}")
                _add_summary(self.writer, summary, row["tokens"])

    def flush(self) -> None:
        self.writer.flush()

    def finish(self, exit_code: int) -> None:
        self.writer.close()


def write_all(directory: Path, rows: Iterable[Row]) -> None:
    """Write rows to event files in a new directory, which appears only when it is complete."""
    unfinished = directory.with_name(f".{directory.name}.tmp")
    shutil.rmtree(unfinished, ignore_errors=True)  # left by a killed process
    writer = EventFile(unfinished, None)
    for row in rows:
        _add(writer, row)
    writer.close()
    unfinished.rename(directory)


def read_back(directory: Path) -> tuple[list[tuple[int, int]], set[tuple[int, str]]]:
    """Read the rows and texts in the files, except those purged by a later start.

    The files may be large, so only a fingerprint of each row is kept in memory.

    Returns:
        [(tokens, fingerprint of the scalars)] with an entry for each row, and {(tokens, tag)} with
        an entry for each text.
    """
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto import event_pb2

    rows: list[tuple[int, int]] = []
    texts: set[tuple[int, str]] = set()
    for path in _files(directory):
        for data in RawEventFileLoader(str(path)).Load():
            event = event_pb2.Event.FromString(data)
            if event.session_log.status == event_pb2.SessionLog.START:
                rows = [entry for entry in rows if entry[0] < event.step]
                texts = {entry for entry in texts if entry[0] < event.step}
            if event.WhichOneof("what") != "summary":
                continue
            values = event.summary.value
            tags = [value.tag for value in values if value.HasField("tensor")]
            texts |= {(event.step, tag) for tag in tags}
            if not tags:
                row = {value.tag: np.float32(value.simple_value) for value in values}
                rows.append((event.step, _fingerprint(row)))
    return rows, texts


def _compare(written: list[tuple[int, int]], rows: Iterable[Row]) -> tuple[int, int | None]:
    """Compare the rows in the files with metrics.jsonl.

    Returns:
        (number of rows to keep, token count from which on to purge the files). The token count is
        None if all rows are kept.
    """
    num_same, purge_tokens = 0, None
    for row in rows:
        if num_same == len(written):
            break
        if (row["tokens"], _fingerprint(scalars(row))) != written[num_same]:
            purge_tokens = min(row["tokens"], written[num_same][0])
            break
        num_same += 1
    else:
        purge_tokens = written[num_same][0] if num_same < len(written) else None
    if purge_tokens is not None:
        while num_same and written[num_same - 1][0] >= purge_tokens:
            num_same -= 1
    return num_same, purge_tokens


def _fingerprint(row: Scalars) -> int:
    """Return a hash that is the same for equal scalars, but only within this process."""
    return hash(tuple(sorted((key, value.tobytes()) for key, value in row.items())))


def _files(directory: Path) -> list[Path]:
    return sorted(directory.glob("events.out.tfevents.*"), key=lambda path: path.name)


class EventFile:
    """An event file, which TensorBoard reads after the existing files in the directory.

    TensorBoard sorts files by name. The name starts with the creation time in seconds or, if the
    clock is behind the newest file, with that file's number plus one.

    Args:
        purge_tokens: token count from which on TensorBoard ignores rows in existing files; None
            keeps all rows.
    """

    def __init__(self, directory: Path, purge_tokens: int | None):
        from tensorboard.compat.proto import event_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        directory.mkdir(parents=True, exist_ok=True)
        numbers = [path.name.split(".")[3] for path in _files(directory)]
        newest = max((int(number) for number in numbers if number.isdecimal()), default=0)
        number = max(int(time.time()), newest + 1)
        path = directory / f"events.out.tfevents.{number:010d}.{host_name()}.{os.getpid()}.0"
        self._records = RecordWriter(open(path, "xb"))
        self.add_event(event_pb2.Event(file_version="brain.Event:2"))
        if purge_tokens is not None:
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self.add_event(event_pb2.Event(step=purge_tokens, session_log=start))
        self.flush()

    def add_event(self, event: Any) -> None:
        event.wall_time = time.time()
        self._records.write(event.SerializeToString())

    def flush(self) -> None:
        self._records.flush()

    def close(self) -> None:
        self._records.close()


def _add(writer: EventFile, row: Row) -> None:
    from tensorboard.compat.proto import summary_pb2

    values = [
        summary_pb2.Summary.Value(tag=key, simple_value=float(value))
        for key, value in scalars(row).items()
    ]
    _add_summary(writer, summary_pb2.Summary(value=values), row["tokens"])


def _add_summary(writer: EventFile, summary: Any, tokens: int) -> None:
    from tensorboard.compat.proto import event_pb2

    writer.add_event(event_pb2.Event(step=tokens, summary=summary))
