"""Phases: sets of independent tasks, each of which writes a record when it is complete.

Every stage of data preparation is a sequence of phases. A task writes its outputs atomically, and
then its record, so after a killed run any executor can resume with the tasks that have no record.
Independent of what tasks do.

`DIRECTORY/records/NAME/00003.json` is the record of task 3, `00003.running` names the process that
runs it, and `00003.failed` contains the reason why it failed. A record is valid only if its
`inputs` equal the phase's, and as long as the files that it lists (`"files": {"parts/00003.bin":
size in bytes}`, relative to DIRECTORY) have the listed sizes.
"""

import contextlib
import functools
import hashlib
import json
import os
import socket
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypedDict

from data_prep.tasks.workers import ordered_map
from zerolm.common.errors import ConfigError, RecordError, ZerolmError
from zerolm.common.files import write_atomically, write_json
from zerolm.common.records import Count, read_record

RECORDS = "records"
MAX_SHOWN_PROBLEMS = 20

Record = dict[str, Any]


class _Record(TypedDict):
    task: Count
    inputs: str
    seconds: float
    started: float
    host: str
    pid: Count


class TaskRecord(_Record, total=False):
    """The keys common to all task records; `files` contains the names and sizes of the outputs."""

    files: dict[str, Count]


class _Running(TypedDict):
    host: str
    pid: Count
    started: float


class RunningNote(_Running, total=False):
    """The note on a running task. `TaskProgress` adds how much input the task has processed."""

    input_bytes: Count
    total_bytes: Count
    documents: Count
    tokens: Count


class FailedNote(TypedDict):
    """The note on a failed task."""

    host: str
    refused: list[str] | None
    traceback: str


@dataclass(frozen=True)
class Phase:
    """A set of tasks, which are numbered from 0.

    `run` is a module-level function, a `functools.partial` of one, or a frozen dataclass with
    `__call__`, because other processes and machines unpickle it. It must be idempotent, and return
    a JSON object: the `files` that it wrote and, if applicable, `documents_in`, `documents_out`
    and `dropped` ({reason: count}). `run_task` adds `seconds`, `host`, `pid`, `started`, `inputs`
    and `task`.
    """

    name: str  # such as "tokenize.encode"; also the name of the directory for the records
    directory: Path
    num_tasks: int
    run: Callable[[int], Record]
    inputs: str  # fingerprint of everything that determines the outputs
    labels: Sequence[str] = ()  # description of each task's input, for messages
    sync: bool = True  # sync records; otherwise a power cut can leave records of incomplete files

    @property
    def records(self) -> Path:
        """The directory of the tasks' records."""
        return self.directory / RECORDS / self.name

    def path(self, task: int, suffix: str = ".json") -> Path:
        """Return the path of a task's record or note, depending on the suffix."""
        return self.records / f"{task:05d}{suffix}"

    def label(self, task: int) -> str:
        """Return a task's description for messages."""
        label = f" ({self.labels[task]})" if self.labels else ""
        return f"{self.name} {task}{label}"


class Executor(Protocol):
    """Runs tasks, either in processes on this machine or on Slurm."""

    def run(self, phase: Phase, tasks: Sequence[int]) -> None:
        """Call `run_task` for each task, in any order; return when all tasks have finished or
        failed.

        Raises:
            ConfigError: a task raised it.
            ZerolmError: a task ended without writing a record.
        """


def fingerprint(value: Any) -> str:
    """Return a hash of a JSON value as 32 hex digits; the order of keys does not matter."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def run_phase(phase: Phase, executor: Executor) -> list[Record]:
    """Run the tasks without a valid record, and return the records of all tasks in order."""
    missing = [task for task, record in enumerate(valid_records(phase)) if record is None]
    if missing:
        phase.records.mkdir(parents=True, exist_ok=True)
        for task in missing:  # executors wait for new records to appear
            phase.path(task).unlink(missing_ok=True)
            phase.path(task, ".running").unlink(missing_ok=True)
        executor.run(phase, missing)
    records = valid_records(phase)
    unfinished = [task for task in missing if records[task] is None]
    if unfinished:
        _raise_failure(phase, unfinished)
    return [record for record in records if record is not None]


def valid_records(phase: Phase) -> list[Record | None]:
    """Return each task's record in order, with None for tasks that have no valid record."""
    if not phase.records.is_dir():
        return [None] * phase.num_tasks
    return [valid_record(phase, task) for task in range(phase.num_tasks)]


def valid_record(phase: Phase, task: int) -> Record | None:
    """Return a task's record if it matches the phase's inputs and the task's outputs exist."""
    try:
        record = read_record(phase.path(task), TaskRecord)
        if record is None or record["inputs"] != phase.inputs or record["task"] != task:
            return None
        for name, size_bytes in record.get("files", {}).items():
            if (phase.directory / name).stat().st_size != size_bytes:
                return None
    except (OSError, ValueError, RecordError):  # damaged: the task runs again
        return None
    return dict(record)


def run_task(phase: Phase, task: int) -> Record:
    """Run one task and write its record; called on the machine that the executor has selected.

    Raises:
        ConfigError: the task refused its input; the `.failed` note also lists the problems.
    """
    process = {"host": _host(), "pid": os.getpid()}
    start, started = time.monotonic(), time.time()
    running, failed = phase.path(task, ".running"), phase.path(task, ".failed")
    phase.records.mkdir(parents=True, exist_ok=True)
    _write_note(running, {**process, "started": started})
    failed.unlink(missing_ok=True)
    try:
        result = phase.run(task)
        record = {"task": task, "inputs": phase.inputs, **result}
        record |= {"seconds": time.monotonic() - start, "started": started, **process}
        if phase.sync:
            write_json(phase.path(task), record, many_writers=True)
        else:
            _write_note(phase.path(task), record)
    except Exception as error:
        refused = error.problems if isinstance(error, ConfigError) else None
        note = {**process, "refused": refused, "traceback": traceback.format_exc()}
        with contextlib.suppress(OSError):  # on a full disk, report the error itself
            _write_note(failed, note)
        raise
    finally:
        running.unlink(missing_ok=True)
    return record


@functools.cache
def _host() -> str:
    return socket.gethostname()


def _write_note(path: Path, value: Any) -> None:
    """Write a small file atomically, but without syncing it."""
    write_atomically(path, json.dumps(value).encode(), many_writers=True, durable=False)


@dataclass(frozen=True)
class LocalExecutor:
    """Runs tasks in processes on this machine; with one worker, in this process.

    Args:
        on_record: called in task order, with the phase and each task's record.
        on_start: called when all worker processes have started. Threads must not be started
            earlier; `data_prep.tasks.workers` explains why.
    """

    num_workers: int
    on_record: Callable[[Phase, Record], None] | None = None
    on_start: Callable[[], object] | None = None

    def run(self, phase: Phase, tasks: Sequence[int]) -> None:
        """Run the tasks; this raises the same errors as `Executor.run`."""
        num_workers = min(self.num_workers, len(tasks))
        if num_workers == 1:
            if self.on_start is not None:
                self.on_start()
            self._report(phase, map(partial(run_task, phase), tasks))
            return
        results = ordered_map(
            partial(partial, run_task, phase),
            tasks,
            num_workers,
            ahead_per_worker=len(tasks),
            on_start=self.on_start,
        )
        with contextlib.closing(results):
            self._report(phase, results)

    def _report(self, phase: Phase, records: Iterable[Record]) -> None:
        for record in records:
            if self.on_record is not None:
                self.on_record(phase, record)


def _raise_failure(phase: Phase, unfinished: Sequence[int]) -> None:
    """Raise an error that states why tasks have no record after running."""
    notes = _failed_notes(phase, unfinished)
    problems = [line for note in notes for line in note["refused"] or ()]
    if problems:
        raise ConfigError(dict.fromkeys(problems[:MAX_SHOWN_PROBLEMS]))
    shown = ", ".join(phase.label(task) for task in unfinished[:5])
    shown += ", ..." if len(unfinished) > 5 else ""
    reason = next((f":\n{note['traceback']}" for note in notes), ".")
    raise ZerolmError(
        f"{phase.directory}: {len(unfinished):,} of {phase.num_tasks:,} tasks did not finish: "
        f"{shown}. The same command runs only these tasks again{reason}"
    )


def _failed_notes(phase: Phase, tasks: Sequence[int]) -> list[FailedNote]:
    """Return the existing `.failed` notes of the given tasks."""
    notes = []
    for task in tasks:
        with contextlib.suppress(RecordError):
            if note := read_record(phase.path(task, ".failed"), FailedNote):
                notes.append(note)
    return notes
