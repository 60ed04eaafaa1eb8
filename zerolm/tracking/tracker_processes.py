"""The run's part in its trackers: one child process each, that copies the run directory's files.

A tracker (W&B, TensorBoard) never meets the training process. Its child, `python -m zerolm mirror`
(zerolm/mirror.py), reads what the run appends to `metrics.jsonl`, `events.jsonl`, `samples.jsonl`:
whatever is slow or broken over there, the files are the queue, and a step waits for nothing. Here
the children are started, listened to and ended. First rank only; knows no tracker but its name.
"""

import contextlib
import json
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from zerolm import processes, pulse
from zerolm.distributed import tell
from zerolm.machine import told_wandb_mode

LOOK_SECONDS = 2.0
READ_SECONDS = 5.0  # a child that is alive reads what was written within one of its looks
FINISH_SECONDS = 30.0
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 30.0, 600.0
MOST_DEATHS = 4  # of one tracker in one start: offline, each new child writes every row once more

Note = Callable[..., None]


def names(settings: Any) -> list[str]:
    """Return the trackers that a run has: none of W&B where it is off, or disabled for all."""
    disabled = settings.wandb == "auto" and told_wandb_mode() == "disabled"
    found = [] if settings.wandb == "off" or disabled else ["wandb"]
    return [*found, "tensorboard"] if settings.tensorboard else found


class Trackers:
    """The trackers of a run. No call waits for their servers but `finish`, and that for so long.

    Args:
        run_dir: has run.json, which tells the children what to do.
        names: of the trackers.
        note: appends an event to the run's log: `note(event, **what)`.
        before: those of the log before a rollback, told to end: they are listened to until then.
    """

    def __init__(
        self, run_dir: Path, names: Sequence[str], note: Note, before: "Trackers | None" = None
    ):
        self._leaving: list[_Child] = []
        if before is not None:
            self._leaving = [*before._leaving, *before._children]
            for child in self._leaving:
                child.note = note
        self._children: list[_Child] = [_Child(Path(run_dir), name, note) for name in names]
        self._look_at = 0.0

    def poke(self) -> None:
        """Say what the children have said, and start one again that has died. Microseconds."""
        now = time.monotonic()
        if now >= self._look_at:
            self._look_at = now + LOOK_SECONDS
            for child in (*self._leaving, *self._children):
                child.look()

    def end(self, how: str) -> None:
        """Tell the children that nothing more will be written, and wait until they have read all.

        Args:
            how: `done`, `stopped`, `rollback`; or `failed`, `gave_up`.
        """
        for child in self._children:
            child.end(how)
        for child in self._children:
            child.wait_until_read()

    def finish(self, seconds: float = FINISH_SECONDS) -> None:
        """Wait for the children, for so long, and say what a tracker lacks, and what repairs it."""
        deadline = time.monotonic() + seconds
        for child in (*self._leaving, *self._children):
            child.finish(deadline)


class _Child:
    """One child: its process, the socket to it, and what it has said."""

    def __init__(self, run_dir: Path, name: str, note: Note):
        self.run_dir, self.name, self.note = run_dir, name, note
        self.process: subprocess.Popen[bytes] | None = None
        self.channel: socket.socket | None = None
        self._said = b""
        self._read = self._ended = self._over = False
        self._told_repair, self._deaths = False, 0
        self._pause, self._start_at = FIRST_PAUSE_SECONDS, 0.0
        self._start()

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        words = [sys.executable, "-m", "zerolm", "mirror", str(self.run_dir), self.name]
        words += ["--of_process", str(os.getpid())]
        log = self.run_dir / self.name
        try:
            log.mkdir(exist_ok=True)
            with open(log / "mirror.log", "ab") as output:
                self.process = subprocess.Popen(
                    words,
                    env=processes.observer_environment(),
                    stdin=theirs.fileno(),
                    stdout=output,
                    stderr=output,
                )
        except OSError as error:  # training goes on
            self._failed(f"cannot start its process: {error}")
            self._start_at = time.monotonic() + LONGEST_PAUSE_SECONDS
            ours.close()
        else:
            ours.setblocking(False)
            self.channel, self._said = ours, b""
        theirs.close()

    def look(self) -> None:
        """Take in what the child has said; start it again if it has died, a few times."""
        self._listen()
        if self.process is not None and self.process.poll() is not None:
            self._listen()
            complete = self.process.returncode == 0
            self._close()
            if self._ended:
                self._end_of(complete)
            else:
                self._died()
        waits = self.process is None and not self._ended and self._deaths < MOST_DEATHS
        if waits and time.monotonic() >= self._start_at:
            self._start()

    def _died(self) -> None:
        self._deaths += 1
        log = self.run_dir / self.name / "mirror.log"
        if self._deaths >= MOST_DEATHS:
            self._failed(
                f"its process has ended {self._deaths} times and is not started again ({log}); "
                f"{repair(self.run_dir, self.name)}"
            )
            return
        self._failed(f"its process ended ({log})")
        self._start_at = time.monotonic() + self._pause
        self._pause = min(LONGEST_PAUSE_SECONDS, 2 * self._pause)

    def end(self, how: str) -> None:
        self._ended = True
        if self.channel is not None:
            with contextlib.suppress(OSError):
                self.channel.send(json.dumps({"end": how}).encode() + b"\n")

    def wait_until_read(self) -> None:
        deadline = time.monotonic() + READ_SECONDS
        while self.channel is not None and not self._read:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self.channel], [], [], left)[0]:
                return
            self._listen()

    def finish(self, deadline: float) -> None:
        """Wait for the child, end it when it is late, and have told what its tracker lacks."""
        process = self.process
        if process is not None:
            while process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.05)
                pulse.beat("end")  # to wait here is not to hang
            late = process.poll() is None
            if late:
                process.kill()
                process.wait()
            self._listen()
            self._close()
            self._end_of(process.returncode == 0, "did not end in time" if late else "")
        else:
            self._end_of(False)

    def _end_of(self, complete: bool, why: str = "") -> None:
        """Say once, of a child that will say nothing more, that its tracker may lack something."""
        if not (complete or self._told_repair or self._over):
            why = why or f"its process ended ({self.run_dir / self.name / 'mirror.log'})"
            self._failed(f"may lack rows: {why}; {repair(self.run_dir, self.name)}")
        self._over = True

    def _listen(self) -> None:
        """Read what the child has said, and say or note it."""
        while self.channel is not None:
            try:
                data = self.channel.recv(1 << 16)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self.channel.close()
                self.channel = None
                return
            *lines, self._said = (self._said + data).split(b"\n")
            for line in lines:
                self._take(json.loads(line))

    def _take(self, message: dict[str, Any]) -> None:
        if "failed" in message:
            self._told_repair |= repair(self.run_dir, self.name) in message["failed"]
            self._failed(message["failed"])
        if "says" in message:
            tell(f"{self.name}: {message['says']}")
        self._read |= "read" in message

    def _failed(self, error: str) -> None:
        self.note("tracker_failed", tracker=self.name, error=error)
        tell(f"{self.name}: {error}; training goes on")

    def _close(self) -> None:
        if self.channel is not None:
            self.channel.close()
        self.channel = self.process = None


def repair(run_dir: Path, name: str) -> str:
    """Name the command that gives a tracker what it lacks."""
    if name == "wandb":
        return f"metrics.jsonl has everything: python -m zerolm wandb-sync {run_dir}"
    return "metrics.jsonl has everything, and the next start writes what is missing"
