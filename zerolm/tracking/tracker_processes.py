"""`Trackers`: one background process for each of a run's trackers (W&B, TensorBoard).

Trackers never run in the training process. Each tracker has its own process, `python -m zerolm
mirror` (`Mirror`), which reads the lines that the run appends to metrics.jsonl, events.jsonl and
samples.jsonl. These files serve as a queue, so a step never waits for a slow or broken tracker.
First rank only. Must not depend on a particular tracker.
"""

import contextlib
import json
import select
import socket
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from zerolm.common.child import Child
from zerolm.distributed.collectives import print_safely
from zerolm.run_dir.files import RunFiles
from zerolm.tracking.tracker import tracker_class
from zerolm.watchdog.progress import record_progress

POLL_SECONDS = 2.0
READ_SECONDS = 5.0  # time for a process to read all lines; it polls the files more often
FINISH_SECONDS = 30.0
FIRST_PAUSE_SECONDS = 30.0
MAX_FAILURES = 4  # per tracker and start of the run, since each process may rewrite all rows

Note = Callable[..., None]


class Trackers:
    """The trackers of a run. Only `finish` waits for the trackers' servers.

    Args:
        run_dir: run directory; the processes read their settings from its run.json.
        note: function that appends an event to the run's log: `note(event, **values)`.
        before: trackers from before a rollback; their messages are received until they end.
    """

    def __init__(
        self, run_dir: Path, names: Sequence[str], note: Note, before: "Trackers | None" = None
    ):
        self._ending: list[TrackerProcess] = []
        if before is not None:
            self._ending = [*before._ending, *before._processes]
            for process in self._ending:
                process.note = note
        self._processes: list[TrackerProcess] = [
            TrackerProcess(Path(run_dir), name, note) for name in names
        ]
        self._poll_at = 0.0

    def tick(self) -> None:
        """Receive messages, and restart processes that died. Takes microseconds."""
        now = time.monotonic()
        if now >= self._poll_at:
            self._poll_at = now + POLL_SECONDS
            for process in (*self._ending, *self._processes):
                process.poll()

    def end(self, how: str) -> None:
        """Announce that the run will write no more lines, and wait until all lines are read.

        Args:
            how: how the run ended: `done`, `stopped`, `rollback`, `failed` or `gave_up`.
        """
        for process in self._processes:
            process.end(how)
        for process in self._processes:
            process.wait_until_read()

    def finish(self, seconds: float = FINISH_SECONDS) -> None:
        """Wait at most `seconds` for the processes, and report trackers that may lack data."""
        deadline = time.monotonic() + seconds
        for process in (*self._ending, *self._processes):
            process.finish(deadline)


class TrackerProcess:
    """A tracker's process, and the socket connected to it."""

    def __init__(self, run_dir: Path, name: str, note: Note):
        self.name, self.note = name, note
        self.log = RunFiles(run_dir).tracker_log(name)
        self.repair = tracker_class(name).repair(run_dir)
        self.child = Child(
            "mirror", run_dir, name,
            log=self.log, endless=True,
            first_pause_seconds=FIRST_PAUSE_SECONDS, max_failures=MAX_FAILURES,
        )  # fmt: skip
        self.channel: socket.socket | None = None
        self._partial_line = b""
        self._has_read_all = self._end_sent = self._ended = self._repair_was_logged = False
        self._start()

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        try:
            self.child.start(stdin=theirs.fileno())
        except OSError as error:
            self._fail(f"cannot start its process: {error}")
            ours.close()
        else:
            ours.setblocking(False)
            self.channel, self._partial_line = ours, b""
        theirs.close()

    def poll(self) -> None:
        """Receive messages, and restart the process if it died and a restart is due."""
        self._receive()
        code = self.child.poll()
        if code is not None:
            self._receive()  # receive messages sent just before the process exited
            self._close()
            if self._end_sent:
                self._report_end(complete=code == 0)
            else:
                self._report_death()
        if self.child.due() and not self._end_sent:
            self._start()

    def _report_death(self) -> None:
        if self.child.failures < MAX_FAILURES:
            self._fail(f"its process ended ({self.log})")
        else:
            self._fail(
                f"its process has ended {self.child.failures} times and is not restarted "
                f"({self.log}); {self.repair}"
            )

    def end(self, how: str) -> None:
        self._end_sent = True
        if self.channel is not None:
            with contextlib.suppress(OSError):
                self.channel.send(json.dumps({"end": how}).encode() + b"\n")

    def wait_until_read(self) -> None:
        deadline = time.monotonic() + READ_SECONDS
        while self.channel is not None and not self._has_read_all:
            seconds_left = deadline - time.monotonic()
            if seconds_left <= 0 or not select.select([self.channel], [], [], seconds_left)[0]:
                return
            self._receive()

    def finish(self, deadline: float) -> None:
        """Wait for the process, kill it at the deadline, and report if rows may be missing."""
        code = self.child.wait(deadline, waiting=partial(record_progress, "end"))
        late = self.child.running
        self.child.kill()
        self._receive()
        self._close()
        self._report_end(code == 0, "it did not end in time" if late else "")

    def _report_end(self, complete: bool, reason: str = "") -> None:
        """Report once that the process has ended and its tracker may lack rows."""
        if not (complete or self._repair_was_logged or self._ended):
            reason = reason or f"its process ended ({self.log})"
            self._fail(f"may lack rows: {reason}; {self.repair}")
        self._ended = True

    def _receive(self) -> None:
        """Read the process's messages without waiting, and log them."""
        while self.channel is not None:
            try:
                data = self.channel.recv(1 << 16)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._close()
                return
            *lines, self._partial_line = (self._partial_line + data).split(b"\n")
            for line in lines:
                self._handle(json.loads(line))

    def _handle(self, message: dict[str, Any]) -> None:
        if "failed" in message:
            self._repair_was_logged |= self.repair in message["failed"]
            self._fail(message["failed"])
        if "log" in message:
            print_safely(f"{self.name}: {message['log']}")
        self._has_read_all |= "read" in message

    def _fail(self, error: str) -> None:
        self.note("tracker_failed", tracker=self.name, error=error)
        print_safely(f"{self.name}: {error}" + ("" if self._end_sent else "; training continues"))

    def _close(self) -> None:
        if self.channel is not None:
            self.channel.close()
        self.channel = None
