"""`progress`: print the progress of a pipeline's tasks, based on the files that they write."""

import argparse
import contextlib
import os
import statistics
import time
from pathlib import Path
from typing import TypeVar

from data_prep.tasks.phases import FailedNote, RunningNote, TaskRecord
from zerolm.common.errors import ConfigError, RecordError
from zerolm.common.records import read_record
from zerolm.common.values import printable

T = TypeVar("T")
STRAGGLER_FACTOR = 3  # times the median duration of completed tasks


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "directory", type=Path, metavar="DIR", help="output directory of a pipeline"
    )


def run(options: argparse.Namespace) -> None:
    """Print each phase below a directory: tasks (done, running, failed), rate and stragglers."""
    walk = os.walk(options.directory, onerror=_refuse)
    parents = [Path(place) for place, _, _ in walk if Path(place).name == "records"]
    phases = sorted(path for parent in parents for path in parent.iterdir() if path.is_dir())
    if not phases:
        raise ConfigError(
            f"{options.directory}: contains no task that has started. Check the path."
        )
    for phase in phases:
        _print_phase(phase, phase.relative_to(options.directory))


def _refuse(error: OSError) -> None:
    if isinstance(error, PermissionError):
        raise error


def _print_phase(phase: Path, name: Path) -> None:
    done = {path.stem: _read(path, TaskRecord) for path in sorted(phase.glob("[0-9]*.json"))}
    notes = {path.stem: _read(path, RunningNote) for path in sorted(phase.glob("*.running"))}
    running = {task: note for task, note in notes.items() if task not in done and note}
    failed = [path.stem for path in sorted(phase.glob("*.failed")) if path.stem not in done]
    records = [record for record in done.values() if record]
    parts = [f"{len(done):,} done", f"{len(running):,} running", f"{len(failed):,} failed"]
    seconds = [record["seconds"] for record in records]
    if records:
        start = min(record["started"] for record in records)
        end = max(record["started"] + record["seconds"] for record in records)
        parts.append(f"{60 * len(records) / max(end - start, 1e-9):,.1f} tasks a minute")
        parts.append(f"median {statistics.median(seconds):,.1f} s")
        hosts = {record["host"] for record in records}
        parts.append(f"{len(hosts):,} hosts" if len(hosts) > 1 else f"on {hosts.pop()}")
    print(f"{printable(str(name))}: {', '.join(parts)}")
    limit = STRAGGLER_FACTOR * statistics.median(seconds) if seconds else float("inf")
    for task, note in running.items():
        age = max(0.0, time.time() - note["started"])
        slow = ", more than three times the median" if age > limit else ""
        read = ""
        if total := note.get("total_bytes"):
            read = f", {note.get('input_bytes', 0) / total:.0%} read"
        print(f"    task {task} on {note['host']} (pid {note['pid']}) for {age:,.0f} s{read}{slow}")
    for task in failed:
        failure = _read(phase / f"{task}.failed", FailedNote)
        if failure is None:
            print(f"    task {task} failed, and its error cannot be read")
            continue
        lines = failure["refused"] or failure["traceback"].strip().splitlines()[-1:] or ["unknown"]
        print(f"    task {task} failed on {failure['host']}: {lines[0]}")


def _read(path: Path, kind: type[T]) -> T | None:
    """Read a task record or note; return None if it is damaged or has been removed."""
    with contextlib.suppress(RecordError):
        return read_record(path, kind)
    return None
