"""The supervisor's end of a process that keeps the imports of a run's ranks.

A launch that forks its ranks leaves such a process (`zerolm/train/held_imports.py`). Launches of
the same supervisor are then forked from it, unless code has changed since; otherwise, and on other
hosts, each launch imports by itself.
"""

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from typing import IO

from zerolm.common.forked import IMPORTS, READY, REQUEST_BYTES
from zerolm.common.process_tree import RUNNER, end_with_parent
from zerolm.common.shipped import module_command

END_SECONDS = 2.0
START_SECONDS = 10.0  # time for the holder to fork, after which it is not used


class ForkedLaunch:
    """A launch that the holder has forked, as far as `Attempt` uses `subprocess.Popen`."""

    def __init__(self, pid: int, stdout: IO[bytes], status: socket.socket):
        self.pid, self.stdout, self.returncode = pid, stdout, None
        self._status = status

    returncode: int | None

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            code = self._status.recv(REQUEST_BYTES)
            self.returncode = int(code) if code else -signal.SIGKILL  # its parent was killed
            self._status.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


class Imports:
    """Starts launches.

    Args:
        shared: whether later launches may use the imports of the first.
    """

    def __init__(self, shared: bool = True):
        self.shared = shared
        self._channel: socket.socket | None = None

    def start(
        self, command: Sequence[str], environment: Mapping[str, str]
    ) -> "ForkedLaunch | subprocess.Popen[bytes]":
        """Start a launch in a session of its own, which is killed if this process ends.

        Its output and its errors go to the same pipe.
        """
        shares = self.shared and list(command[:3]) == module_command(RUNNER)
        if shares and (launch := self._forked(command, environment)) is not None:
            return launch
        with contextlib.ExitStack() as stack:
            descriptors, variables = [], dict(environment)
            if shares:
                self._channel, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                stack.enter_context(other)
                descriptors, variables[IMPORTS] = [other.fileno()], str(other.fileno())
            return subprocess.Popen(
                list(command), env=variables, pass_fds=descriptors, stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                start_new_session=True,  # so Ctrl-C reaches only this process, which forwards it
                preexec_fn=end_with_parent,  # without a launcher, the ranks save and stop
            )  # fmt: skip

    def close(self) -> None:
        """End the process that keeps the imports, if there is one."""
        if (channel := self._channel) is None:
            return
        self._channel = None
        with channel, contextlib.suppress(OSError):
            channel.shutdown(socket.SHUT_WR)
            while select.select([channel], [], [], END_SECONDS)[0] and channel.recv(len(READY)):
                pass

    def _forked(
        self, command: Sequence[str], environment: Mapping[str, str]
    ) -> ForkedLaunch | None:
        """Let the holder fork a launch; return None if there is none, or it has ended."""
        channel, self._channel = self._channel, None
        if channel is None:
            return None
        request = json.dumps({"argv": list(command), "environment": dict(environment)}).encode()
        reader, writer = os.pipe()
        status, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with contextlib.ExitStack() as stack:
            output = stack.enter_context(open(reader, "rb"))
            stack.enter_context(status)
            stack.enter_context(channel)
            try:
                with other, open(writer, "wb"):
                    if not select.select([channel], [], [], 0.0)[0]:
                        return None
                    if channel.recv(len(READY)) != READY:
                        return None
                    socket.send_fds(channel, [request], [writer, other.fileno()])
                if not select.select([status], [], [], START_SECONDS)[0]:
                    return None
                pid = status.recv(REQUEST_BYTES)
            except OSError:
                return None
            if not pid:
                return None
            stack.pop_all()
        self._channel = channel
        return ForkedLaunch(int(pid), output, status)
