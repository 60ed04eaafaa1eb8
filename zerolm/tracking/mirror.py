"""`Mirror`: copy a run directory to a tracker during the run, `python -m zerolm mirror RUN NAME`.

`Trackers` starts this background process, which outlives a killed run by a few seconds. One thread
follows the files; another feeds the tracker, and may wait for a server indefinitely. When opened, a
tracker checks which rows it already has, so killing the run or this process neither loses nor
repeats rows. Must not depend on torch.
"""

import contextlib
import json
import os
import queue
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from zerolm.common import processes
from zerolm.common.errors import reason
from zerolm.common.locks import FileLock, LockTaken, wait_for_lock
from zerolm.run_dir.files import RunFiles
from zerolm.run_dir.jsonl import EventRow, MetricsRow, SampleRow, parse_row
from zerolm.tracking.tracker import Row, Tracker, tracker_class

POLL_SECONDS = 0.5
MAX_WAITING_ROWS = 1000  # maximum number of queued rows; further rows are read later
ORPHAN_SECONDS = 3.0  # time for a killed run's watchdogs to log why the run ended
END_SECONDS = 22.0  # time to send the remaining rows; a run or supervisor waits longer
CONNECT_SECONDS = 6.0  # part of END_SECONDS that a tracker has to connect
FIRST_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 2.0, 300.0
MAX_ERRORS = 5  # number of errors with events and samples to log in the run; mirror.log has all
CRASHED = "crashed"


class Tail:
    """Reads the lines that are appended to a JSON Lines file."""

    def __init__(self, path: Path, kind: Any):
        self.path, self.kind, self._end_bytes = path, kind, 0

    def read(self, max_lines: int = sys.maxsize) -> list[Row]:
        """Return up to `max_lines` new complete lines, skipping unreadable lines.

        A line that is still being written is returned by a later call.
        """
        rows: list[Row] = []
        with contextlib.suppress(FileNotFoundError), open(self.path, "rb") as file:
            file.seek(self._end_bytes)
            for line in file:
                if not line.endswith(b"\n") or len(rows) >= max_lines:
                    break
                self._end_bytes += len(line)
                with contextlib.suppress(ValueError, RecursionError):
                    rows.append(parse_row(line, self.kind))
        return rows


class Mirror:
    """Follows a run's files, and feeds a tracker.

    Args:
        tracker: a tracker that is not open yet.
        send: function that sends a message to the run: `log=LINE`, `failed=ERROR` or `read=True`.

    Attributes:
        complete: whether the tracker has received everything.
    """

    def __init__(self, run_dir: Path, tracker: Tracker, send: Callable[..., None]):
        self.run_dir, self.tracker, self.send = run_dir, tracker, send
        files = RunFiles(run_dir)
        self.rows, self.events = Tail(files.metrics, MetricsRow), Tail(files.events, EventRow)
        self.samples = Tail(files.samples, SampleRow)
        self.work: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self.ending = threading.Event()
        self.num_read = self.num_done = 0  # numbers of rows
        self.connected = self.complete = False
        self.error = ""  # why the tracker is not connected, or no longer connected
        self.errors: set[str] = set()
        self.feeder = threading.Thread(target=self._feed, daemon=True)

    # ---- The thread that follows the files

    def follow(self) -> None:
        """Read the lines appended since the last call, and queue them."""
        room = sys.maxsize if self.ending.is_set() else MAX_WAITING_ROWS - self.work.qsize()
        rows = self.rows.read(room) if room > 0 else []
        # Read after the rows, so samples written before a row are queued before it.
        samples = self.samples.read()
        if samples:
            self.work.put(("samples", samples))
        for row in rows:
            self.num_read += 1
            self.work.put(("row", row))
        self._follow_events()

    def _follow_events(self) -> None:
        for event in self.events.read():
            self.work.put(("event", event))

    def end(self, how: str) -> None:
        """Read and queue the remaining lines, and wait at most `END_SECONDS` for the tracker.

        Args:
            how: how the run ended: a value from `Trackers.end`, or `CRASHED`.
        """
        self.ending.set()
        self.follow()
        if how == CRASHED:
            deadline = time.monotonic() + ORPHAN_SECONDS
            # Follow only events, since a restart may truncate the metrics.
            while time.monotonic() < deadline:
                time.sleep(POLL_SECONDS)
                self._follow_events()
        self.work.put(("end", 0 if how in ("done", "stopped", "rollback") else 1))
        self.send(read=True)
        self.feeder.join(CONNECT_SECONDS)
        if self.connected:
            self.feeder.join(END_SECONDS - CONNECT_SECONDS)
        if not self.complete:
            missing = self.num_read - self.num_done
            rows = f"{missing} of {self.num_read} rows" if missing else "the last data"
            reason = f"did not accept them within {END_SECONDS:.0f} s"
            if self.error or not self.connected:
                reason = self.error or f"not connected within {CONNECT_SECONDS:.0f} s"
            self.send(failed=f"lacks {rows} ({reason}); {self.tracker.repair(self.run_dir)}")

    # ---- The thread that feeds the tracker

    def _feed(self) -> None:
        try:
            self._connect()
            self.send(log=self.tracker.where)
            while not self.complete:
                try:
                    kind, content = self.work.get(timeout=POLL_SECONDS)
                except queue.Empty:
                    self.tracker.flush()
                else:
                    self._hand_over(kind, content)
        except Exception as error:
            traceback.print_exc()
            self.error = reason(error)
            self.send(failed=self.error)

    def _hand_over(self, kind: str, content: Any) -> None:
        if kind == "end":
            self.tracker.finish(content)
            self.complete = True
        elif kind == "row":
            if self.tracker.lacks(content):
                self.tracker.log(content)
            self.num_done += 1
        elif kind == "event":
            self._try(kind, self.tracker.event, content)
        else:
            self._try(kind, self.tracker.samples, content)

    def _try(self, kind: str, call: Callable[[Any], None], content: Any) -> None:
        """Pass an event or samples to the tracker, and report an error without raising it."""
        try:
            call(content)
        except Exception as error:
            traceback.print_exc()
            text = f"skipped {kind}: {reason(error)}"
            if text not in self.errors and len(self.errors) < MAX_ERRORS:
                self.errors.add(text)
                self.send(failed=text)

    def _connect(self) -> None:
        """Open the tracker, retrying until this succeeds. A repeated error is reported once."""
        pause = FIRST_PAUSE_SECONDS
        while True:
            try:
                self.tracker.open()
                self.connected, self.error = True, ""
                return
            except Exception as error:
                traceback.print_exc()
                if (text := reason(error)) != self.error:
                    self.send(failed=text)
                self.error = text
            self.ending.wait(pause)
            pause = min(MAX_PAUSE_SECONDS, 2 * pause)
            if self.ending.is_set():  # retry without growing pauses, because this process ends soon
                time.sleep(POLL_SECONDS)


# ---- The process


def mirror(run_dir: Path, name: str, of_process: int) -> None:
    """Mirror a run to the tracker `name` until the run ends, then end this process.

    Standard input must be a socket.

    Args:
        of_process: process ID of the run's first rank.
    """
    for number in processes.STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # the run handles signals, and reports how it ended
    with contextlib.suppress(OSError):
        os.nice(19)
    channel = socket.socket(fileno=os.dup(0))
    lock = threading.Lock()

    def send(**message: Any) -> None:
        with lock, contextlib.suppress(OSError):  # a killed run cannot receive messages
            channel.sendall(json.dumps(message).encode() + b"\n")

    def orphaned() -> bool:
        return os.getppid() != of_process

    try:
        with _lock(RunFiles(run_dir).tracker_lock(name), orphaned):
            one = Mirror(run_dir, tracker_class(name)(run_dir, of_process), send)
            one.feeder.start()
            how = None
            while how is None and one.feeder.is_alive():
                how = _received_end(channel) or (CRASHED if orphaned() else None)
                if how is None:
                    one.follow()
            if how is not None:
                one.end(how)
        code = 0 if one.complete else 1
    except Exception as error:
        traceback.print_exc()
        send(failed=reason(error))
        code = 1
    sys.stdout.flush()
    os._exit(code)  # skips libraries' exit hooks, which may wait for a server


def _received_end(channel: socket.socket) -> str | None:
    """Wait up to `POLL_SECONDS`; return how the run ended, or None if the run has not ended."""
    if not select.select([channel], [], [], POLL_SECONDS)[0]:
        return None
    try:
        data = channel.recv(1 << 16)
    except OSError:
        data = b""
    return json.loads(data)["end"] if data else CRASHED


def _lock(path: Path, orphaned: Callable[[], bool]) -> FileLock:
    """Acquire a tracker's lock, waiting for an earlier start's mirror that may still be sending.

    Raises:
        TimeoutError: the run was killed meanwhile; the next start will start another mirror.
    """
    try:
        return wait_for_lock(path, orphaned, POLL_SECONDS / 2)
    except LockTaken:
        raise TimeoutError(
            "the run has ended while the mirror of an earlier start was still running"
        ) from None
