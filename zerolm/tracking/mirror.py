"""Copy a run directory to a tracker while the run goes on: `python -m zerolm mirror RUN NAME`.

A process of its own, of low priority, started by a run (zerolm/tracker.py), which it outlives by
seconds when the run is killed. One thread follows the files; another talks to the tracker, and may
wait for a server as long as it likes. What a tracker has already it says itself when it is
opened, so that rows are neither lost nor doubled, whoever was killed in between. No torch here.
"""

import contextlib
import fcntl
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
from typing import Any, Protocol

from zerolm import tracker

LOOK_SECONDS = 0.5
WAITING_ROWS = 1000  # read ahead of a tracker that takes nothing; the rest waits in the file
ORPHAN_SECONDS = 3.0  # that watchdogs of a killed run may need to write down why
END_SECONDS = 22.0  # to send what is left: less than what the run, and a supervisor, wait
CONNECT_SECONDS = 6.0  # of these, for a tracker that has not answered at all yet
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 2.0, 300.0
MOST_PASSED_OVER = 5  # of these are told; mirror.log has all
CRASHED = "crashed"

Row = dict[str, Any]


class Target(Protocol):
    """What a tracker is: the few lines that `Mirror` calls, all from one thread."""

    where: str  # its data are, for the console

    def open(self) -> None: ...
    def wants(self, row: Row) -> bool: ...
    def log(self, row: Row) -> None: ...
    def samples(self, rows: list[Row]) -> None: ...  # before the first row of a later step
    def event(self, event: Row) -> None: ...
    def flush(self) -> None: ...
    def finish(self, exit_code: int) -> None: ...


class Tail:
    """The lines that are appended to a file of JSON lines."""

    def __init__(self, path: Path):
        self.path, self._end_bytes = path, 0

    def read(self, most: int = sys.maxsize) -> list[Row]:
        """Return the lines that are whole by now, at most so many. Spoilt ones are passed over."""
        found: list[Row] = []
        with contextlib.suppress(FileNotFoundError), open(self.path, "rb") as file:
            file.seek(self._end_bytes)
            for line in file:
                if not line.endswith(b"\n") or len(found) >= most:
                    break
                self._end_bytes += len(line)
                with contextlib.suppress(ValueError):
                    found.append(json.loads(line))
        return found


class Mirror:
    """Follows the files of a run and feeds a tracker.

    Args:
        target: the tracker, not opened yet.
        tell: hands a message to the run.
    """

    def __init__(self, run_dir: Path, name: str, target: Target, tell: Callable[..., None]):
        self.run_dir, self.name, self.target, self.tell = run_dir, name, target, tell
        self.rows = Tail(run_dir / "metrics.jsonl")
        self.events = Tail(run_dir / "events.jsonl")
        self.texts = Tail(run_dir / "samples.jsonl")
        self.work: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        self.ending = threading.Event()
        self.num_read = self.num_done = 0  # rows
        self.connected = self.complete = False
        self.passed_over: set[str] = set()
        self.sender = threading.Thread(target=self._send, daemon=True)

    # ---- Following the files

    def follow(self) -> None:
        """Read what was appended since the last call, and queue it."""
        room = sys.maxsize if self.ending.is_set() else WAITING_ROWS - self.work.qsize()
        rows = self.rows.read(room) if room > 0 else []
        texts = self.texts.read()  # after the rows: what was written before one of them is here
        if texts:
            self.work.put(("samples", texts))
        for row in rows:
            self.num_read += 1
            self.work.put(("row", row))
        for event in self.events.read():
            self.work.put(("event", event))

    def end(self, how: str) -> None:
        """Read the rest, hand it over, and wait for the tracker, for a bounded time."""
        self.ending.set()
        self.follow()
        if how == CRASHED:
            deadline = time.monotonic() + ORPHAN_SECONDS
            while time.monotonic() < deadline:  # events only: a restart may cut the metrics
                time.sleep(LOOK_SECONDS)
                for event in self.events.read():
                    self.work.put(("event", event))
        self.work.put(("end", 0 if how in ("done", "stopped", "rollback") else 1))
        self.tell(read=True)
        self.sender.join(CONNECT_SECONDS)
        if self.connected:
            self.sender.join(END_SECONDS - CONNECT_SECONDS)
        if not self.complete:
            left = self.num_read - self.num_done
            what = f"{left} of {self.num_read} rows" if left else "the end of what it was sent"
            self.tell(failed=f"lacks {what}; {tracker.repair(self.run_dir, self.name)}")

    # ---- Feeding the tracker

    def _send(self) -> None:
        try:
            self._connect()
            self.tell(says=self.target.where)
            while True:
                try:
                    kind, *what = self.work.get(timeout=LOOK_SECONDS)
                except queue.Empty:
                    self.target.flush()
                    continue
                if kind == "end":
                    self.target.finish(what[0])
                    self.complete = True
                    return
                if kind == "row":
                    if self.target.wants(what[0]):
                        self.target.log(what[0])
                    self.num_done += 1
                else:
                    self._try(kind, *what)
        except Exception as error:
            traceback.print_exc()
            self.tell(failed=" ".join(repr(error).split())[:300])

    def _try(self, kind: str, what: Any) -> None:
        """Hand over one event or the samples; what is wrong with one of them stops no other."""
        try:
            getattr(self.target, kind)(what)
        except Exception as error:
            traceback.print_exc()
            text = f"passed over {kind}: {' '.join(repr(error).split())}"[:300]
            if text not in self.passed_over and len(self.passed_over) < MOST_PASSED_OVER:
                self.passed_over.add(text)
                self.tell(failed=text)

    def _connect(self) -> None:
        """Open the tracker, for as long as it takes; only what is new is told."""
        pause, told = FIRST_PAUSE_SECONDS, ""
        while True:
            try:
                self.target.open()
                self.connected = True
                return
            except Exception as error:
                traceback.print_exc()
                text = " ".join(repr(error).split())[:300]
                if text != told:
                    self.tell(failed=text)
                told = text
            self.ending.wait(pause)
            pause = min(LONGEST_PAUSE_SECONDS, 2 * pause)
            if self.ending.is_set():  # as often as it can before this process ends
                time.sleep(LOOK_SECONDS)


# ---- The process


def mirror(run_dir: Path, name: str, of_process: int) -> None:
    """Mirror a run until it ends. Called in a process of its own, whose standard input is a socket.

    Args:
        of_process: the run's first rank.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # the run is told to stop, and tells us
    with contextlib.suppress(OSError):
        os.nice(19)
    channel = socket.socket(fileno=os.dup(0))
    lock = threading.Lock()

    def tell(**what: Any) -> None:
        with lock, contextlib.suppress(OSError):  # a run that was killed does not listen
            channel.sendall(json.dumps(what).encode() + b"\n")

    def orphaned() -> bool:
        return os.getppid() != of_process

    try:
        with _only_one(run_dir / name / "lock", orphaned):
            one = Mirror(run_dir, name, make_target(run_dir, name, of_process), tell)
            one.sender.start()
            how = None
            while how is None:
                how = _told_to_end(channel) or (CRASHED if orphaned() else None)
                if how is None:
                    one.follow()
                    if not one.sender.is_alive():
                        break
            else:
                one.end(how)
        code = 0 if one.complete else 1
    except Exception as error:
        traceback.print_exc()
        tell(failed=" ".join(repr(error).split())[:300])
        code = 1
    sys.stdout.flush()
    os._exit(code)  # no library's exit hooks: they may wait for a server


def make_target(run_dir: Path, name: str, of_process: int) -> Target:
    """Return the tracker of that name, configured by run.json."""
    if name == "wandb":
        from zerolm.wandb_tracker import WandbTracker

        return WandbTracker(run_dir, of_process=of_process)
    from zerolm.tensorboard_tracker import TensorboardTracker

    return TensorboardTracker(run_dir)


def _told_to_end(channel: socket.socket) -> str | None:
    """Wait for one look; return how the run has ended, if it has said so, or is gone."""
    if not select.select([channel], [], [], LOOK_SECONDS)[0]:
        return None
    try:
        data = channel.recv(1 << 16)
    except OSError:
        data = b""
    return json.loads(data)["end"] if data else CRASHED


@contextlib.contextmanager
def _only_one(path: Path, orphaned: Callable[[], bool]) -> Any:
    """Wait until the mirror of an earlier start, which may have something left to send, has ended.

    Raises:
        TimeoutError: the run was killed meanwhile: its next start has a mirror of its own.
    """
    with open(path, "a") as lock:
        while not orphaned():
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(LOOK_SECONDS / 2)
            except OSError:  # a file system without locks
                break
        else:
            raise TimeoutError("the run has ended while an earlier one's tracker was at work")
        yield
