"""A phase: many tasks that share nothing but files, each with a record of its completion.

Every stage of data preparation is a sequence of phases. A task writes its outputs atomically, and
its record after them, so that a killed run goes on with the tasks that have no record, on any
executor. Knows nothing of what tasks do.

`directory/records/NAME/00003.json` is the record of task 3, `00003.running` who works at it, and
`00003.failed` why it failed. A record is of use only for the same `inputs`, and while the files it
names (`"files": {"parts/00003.bin": size in bytes}`, relative to `directory`) have their sizes.
"""

import contextlib
import functools
import hashlib
import json
import os
import socket
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from data_prep.workers import ordered_map
from zerolm.errors import ConfigError, ZerolmError
from zerolm.files import temporary_name, write_json

RECORDS = "records"
MAX_SHOWN_PROBLEMS = 20

Record = dict[str, Any]


@dataclass(frozen=True)
class Phase:
    """Some tasks, numbered from 0.

    `run` is a module-level function, a `functools.partial` of one, or a frozen dataclass with
    `__call__`: other processes and machines unpickle it. It is idempotent, and returns a JSON
    object: what it wrote (`files`) and, where it makes sense, `documents_in`, `documents_out` and
    `dropped` ({reason: count}). `seconds`, `host`, `started` and `task` are added to it.
    """

    name: str  # "tokenize.encode"; also the directory of its records
    directory: Path
    num_tasks: int
    run: Callable[[int], Record]
    inputs: str  # fingerprint of all that the outputs depend on, but for the number of workers
    labels: Sequence[str] = ()  # what each task works at, for messages
    sync: bool = True  # records to disk; without it a power cut may leave one whose files are torn

    @property
    def records(self) -> Path:
        """Where the records of its tasks are."""
        return self.directory / RECORDS / self.name

    def path(self, task: int, suffix: str = ".json") -> Path:
        """Return the path of a task's record."""
        return self.records / f"{task:05d}{suffix}"

    def label(self, task: int) -> str:
        """Name a task."""
        what = f" ({self.labels[task]})" if self.labels else ""
        return f"{self.name} {task}{what}"


class Executor(Protocol):
    """What runs tasks: processes of this machine, Slurm, Ray."""

    def run(self, phase: Phase, tasks: Sequence[int]) -> None:
        """Call `run_task` for each of the tasks, in any order, and return when all are done.

        Raises:
            ConfigError: as raised in a task.
            ZerolmError: a task was lost.
        """


def fingerprint(value: Any) -> str:
    """Return 32 hex digits that stand for a JSON value (keys in any order; paths as strings)."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def run_phase(phase: Phase, executor: Executor) -> list[Record]:
    """Run the tasks that have no valid record, and return the records of all, in order.

    Raises:
        ConfigError: a task refused its input.
        ZerolmError: a task was lost, or failed on another machine.
    """
    missing = [task for task, record in enumerate(completed(phase)) if record is None]
    if missing:
        phase.records.mkdir(parents=True, exist_ok=True)
        for task in missing:  # so that a record which is there is of this run
            phase.path(task).unlink(missing_ok=True)
            phase.path(task, ".running").unlink(missing_ok=True)
        executor.run(phase, missing)
    records = completed(phase)
    left = [task for task in missing if records[task] is None]
    if left:
        _raise_failure(phase, left)
    return [record for record in records if record is not None]


def completed(phase: Phase) -> list[Record | None]:
    """Return the valid records of all tasks, in order; None for those that are still to do."""
    if not phase.records.is_dir():
        return [None] * phase.num_tasks
    return [valid_record(phase, task) for task in range(phase.num_tasks)]


def run_task(phase: Phase, task: int) -> Record:
    """Run one task and write its record; on whichever machine an executor has chosen.

    Raises:
        ConfigError: the task refused its input; it is in the `.failed` file too.
    """
    here = {"host": _host(), "pid": os.getpid()}
    start = time.time()
    running, failed = phase.path(task, ".running"), phase.path(task, ".failed")
    phase.records.mkdir(parents=True, exist_ok=True)
    _write_note(running, {**here, "started": start})
    failed.unlink(missing_ok=True)
    try:
        result = phase.run(task)
        record = {"task": task, "inputs": phase.inputs, **result}
        record |= {"seconds": time.time() - start, "started": start, **here}
        if phase.sync:
            write_json(phase.path(task), record, many_writers=True)
        else:
            _write_note(phase.path(task), record)
    except Exception as error:
        refused = error.problems if isinstance(error, ConfigError) else None
        note = {**here, "refused": refused, "traceback": traceback.format_exc()}
        with contextlib.suppress(OSError):  # on a full disk, the error itself is what counts
            _write_note(failed, note)
        raise
    finally:
        running.unlink(missing_ok=True)
    return record


@dataclass(frozen=True)
class LocalExecutor:
    """Runs tasks in processes of this machine; with one worker, in this process.

    Args:
        on_record: called with the phase and the record of each task, in the order of the tasks.
        on_start: called when the processes are there; threads are to begin then and not before
            (data_prep/workers.py says why).
    """

    num_workers: int
    on_record: Callable[[Phase, Record], None] | None = None
    on_start: Callable[[], object] | None = None

    def run(self, phase: Phase, tasks: Sequence[int]) -> None:
        """Run the tasks; `Executor.run` says what is raised."""
        num_workers = min(self.num_workers, len(tasks))
        if num_workers == 1:
            if self.on_start is not None:
                self.on_start()
            self._show(phase, map(partial(run_task, phase), tasks))
            return
        results = ordered_map(
            partial(partial, run_task, phase),
            tasks,
            num_workers,
            ahead_per_worker=len(tasks),
            given_per_worker=1,
            on_start=self.on_start,
        )
        with contextlib.closing(results):
            self._show(phase, results)

    def _show(self, phase: Phase, records: Any) -> None:
        for record in records:
            if self.on_record is not None:
                self.on_record(phase, record)


def failures(phase: Phase, tasks: Sequence[int]) -> dict[int, Mapping[str, Any]]:
    """Return the `.failed` notes of those of the tasks that have one."""
    found = {}
    for task in tasks:
        with contextlib.suppress(OSError, ValueError):
            found[task] = json.loads(phase.path(task, ".failed").read_text(encoding="utf-8"))
    return found


def _raise_failure(phase: Phase, left: Sequence[int]) -> None:
    """Say why tasks have no record although they were run."""
    notes = failures(phase, left)
    problems = [line for note in notes.values() for line in note["refused"] or ()]
    if problems:
        raise ConfigError(dict.fromkeys(problems[:MAX_SHOWN_PROBLEMS]))
    shown = ", ".join(phase.label(task) for task in left[:5]) + (", ..." if len(left) > 5 else "")
    why = next((f":\n{note['traceback']}" for note in notes.values()), ".")
    raise ZerolmError(
        f"{phase.directory}: {len(left):,} of {phase.num_tasks:,} tasks have not ended: {shown}. "
        f"The same command again runs only what is missing{why}"
    )


def valid_record(phase: Phase, task: int) -> Record | None:
    """Return the record of a task, if its outputs are there and are of these inputs."""
    try:
        record = json.loads(phase.path(task).read_bytes())
        if record["inputs"] != phase.inputs or record["task"] != task:
            return None
        for name, size_bytes in record.get("files", {}).items():
            if (phase.directory / name).stat().st_size != size_bytes:
                return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return record


@functools.cache
def _host() -> str:
    return socket.gethostname()


def _write_note(path: Path, value: Any) -> None:
    """Write a small file whole, but without syncing it."""
    temporary = temporary_name(path)
    temporary.write_text(json.dumps(value), encoding="utf-8")
    os.replace(temporary, path)
