"""TensorBoard's event files as a copy of `metrics.jsonl`, below `RUN/tensorboard`; x is tokens.

Local files only, so every start reads what the last one left, finds the first row that is missing
or has changed since, and writes from there: TensorBoard drops what a start takes again (`purge`).
What a rollback went back over becomes a TensorBoard run of its own.
"""

import json
import shutil
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

DIRECTORY = "tensorboard"

Row = dict[str, Any]
Scalars = dict[str, np.float32]


def scalars(row: Row) -> Scalars:
    """Return what TensorBoard keeps of a row: its numbers, in single precision."""
    return {
        key: np.float32(value)
        for key, value in row.items()
        if key not in ("step", "tokens") and isinstance(value, int | float)
    }


class TensorboardTracker:
    """The event files of a run."""

    def __init__(self, run_dir: Path):
        self.run_dir = Path(run_dir)
        self.directory = self.run_dir / DIRECTORY
        self.where = f"tensorboard --logdir {self.directory}"

    def open(self) -> None:
        """Find what the files lack, and begin another file.

        Raises:
            ImportError: the package tensorboard is not installed.
        """
        for path in sorted(self.run_dir.glob("metrics-rolled-back-*.jsonl")):
            aside = self.directory / path.stem.removeprefix("metrics-")
            if not aside.is_dir():
                write_all(aside, _rows(path))
        written, texts = read_back(self.directory)
        purge = None  # where they differ, if they do
        same = 0
        for row in _rows(self.run_dir / "metrics.jsonl"):
            if same == len(written):
                break
            if (row["tokens"], fingerprint(scalars(row))) != written[same]:
                purge = min(row["tokens"], written[same][0])
                break
            same += 1
        else:
            purge = written[same][0] if same < len(written) else None
        if purge is not None:
            while same and written[same - 1][0] >= purge:
                same -= 1
            texts = {key for key in texts if key[0] < purge}
        self._skipped, self._texts = same, texts
        self.writer = _writer(self.directory, purge)

    def wants(self, row: Row) -> bool:
        """Tell whether a row, of all in their order, is not in the files yet."""
        self._skipped -= 1
        return self._skipped < 0

    def log(self, row: Row) -> None:
        """Write one row as one event."""
        _add(self.writer, row)

    def samples(self, rows: list[Row]) -> None:
        """Write texts that the model has generated, one tag for each prompt."""
        from tensorboard.plugins.text.summary_v2 import text_pb

        for row in rows:
            tag = f"samples/prompt_{row['prompt_number']}"
            if (row["tokens"], tag) not in self._texts:
                self._texts.add((row["tokens"], tag))
                summary = text_pb(tag, f"**{row['prompt']}**{row['text']}")
                _add_summary(self.writer, summary, row["tokens"])

    def event(self, event: Row) -> None:
        """Do nothing: TensorBoard has no place for events."""

    def flush(self) -> None:
        self.writer.flush()

    def finish(self, exit_code: int) -> None:
        self.writer.close()


def write_all(directory: Path, rows: Iterable[Row]) -> None:
    """Write rows into a directory of their own, which appears when it has all of them."""
    unfinished = directory.with_name(f".{directory.name}.tmp")
    shutil.rmtree(unfinished, ignore_errors=True)  # of a process that was killed
    writer = _writer(unfinished, None)
    for row in rows:
        _add(writer, row)
    writer.close()
    unfinished.rename(directory)


def fingerprint(row: Scalars) -> int:
    """Return a number that is equal for equal scalars in this process, and for no others."""
    return hash(tuple(sorted((key, value.tobytes()) for key, value in row.items())))


def read_back(directory: Path) -> tuple[list[tuple[int, int]], set[tuple[int, str]]]:
    """Read what the files have that no later start has taken back, row by row: they may be long.

    Returns:
        (tokens, fingerprint of the scalars) of every row; (tokens, tag) of every text.
    """
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto import event_pb2

    found: list[tuple[int, int]] = []
    texts: set[tuple[int, str]] = set()
    for path in _files(directory):
        for data in RawEventFileLoader(str(path)).Load():
            event = event_pb2.Event.FromString(data)
            if event.session_log.status == event_pb2.SessionLog.START:
                found = [entry for entry in found if entry[0] < event.step]
                texts = {entry for entry in texts if entry[0] < event.step}
            if event.WhichOneof("what") != "summary":
                continue
            tags = [value.tag for value in event.summary.value if value.HasField("tensor")]
            texts |= {(event.step, tag) for tag in tags}
            if not tags:
                values = event.summary.value
                row = {value.tag: np.float32(value.simple_value) for value in values}
                found.append((event.step, fingerprint(row)))
    return found, texts


def _files(directory: Path) -> list[Path]:
    return sorted(directory.glob("events.out.tfevents.*"), key=lambda path: path.name)


def _rows(path: Path) -> Iterator[Row]:
    """Yield the rows of a file that are whole."""
    if path.is_file():
        with open(path, "rb") as file:
            for line in file:
                if line.endswith(b"\n"):
                    yield json.loads(line)


def _writer(directory: Path, purge_tokens: int | None) -> Any:
    """Open another event file, that is read after those that are there."""
    from tensorboard.compat.proto import event_pb2
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    directory.mkdir(parents=True, exist_ok=True)
    newest = max((path.stat().st_mtime for path in _files(directory)), default=0.0)
    while int(time.time()) <= int(newest):  # they are sorted by the second in their names
        time.sleep(0.05)
    writer = EventFileWriter(str(directory))
    if purge_tokens is not None:
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        event = event_pb2.Event(wall_time=time.time(), step=purge_tokens, session_log=start)
        writer.add_event(event)
    return writer


def _add(writer: Any, row: Row) -> None:
    from tensorboard.compat.proto import summary_pb2

    values = [
        summary_pb2.Summary.Value(tag=key, simple_value=float(value))
        for key, value in scalars(row).items()
    ]
    _add_summary(writer, summary_pb2.Summary(value=values), row["tokens"])


def _add_summary(writer: Any, summary: Any, tokens: int) -> None:
    from tensorboard.compat.proto import event_pb2

    writer.add_event(event_pb2.Event(wall_time=time.time(), step=tokens, summary=summary))
