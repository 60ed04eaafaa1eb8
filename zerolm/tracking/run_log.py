"""`RunLog`: write metrics.jsonl, events.jsonl and samples.jsonl, which the trackers copy.

These files are the record of a run. If a tracker is down, slow or misconfigured, the problem is
logged as an event, and the run continues. Only rank 0's `RunLog` writes.
"""

import contextlib
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zerolm.common.files import is_file, sync_directory, write_atomically
from zerolm.common.values import count, duration
from zerolm.config.settings import Settings
from zerolm.distributed.collectives import print_safely
from zerolm.parts.metrics import line_figures
from zerolm.run_dir import events, jsonl
from zerolm.run_dir.files import RunFiles
from zerolm.run_dir.jsonl import LineFile, MetricsRow, SampleRow
from zerolm.tracking.tracker import enabled_trackers
from zerolm.tracking.tracker_processes import Trackers

Row = dict[str, Any]


class RunLog:
    """The log files in a run directory.

    Args:
        resumed_step: step from which the run resumes. Lines from later steps, which will be
            repeated, and an incomplete line left by a killed run are removed.
        writes: whether this is rank 0; False makes every method a no-op.
    """

    def __init__(self, run_dir: Path, resumed_step: int, writes: bool):
        self.files, self.writes = RunFiles(run_dir), writes
        self.run_dir = self.files.run_dir
        self.trackers: Trackers | None = None
        self._metrics: LineFile | None = None
        self._events: LineFile | None = None
        self._values: dict[str, dict[int, float]] = {}  # {key given to ranked_steps: {step: value}}
        self._samples_named = False  # whether the directory entry of samples.jsonl is durable
        self._newest: tuple[int, set[str]] = (-1, set())  # (newest step, metric keys of that step)
        self.lacks_rows: str | None = None  # describes rows missing before the resumed step
        if not writes:
            return
        path = self.files.metrics
        written, end = jsonl.rows_from(path, resumed_step, MetricsRow)
        jsonl.truncate(path, end)
        for row in written:
            if row["step"] == resumed_step:
                self._set_newest(row)
        if resumed_step and self._newest[0] != resumed_step:  # every save writes a row
            last = jsonl.last_step(path)
            has = "has no rows" if last is None else f"ends at step {last}"
            self.lacks_rows = f"{path} {has}: the rows up to step {resumed_step} are missing"
        self._metrics = LineFile(path, print_safely)
        path = self.files.samples
        if is_file(path):
            jsonl.truncate(path, jsonl.rows_from(path, resumed_step, SampleRow)[1])
        path = self.files.events
        incomplete = is_file(path) and not path.read_bytes().endswith(b"\n")
        self._events = LineFile(path, print_safely)
        if incomplete and path.stat().st_size:
            self._events.write("")  # ends the incomplete line left by a killed writer

    def has(self, step: int, key: str) -> bool:
        """Return whether the newest step is `step` and a row with `key` was logged for it.

        If `key` ends in a slash, any key with this prefix counts. Rank 0 only.
        """
        newest, keys = self._newest
        found = key in keys or (key.endswith("/") and any(each.startswith(key) for each in keys))
        return newest == step and found

    def ranked_steps(self, key: str) -> list[int]:
        """Return the steps with a value for `key`, sorted by this value; [] on all but rank 0."""
        if not self.writes:
            return []
        if key not in self._values:  # read once, because a run may have a million lines
            rows = jsonl.read_rows(self.files.metrics, MetricsRow, key=key)
            self._values[key] = {row["step"]: row[key] for row in rows if row[key] is not None}
        values = self._values[key]
        return sorted(values, key=lambda step: (values[step], step))

    def metrics(self, row: Row) -> None:
        """Append a row to metrics.jsonl. `row` must contain `step` and `tokens`."""
        if self._metrics is None:
            return
        row = {key: _json_value(value) for key, value in row.items()}
        self._metrics.write(json.dumps(row, allow_nan=False))
        self._set_newest(row)
        for key, values in self._values.items():
            if row.get(key) is not None:
                values[row["step"]] = row[key]
        if self.trackers is not None:
            self.trackers.tick()

    def _set_newest(self, row: Row) -> None:
        step, keys = self._newest
        self._newest = row["step"], {*row, *(keys if step == row["step"] else ())}

    def samples(self, rows: Sequence[Row]) -> None:
        """Append the samples from one step to samples.jsonl, one line per prompt."""
        if not self.writes:
            return
        with open(self.files.samples, "a") as file:
            file.write("".join(json.dumps(row) + "\n" for row in rows))
            file.flush()
            os.fsync(file.fileno())
        if not self._samples_named:
            sync_directory(self.run_dir)
            self._samples_named = True

    def sampled_tokens(self) -> int:
        """Return the token count at the last samples; 0 if there are no samples. Rank 0 only."""
        tokens = 0
        for row in jsonl.read_rows(self.files.samples, SampleRow):
            tokens = row["tokens"]
        return tokens

    def event(self, event: str, step: int, **values: Any) -> None:
        """Append an event to events.jsonl."""
        if self._events is not None:
            self._events.write(events.event_line(event, step, **values))

    def sync(self) -> None:
        """Sync the lines to disk, so no checkpoint is ahead of its metrics after a power cut.

        If the disk is full, the lines stay in memory.
        """
        for file in (self._metrics, self._events):
            if file is not None:
                with contextlib.suppress(OSError):  # LineFile reports the error
                    file.sync()

    def track(self, settings: Settings, before: Trackers | None = None) -> None:
        """Start the enabled trackers, which read run.json.

        Args:
            before: trackers started before a rollback, which may still send messages.
        """
        if self.writes and (names := enabled_trackers(settings)):
            self.trackers = Trackers(self.run_dir, names, self._tracker_event, before)

    def _tracker_event(self, event: str, **values: Any) -> None:
        step = self._newest[0]
        if self._events is None or self._events.closed:
            events.append_event(self.run_dir, event, step, **values)
        else:
            self.event(event, step, **values)

    def close(self, how: str = "done") -> None:
        """Sync and close the files, and make the trackers finish.

        Args:
            how: how the run ended: `done`, `stopped`, `gave_up`, `failed`, or `rollback`, after
                which the run continues with another log.
        """
        self.sync()
        if self.trackers is not None:
            self.trackers.end(how)
        for file in (self._metrics, self._events):
            if file is not None:
                file.close()

    def finish_trackers(self) -> None:
        """Wait for the trackers for a limited time; call this last."""
        if self.trackers is not None:
            self.trackers.finish()


def archive(run_dir: Path, number: int, step: int) -> None:
    """Copy the metrics after `step`, which rollback `number` discards, to a separate file.

    Call this on rank 0 only, before the next `RunLog` removes these metrics. An existing file was
    written before a crash, and is kept.
    """
    files = RunFiles(run_dir)
    path = files.archived_metrics(number)
    if not path.exists():
        rows = jsonl.read_rows(files.metrics, MetricsRow)
        text = "".join(json.dumps(row) + "\n" for row in rows if row["step"] > step)
        write_atomically(path, text.encode())


def _json_value(value: Any) -> Any:
    """Return a value, or None for infinities and NaN, which JSON does not support."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def console_line(row: Row, total_steps: int, seconds_left: float) -> str:
    """Format the metrics of a log interval as `key=value` pairs."""
    progress = [f"step={row['step']}/{total_steps}", f"tokens={count(row['tokens'])}"]
    return " ".join([*progress, *line_figures(row), f"eta={duration(seconds_left)}"])
