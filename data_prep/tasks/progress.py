"""Progress of a command: shown as a bar on a terminal, otherwise as one plain line per interval.

Tasks on any machine write their progress to small files (`TaskProgress`), which the waiting
process sums up (`ProgressWatcher`).
"""

import contextlib
import json
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

from data_prep.tasks.phases import RunningNote
from zerolm.common.errors import RecordError
from zerolm.common.files import write_atomically
from zerolm.common.records import Count, read_record

LINE_SECONDS = 10
BAR_SECONDS = 0.5
NOTE_SECONDS = 1.0
STRAGGLER_RATIO = 3  # times the median duration of finished tasks
STRAGGLER_SECONDS = 30  # minimum duration of a slow task


class Progress:
    """Counts the input processed so far, and prints the progress to standard error.

    Args:
        total_bytes: total size of the inputs; None if unknown, as for a hub dataset.
    """

    def __init__(self, command: str, total_bytes: int | None):
        self.command, self.total_bytes = command, total_bytes
        self.input_bytes = self.num_documents = self.num_tokens = 0
        self.resumed_bytes = 0  # input processed by an earlier run; excluded from the rate
        self.note = ""
        self.start = self.shown = time.monotonic()
        self.bar = None
        if sys.stderr.isatty():
            from tqdm import tqdm

            tqdm.monitor_interval = 0  # no monitor thread: forking requires a single thread
            self.bar = tqdm(total=total_bytes, desc=command, unit="B", unit_scale=True)

    def add(self, input_bytes: int, num_documents: int, num_tokens: int = 0) -> None:
        """Add to the counts, and show the counts if the interval has passed."""
        self.set(
            self.input_bytes + input_bytes,
            self.num_documents + num_documents,
            self.num_tokens + num_tokens,
        )

    def set(self, input_bytes: int, num_documents: int, num_tokens: int, note: str = "") -> None:
        """Set the counts and a short note, and show both if the interval has passed."""
        more_bytes = input_bytes - self.input_bytes
        self.input_bytes, self.num_documents = input_bytes, num_documents
        self.num_tokens, self.note = num_tokens, note
        if self.bar is not None:
            counts = f"{self.num_documents:,} documents"
            if self.num_tokens:
                counts += f", {self.num_tokens / 1e6:.1f}M tokens"
            self.bar.set_postfix_str(", ".join(filter(None, [counts, note])), refresh=False)
            self.bar.update(more_bytes)
        elif self.is_due:
            self.shown = time.monotonic()
            self._print_line()

    def _print_line(self) -> None:
        seconds = self.shown - self.start
        fields = [f"read_mb={self.input_bytes / 1e6:.1f}"]
        if self.total_bytes:
            fields.append(f"of_mb={self.total_bytes / 1e6:.1f}")
        fields.append(f"documents={self.num_documents}")
        if self.num_tokens:
            fields.append(f"tokens={self.num_tokens}")
        fields.append(f"seconds={seconds:.0f}")
        done = self.input_bytes - self.resumed_bytes
        if self.total_bytes and done > 0:
            left = seconds * max(0, self.total_bytes - self.input_bytes) / done
            fields.append(f"seconds_left={left:.0f}")
        if self.note:
            fields.append(self.note)
        print(f"{self.command}: {' '.join(fields)}", file=sys.stderr, flush=True)

    @property
    def is_due(self) -> bool:
        """Return whether an update would be shown now."""
        return self.bar is not None or time.monotonic() - self.shown >= LINE_SECONDS

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.start

    def close(self) -> None:
        """Close the bar, leaving it visible on the terminal."""
        if self.bar is not None:
            self.bar.close()


class TaskProgress:
    """Counts the input that a task has processed, and updates its `.running` note every second.

    Args:
        path: path of the note, which `phases.run_task` creates and removes; the note's other keys
            are kept.
    """

    def __init__(self, path: Path, total_bytes: int):
        self.path, self.total_bytes = path, total_bytes
        self.input_bytes = self.num_documents = self.num_tokens = 0
        self.written = time.monotonic()
        self.note: dict[str, Any] = {}
        with contextlib.suppress(RecordError):
            self.note = dict(read_record(path, RunningNote) or {})

    def add(self, input_bytes: int, num_documents: int, num_tokens: int) -> None:
        """Add to the counts, and write the counts to the note if the interval has passed."""
        self.input_bytes += input_bytes
        self.num_documents += num_documents
        self.num_tokens += num_tokens
        if time.monotonic() - self.written >= NOTE_SECONDS:
            self.written = time.monotonic()
            counts = {
                "input_bytes": self.input_bytes,
                "total_bytes": self.total_bytes,
                "documents": self.num_documents,
                "tokens": self.num_tokens,
            }
            content = json.dumps({**self.note, **counts}).encode()
            with contextlib.suppress(OSError):  # only for display, so errors must not fail the task
                write_atomically(self.path, content, many_writers=True, durable=False)


class _Split(TypedDict):
    num_tokens: Count


class _Tally(TypedDict):
    input_bytes: Count


class _Encoded(TypedDict):
    """The keys of an encoding task's record that are shown as progress."""

    splits: list[_Split]
    tally: _Tally
    documents_out: Count
    seconds: float


class _TaskState(NamedTuple):
    """The progress of one task."""

    input_bytes: int
    num_documents: int
    num_tokens: int
    seconds: float

    @classmethod
    def of_record(cls, path: Path) -> "_TaskState | None":
        """Read the record of a finished task; return None if the record has been removed."""
        record = read_record(path, _Encoded)
        if record is None:
            return None
        tokens = sum(split["num_tokens"] for split in record["splits"])
        input_bytes = record["tally"]["input_bytes"]
        return cls(input_bytes, record["documents_out"], tokens, record["seconds"])

    @classmethod
    def of_note(cls, path: Path) -> "_TaskState | None":
        """Read the note on a running task; return None if the task has ended."""
        note = read_record(path, RunningNote)
        if note is None:
            return None
        input_bytes, documents = note.get("input_bytes", 0), note.get("documents", 0)
        seconds = max(0.0, time.time() - note["started"])
        return cls(input_bytes, documents, note.get("tokens", 0), seconds)


class ProgressWatcher:
    """Context manager that shows the progress of a phase's tasks in a background thread.

    Args:
        is_started: whether to start the thread immediately rather than when `start` is called.
    """

    def __init__(
        self, progress: Progress, records: Path, labels: Sequence[str], is_started: bool = True
    ):
        self.progress, self.records, self.labels = progress, records, labels
        self.is_started = is_started
        self._done: dict[int, _TaskState] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "ProgressWatcher":
        self._show()
        self.progress.resumed_bytes = self.progress.input_bytes
        if self.is_started:
            self._thread.start()
        return self

    def start(self) -> None:
        """Start the thread; call it inside the `with` statement."""
        self.is_started = True
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self.is_started:
            self._thread.join()
        if self.progress.is_due:
            self._show()

    def _run(self) -> None:
        interval = BAR_SECONDS if self.progress.bar is not None else LINE_SECONDS
        while not self._stop.wait(interval):
            self._show()

    def _show(self) -> None:
        running: dict[int, _TaskState] = {}
        paths = [] if not self.records.is_dir() else list(self.records.iterdir())
        for path in paths:
            with contextlib.suppress(RecordError, ValueError):  # also of foreign files
                if path.suffix == ".json" and int(path.stem) not in self._done:
                    if state := _TaskState.of_record(path):
                        self._done[int(path.stem)] = state
                elif path.suffix == ".running" and (state := _TaskState.of_note(path)):
                    running[int(path.stem)] = state
        running = {task: state for task, state in running.items() if task not in self._done}
        states = [*self._done.values(), *running.values()]
        self.progress.set(
            sum(state.input_bytes for state in states),
            sum(state.num_documents for state in states),
            sum(state.num_tokens for state in states),
            self._note(running),
        )

    def _note(self, running: dict[int, _TaskState]) -> str:
        fields = [f"tasks={len(self._done)}/{len(self.labels)}"]
        if running and self._done:
            slowest = max(running, key=lambda task: running[task].seconds)
            seconds = running[slowest].seconds
            finished = sorted(state.seconds for state in self._done.values())
            median = finished[len(finished) // 2]
            if seconds > max(STRAGGLER_RATIO * median, STRAGGLER_SECONDS):
                fields.append(
                    f"slowest={self.labels[slowest]} ({seconds:.0f} s, others {median:.0f} s)"
                )
        return " ".join(fields)
