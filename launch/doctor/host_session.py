"""A conversation with the doctor's collector on one host, over one ssh connection.

What the collector shall have in its environment goes over its standard input, so that no value
stands on a command line, here or there.
"""

import json
import queue
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from launch.collector import MARK
from launch.forwarded import forwarded_environment
from launch.hosts import Host, shell_words

# Reads one line and not a byte more: what follows is for the program that takes its place.
START = (
    "import json, os, sys; line = b''\n"
    "while not line.endswith(b'\\n'): line += os.read(0, 1) or sys.exit('no standard input')\n"
    "os.environ.update(json.loads(line))\n"
    "os.execv(sys.executable, [sys.executable, '-m', 'launch', 'doctor', '--collect'])"
)


class HostError(Exception):
    """What a host does not answer, or answers with an error. One line."""


class Session:
    """An open conversation; `close` ends it. Not to be shared between threads."""

    def __init__(self, host: Host, ssh_port: str | None):
        self.host = host
        here, python = shlex.quote(str(Path.cwd())), shlex.quote(sys.executable)
        command = f"cd {here} && exec {python} -c {shlex.quote(START)}"
        self.errors = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(
            shell_words(host, command, ssh_port), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=self.errors, text=True, errors="replace", start_new_session=True,
        )  # fmt: skip
        self.lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        self._write(json.dumps(forwarded_environment()))

    def ask(self, seconds: float, ask: str, /, **question: Any) -> Any:
        """Ask one question and return its answer.

        Raises:
            HostError: there is none in time, or it is an error.
        """
        self._write(json.dumps({"ask": ask, **question}))
        deadline = time.monotonic() + seconds
        while True:
            try:
                line = self.lines.get(timeout=max(0.01, deadline - time.monotonic()))
            except queue.Empty:
                raise HostError(f"no answer in {seconds:.0f} s ({ask})") from None
            if line is None:
                raise HostError(self._ending())
            if line.startswith(MARK):
                answer = json.loads(line[len(MARK) :])
                if "error" in answer:
                    raise HostError(answer["error"])
                return answer["answer"]

    def clock_offset(self, seconds: float) -> tuple[float, float]:
        """Return (how far its clock is ahead of this host's, uncertainty), in seconds."""
        best = (0.0, float("inf"))
        for _ in range(3):
            before = time.time()
            there = self.ask(seconds, "clock")
            after = time.time()
            best = min(best, (there - (before + after) / 2, (after - before) / 2),
                       key=lambda pair: pair[1])  # fmt: skip
        return best

    def close(self) -> None:
        """End the collector: it sees the end of its questions, and ssh goes with it."""
        try:
            assert self.process.stdin is not None
            self.process.stdin.close()
        except OSError:
            pass
        try:
            self.process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.errors.close()

    def _write(self, line: str) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()
        except OSError:
            pass  # it has ended: the next answer says how

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put(None)

    def _ending(self) -> str:
        code = self.process.wait()
        self.errors.seek(0)
        said = self.errors.read().strip().splitlines()
        return f"exit code {code}" + (f": {said[-1]}" if said else "")
