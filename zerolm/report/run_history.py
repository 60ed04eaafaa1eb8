"""Read a run directory, whether the run is finished, in progress or killed.

`status` and `report.html` use the result. Never writes, and never acquires the run's lock, which a
starting run needs. Files and lines that cannot be read are listed in `problems`. Imports only the
standard library, so `status` responds at once.
"""

import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from zerolm.checkpoint.directory import published_checkpoints
from zerolm.common import processes
from zerolm.common.errors import ConfigError, RecordError
from zerolm.common.files import is_file
from zerolm.report.curves import Curves
from zerolm.run_dir import events
from zerolm.run_dir.files import RunFiles
from zerolm.run_dir.jsonl import EventRow, MetricsRow, SampleRow, read_rows
from zerolm.run_dir.records import find_run_json
from zerolm.watchdog import progress

SILENT_SECONDS = 60.0  # heartbeats are written every two seconds

Row = dict[str, Any]


@dataclass
class RunHistory:
    """The content of a run directory.

    Attributes:
        record: content of run.json; {} if there is none.
        rolled_back: one `Curves` per rollback, with the steps that the rollback undid.
        events: lines of events.jsonl, each with a `step`.
        samples: lines of samples.jsonl.
        heartbeats: {rank: last heartbeat}.
        heartbeat_age: seconds since the newest heartbeat of any rank; None if there are no
            heartbeats.
        checkpoints: directories of the published checkpoints, oldest first.
        problems: files and lines that could not be read, one line each.
    """

    run_dir: Path
    record: Row = field(default_factory=dict)
    curves: Curves = field(default_factory=Curves)
    rolled_back: list[Curves] = field(default_factory=list)
    events: list[Row] = field(default_factory=list)
    samples: list[Row] = field(default_factory=list)
    heartbeats: dict[int, progress.Heartbeat] = field(default_factory=dict)
    heartbeat_age: float | None = None
    checkpoints: list[Path] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.run_dir.resolve().name

    @property
    def settings(self) -> Row:
        settings = self.record.get("settings")
        return settings if isinstance(settings, dict) else {}

    @property
    def branch(self) -> Row:
        """The `branch` entry of run.json, which states where the run branched off; {} if the run is
        not a branch.
        """
        branch = self.record.get("branch")
        return branch if isinstance(branch, dict) else {}

    @property
    def derived(self) -> Row:
        """The derived figures that the run printed when it started."""
        derived = self.record.get("derived")
        return derived if isinstance(derived, dict) else {}

    @property
    def trained_seconds(self) -> float:
        """Training time of all steps, or of a branch's steps after the branch point, in seconds."""
        seconds = self.curves.seconds[-1] if self.curves.seconds else 0.0
        return seconds - (self.curves.place(self.branch["step"])[1] if self.branch else 0.0)

    @property
    def total_tokens(self) -> int | None:
        total = self.settings.get("total_tokens")
        return total if isinstance(total, int) and total > 0 else None

    @property
    def total_steps(self) -> int | None:
        """The planned number of steps, or the number attempted if that is larger due to skipped
        steps.
        """
        number = re.match(r"[\d,]+", str(self.derived.get("steps", "")))
        return max(int(number[0].replace(",", "")), self.step) if number else None

    @property
    def step(self) -> int:
        return self.curves.steps[-1] if self.curves.steps else 0

    @property
    def tokens(self) -> int:
        return self.curves.tokens[-1] if self.curves.tokens else 0

    def seconds_left(self) -> float | None:
        """Estimate the seconds of training left from the mean speed in recent lines."""
        speed = self.curves.recent_mean("throughput/tokens_per_second")
        if self.total_tokens is None or not speed or speed < 0:
            return None
        return max(0, self.total_tokens - self.tokens) / speed

    def state(self) -> tuple[str, str]:
        """Return the run's state, and a short reason for it.

        The last event that sets a state determines the state (`zerolm.run_dir.events`). A `running`
        run without recent heartbeats is `silent`; a run that has not started is `new`.
        """
        for event in reversed(self.events):
            state = events.state_after(event["event"])
            if state == events.RUNNING:
                break
            if state:
                return state, str(event.get("reason") or event.get("ended") or "")
        else:
            if self.heartbeat_age is None and not self.curves.steps:
                return "new", "nothing has been trained yet"
        if self.heartbeat_age is None:
            return "silent", "no heartbeats in ranks/"
        if self.heartbeat_age > SILENT_SECONDS:
            return "silent", f"no heartbeat for {self.heartbeat_age:.0f} s: killed, or suspended"
        phases = sorted({str(beat.get("phase")) for beat in self.heartbeats.values()})
        return events.RUNNING, ", ".join(phases)


def read_run(run_dir: str | Path) -> RunHistory:
    """Read a run directory.

    Raises:
        ConfigError: the directory contains neither run.json, metrics.jsonl, events.jsonl nor
            heartbeats.
    """
    files = RunFiles(run_dir)
    has_begun = any(is_file(path) for path in (files.record, files.metrics, files.events))
    # A new run compiles operators before it writes these files, but it has heartbeats.
    if not has_begun and not files.heartbeats():
        raise ConfigError(
            f"{run_dir}: has no {files.record.name}, {files.metrics.name} or {files.events.name}. "
            f"Give the --run_dir of a run that has started."
        )
    history = RunHistory(files.run_dir)
    problems = history.problems
    try:
        record = find_run_json(run_dir)
        history.record = record or {}
        problems += [f"{files.record}: no such file"] if record is None and has_begun else []
    except RecordError as error:
        problems += error.problems
    for row in read_rows(files.metrics, MetricsRow, problems):
        history.curves.add(row)
    for path in files.all_archived_metrics():
        rows = list(read_rows(path, MetricsRow, problems))
        first = rows[0]["step"] if rows else 0
        history.rolled_back.append(Curves(history.curves.before(first)))
        for row in rows:
            history.rolled_back[-1].add(row)
    history.events = list(read_rows(files.events, EventRow, problems))
    problems += [
        f"{directory}: cannot be read (Permission denied). Let this user read {directory}"
        for directory in (files.checkpoints, files.ranks)
        if directory.is_dir() and not os.access(directory, os.R_OK | os.X_OK)
    ]
    history.samples = list(read_rows(files.samples, SampleRow, problems))
    history.heartbeats = progress.read_heartbeats(files.run_dir, problems)
    ages = [_heartbeat_age(path) for path in files.heartbeats()]
    history.heartbeat_age = min((age for age in ages if age is not None), default=None)
    history.checkpoints = published_checkpoints(files.checkpoints)
    problems[:] = [problem.removeprefix(f"{run_dir}/") for problem in problems]
    return history


def read_runs(run_dirs: Sequence[str | Path]) -> list[RunHistory]:
    """Read several run directories; skip files next to them, which a glob like `runs/*` also
    matches.

    Raises:
        ConfigError: some paths are not run directories; lists all of them.
    """
    histories, problems = [], []
    beside = {Path(each).parent for each in run_dirs if Path(each).is_dir()}
    for run_dir in run_dirs:
        if Path(run_dir).is_file() and Path(run_dir).parent in beside:
            continue
        try:
            histories.append(read_run(run_dir))
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    return histories


def _heartbeat_age(path: Path) -> float | None:
    """Return the seconds since a heartbeat was written; None if the file has been removed."""
    try:
        age = time.time() - path.stat().st_mtime
    except OSError:
        return None  # a run that is starting has removed the file
    if age < 0:  # the clock was set back: on the same machine, use the monotonic clock instead
        beat = progress.read_heartbeat(path)
        if beat is not None and beat["machine"] == processes.machine_id():
            age = time.monotonic() - beat["monotonic"]
    return max(0.0, age)


def seconds_of(stamp: object) -> float | None:
    """Convert an event's `time` to seconds since the epoch; return None if it cannot be parsed."""
    try:
        return datetime.strptime(str(stamp), "%Y-%m-%dT%H:%M:%S%z").timestamp()
    except ValueError:
        return None
