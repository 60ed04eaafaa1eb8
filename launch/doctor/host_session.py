"""A session with the doctor's collector on one host, over one ssh connection.

The collector reads its environment from standard input, so no value is visible on a command line on
either host.
"""

import contextlib
import json
import queue
import shlex
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launch.command.hosts import Host
from launch.doctor.collector import MARK
from launch.supervise.hosts import remote_command
from zerolm.common.shipped import code_command, module_command

# Reads the first line byte by byte, to leave all other input to the program that replaces this one.
BOOTSTRAP = (
    "import json, os; line = b''\n"
    "while not line.endswith(b'\\n'): line += os.read(0, 1) or sys.exit('no standard input')\n"
    "os.environ.update(json.loads(line))\n"
    f"os.execv(sys.executable, {module_command('launch', 'doctor', '--collect')})"
)


class HostError(Exception):
    """A host did not answer, or answered with an error. The message is a single line."""


class Session:
    """An open session; call `close` to end it. Must not be shared between threads."""

    def __init__(self, host: Host, ssh_port: str | None, environment: Mapping[str, str]):
        self.host = host
        here = shlex.quote(str(Path.cwd()))
        command = f"cd {here} && exec {shlex.join(code_command(BOOTSTRAP))}"
        self.errors = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(
            remote_command(host, command, ssh_port), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=self.errors, text=True, errors="replace", start_new_session=True,
        )  # fmt: skip
        self.lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        self._write(json.dumps(environment))

    def ask(self, seconds: float, name: str, /, **arguments: Any) -> Any:
        """Call one of the collector's `ANSWERS` and return its result.

        Raises:
            HostError: the host does not answer within `seconds`, or answers with an error.
        """
        self._write(json.dumps({"ask": name, **arguments}))
        deadline = time.monotonic() + seconds
        while True:
            try:
                line = self.lines.get(timeout=max(0.01, deadline - time.monotonic()))
            except queue.Empty:
                raise HostError(f"no answer in {seconds:.0f} s ({name})") from None
            if line is None:
                raise HostError(self._exit_message())
            if line.startswith(MARK):
                answer = json.loads(line[len(MARK) :])
                if "error" in answer:
                    raise HostError(answer["error"])
                return answer["answer"]

    def clock_offset(self, seconds: float) -> tuple[float, float]:
        """Return (seconds by which the host's clock is ahead of this host's, uncertainty)."""
        best = (0.0, float("inf"))
        for _ in range(3):
            before = time.time()
            remote = self.ask(seconds, "clock")
            after = time.time()
            measured = (remote - (before + after) / 2, (after - before) / 2)
            best = min(best, measured, key=lambda pair: pair[1])
        return best

    def hang_up(self) -> None:
        """Close the collector's standard input, which ends the collector and the ssh connection."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()

    def close(self, deadline: float) -> None:
        """Wait for the session to end; kill it at the deadline."""
        self.hang_up()
        try:
            self.process.wait(timeout=max(0.0, deadline - time.monotonic()))
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
            pass  # the collector has exited; the next `ask` reports its exit code

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put(None)

    def _exit_message(self) -> str:
        code = self.process.wait()
        self.errors.seek(0)
        output = self.errors.read().strip().splitlines()
        return f"exit code {code}" + (f": {output[-1].rstrip('.')}" if output else "")
