"""How far a command is: a bar on a terminal, one plain line an interval anywhere else.

Tasks on whatever machine note how far they are in small files (`TaskProgress`), and whoever waits
for them adds the notes up (`Watch`).
"""

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zerolm.files import temporary_name

LINE_SECONDS = 10
BAR_SECONDS = 0.5
NOTE_SECONDS = 1.0
STRAGGLING = 3  # times the median of the tasks that are done
STRAGGLING_SECONDS = 30  # and at least this long


class Progress:
    """Count what is done, and show it on standard error.

    Args:
        command: the name to show.
        total_bytes: what all inputs have; None when a hub data set is among them.
    """

    def __init__(self, command: str, total_bytes: int | None):
        self.command, self.total_bytes = command, total_bytes
        self.input_bytes = self.num_documents = self.num_tokens = 0
        self.bytes_before = 0  # done before the start: they say nothing of the rate
        self.note = ""
        self.start = self.shown = time.monotonic()
        self.bar = None
        if sys.stderr.isatty():
            from tqdm import tqdm

            tqdm.monitor_interval = 0  # no thread: workers start sooner from a process without
            self.bar = tqdm(total=total_bytes, desc=command, unit="B", unit_scale=True)

    def add(self, input_bytes: int, num_documents: int, num_tokens: int = 0) -> None:
        """Add to the counts, and show them when it is time."""
        self.set(
            self.input_bytes + input_bytes,
            self.num_documents + num_documents,
            self.num_tokens + num_tokens,
        )

    def set(self, input_bytes: int, num_documents: int, num_tokens: int, note: str = "") -> None:
        """Set the counts, and show them when it is time, with a note of a few words."""
        more_bytes = input_bytes - self.input_bytes
        self.input_bytes, self.num_documents = input_bytes, num_documents
        self.num_tokens, self.note = num_tokens, note
        if self.bar is not None:
            counts = f"{self.num_documents:,} documents"
            if self.num_tokens:
                counts += f", {self.num_tokens / 1e6:.1f}M tokens"
            self.bar.set_postfix_str(", ".join(filter(None, [counts, note])), refresh=False)
            self.bar.update(more_bytes)
        elif time.monotonic() - self.shown >= LINE_SECONDS:
            self.shown = time.monotonic()
            self._print_line()

    def _print_line(self) -> None:
        seconds = self.shown - self.start
        words = [f"read_mb={self.input_bytes / 1e6:.1f}"]
        if self.total_bytes:
            words.append(f"of_mb={self.total_bytes / 1e6:.1f}")
        words += [f"documents={self.num_documents}"]
        if self.num_tokens:
            words.append(f"tokens={self.num_tokens}")
        words += [f"seconds={seconds:.0f}"]
        done = self.input_bytes - self.bytes_before
        if self.total_bytes and done > 0:
            left = seconds * max(0, self.total_bytes - self.input_bytes) / done
            words.append(f"seconds_left={left:.0f}")
        if self.note:
            words.append(self.note)
        print(f"{self.command}: {' '.join(words)}", file=sys.stderr, flush=True)

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.start

    def close(self) -> None:
        """Leave the bar as it is."""
        if self.bar is not None:
            self.bar.close()


class TaskProgress:
    """What a task has done, in a file that is written anew once a second, beside what it says.

    Args:
        path: of the note that `phases.run_task` makes and removes.
        total_bytes: of the task's input.
    """

    def __init__(self, path: Path, total_bytes: int):
        self.path, self.total_bytes = path, total_bytes
        self.input_bytes = self.num_documents = self.num_tokens = 0
        self.noted = time.monotonic()
        self.note: dict[str, Any] = {}
        with contextlib.suppress(OSError, ValueError):
            self.note = json.loads(path.read_bytes())

    def add(self, input_bytes: int, num_documents: int, num_tokens: int) -> None:
        """Add to the counts, and write them when it is time."""
        self.input_bytes += input_bytes
        self.num_documents += num_documents
        self.num_tokens += num_tokens
        if time.monotonic() - self.noted >= NOTE_SECONDS:
            self.noted = time.monotonic()
            counts = {
                "input_bytes": self.input_bytes,
                "total_bytes": self.total_bytes,
                "documents": self.num_documents,
                "tokens": self.num_tokens,
            }
            temporary = temporary_name(self.path)
            with contextlib.suppress(OSError):  # only people miss it
                temporary.write_text(json.dumps({**self.note, **counts}), encoding="utf-8")
                os.replace(temporary, self.path)


class Watch:
    """Shows, from a thread of its own, how far the tasks of a phase are.

    Args:
        records: the directory of the phase's records and notes.
        labels: what each task works at.
        is_started: whether the thread begins at once, and not when `start` is called.
    """

    def __init__(
        self, progress: Progress, records: Path, labels: Sequence[str], is_started: bool = True
    ):
        self.progress, self.records, self.labels = progress, records, labels
        self.is_started = is_started
        self._done: dict[int, tuple[int, int, int, float]] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "Watch":
        self._show()
        self.progress.bytes_before = self.progress.input_bytes
        if self.is_started:
            self._thread.start()
        return self

    def start(self) -> None:
        """Begin, inside of the `with`."""
        self.is_started = True
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self.is_started:
            self._thread.join()
        self._show()

    def _run(self) -> None:
        interval = BAR_SECONDS if self.progress.bar is not None else LINE_SECONDS
        while not self._stop.wait(interval):
            self._show()

    def _show(self) -> None:
        running: dict[int, tuple[int, int, int, float]] = {}
        paths = [] if not self.records.is_dir() else list(self.records.iterdir())
        for path in paths:
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                if path.suffix == ".json" and int(path.stem) not in self._done:
                    record = json.loads(path.read_bytes())
                    tokens = sum(split["num_tokens"] for split in record["splits"])
                    self._done[int(path.stem)] = (
                        *(record["tally"]["input_bytes"], record["documents_out"], tokens),
                        record["seconds"],
                    )
                elif path.suffix == ".running":
                    note = json.loads(path.read_bytes())
                    running[int(path.stem)] = (
                        *(note.get(key, 0) for key in ("input_bytes", "documents", "tokens")),
                        time.time() - note["started"],
                    )
        running = {task: each for task, each in running.items() if task not in self._done}
        columns = list(zip(*self._done.values(), *running.values(), strict=False)) or [()] * 4
        input_bytes, documents, tokens = (int(sum(column)) for column in columns[:3])
        self.progress.set(input_bytes, documents, tokens, self._note(running))

    def _note(self, running: dict[int, tuple[int, int, int, float]]) -> str:
        words = [f"tasks={len(self._done)}/{len(self.labels)}"]
        if running and self._done:
            slowest = max(running, key=lambda task: running[task][3])
            seconds = running[slowest][3]
            usual = sorted(each[3] for each in self._done.values())[len(self._done) // 2]
            if seconds > max(STRAGGLING * usual, STRAGGLING_SECONDS):
                words.append(
                    f"slowest={self.labels[slowest]} ({seconds:.0f} s, others {usual:.0f} s)"
                )
        return " ".join(words)
