"""`Spare`: starts and asks the process that does the imports of the next launch.

Only for launches of `deepspeed` with this Python. Whatever is wrong with it, the launch is started
in the ordinary way. It costs the memory of one rank without a model, about 0.3 GB, most of which
the ranks that it forks share.
"""

import contextlib
import ctypes
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from launch.command.deepspeed_command import launcher_option
from launch.supervise import spare_process
from launch.supervise.spare_process import (
    NO_RESTS,
    PADDING_BYTES,
    PR_SET_PDEATHSIG,
    RUNNER,
    Forked,
)
from zerolm.common import processes
from zerolm.common.values import shown_bytes

PR_SET_CHILD_SUBREAPER = 36
REPLY_SECONDS = 10.0
IMPORT_SECONDS = 60.0  # then a launch no longer waits for the imports
MIN_FREE_BYTES = 2 << 30  # below this no spare is started


class Spare:
    """At most one process that waits to become a launch, and does so any number of times.

    Args:
        modules: file with the names of the modules to import, a JSON list that rank 0 writes.
        forkable: written as soon as a process that has imported them can be forked.
    """

    def __init__(self, modules: Path, forkable: Path):
        self.modules, self.forkable = modules, forkable
        self.process: subprocess.Popen[bytes] | None = None
        self.problem: str | None = None  # why there is none, and will be none
        self._channel: socket.socket | None = None
        self._ready = False

    def tick(self, command: Sequence[str]) -> str | None:
        """Start the process if there is none, and it can start this command.

        Returns:
            News of it for the user, if there are any.
        """
        if self.process is not None:
            waited = self._ready
            if self._is_ready() and not waited:
                return "a spare process has imported the modules of a rank, for the next restart"
            return f"no spare process: {self.problem}" if self.problem else None
        if self.problem is None and self.modules.exists():
            self._start_for(command)
            return f"no spare process: {self.problem}" if self.problem else None
        return None

    def prepare(self, command: Sequence[str]) -> None:
        """Start the process if none is running, and one could be forked in an earlier start."""
        if self.process is None and self.problem is None and self.forkable.exists():
            self._start_for(command)

    def _start_for(self, command: Sequence[str]) -> None:
        if runner_arguments(command) is None:
            self.problem = "the command does not start deepspeed with this Python"
        elif psutil.virtual_memory().available < MIN_FREE_BYTES:
            self.problem = f"less than {shown_bytes(MIN_FREE_BYTES)} of memory are available"
        if self.problem is not None:
            return
        own, other = socket.socketpair()
        own.settimeout(REPLY_SECONDS)
        with other:
            argv = [sys.executable, "-u", "-m", spare_process.__name__, str(other.fileno())]
            self.process = subprocess.Popen(
                [*argv, str(self.modules), " " * PADDING_BYTES],
                env={**os.environ, "ZEROLM_SPARE": " " * PADDING_BYTES},
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                pass_fds=[other.fileno()], start_new_session=True, preexec_fn=end_with_parent,
            )  # fmt: skip
        self._channel, self._ready = own, False

    def launch(self, command: Sequence[str], environment: Mapping[str, str]) -> Forked | None:
        """Fork a launch and return its process; None if there is no spare that can.

        Waits for imports that have begun: they are done before those of the launch itself would be.
        """
        arguments = runner_arguments(command)
        if arguments is None or not self._finish_imports(command) or self._channel is None:
            return None
        content = json.dumps(
            {"command": list(command), "arguments": arguments, "environment": dict(environment),
             "supervisor": os.getpid()}
        ).encode()  # fmt: skip
        read, write = os.pipe()
        _adopt_orphans(True)  # the launch becomes a child of this process
        try:
            socket.send_fds(self._channel, [b"%08x" % len(content)], [write])
            self._channel.sendall(content)
            launched = Forked(int(self._reply()["pid"]), open(read, "rb", buffering=0))
        except (OSError, KeyError, ValueError):
            os.close(read)
            self.end()  # it has noticed that a file has changed, or is dead: start another later
            mark = f"{processes.SUPERVISOR}={environment[processes.SUPERVISOR]}"
            for pid in processes.marked_pids(mark):
                processes.signal_marked(pid, signal.SIGKILL, mark)
            return None
        finally:
            _adopt_orphans(False)
            os.close(write)
        return launched

    def _finish_imports(self, command: Sequence[str]) -> bool:
        """Return whether the process is ready; wait until it is if its ranks are on this host."""
        is_local = not any(launcher_option(command, name) for name in ("-H", "--hostfile"))
        if self._channel is not None and not self._ready and is_local:
            with contextlib.suppress(OSError):
                self._channel.sendall(NO_RESTS)
            select.select([self._channel], [], [], IMPORT_SECONDS)
        return self._is_ready()

    def _is_ready(self) -> bool:
        if self._channel is not None and not self._ready:
            if not select.select([self._channel], [], [], 0)[0]:
                return False  # still importing
            try:
                message = self._reply()
            except (OSError, ValueError):
                message = {"declined": "it has ended"}
            self._ready, self.problem = "ready" in message, message.get("declined")
            with contextlib.suppress(OSError):
                self.forkable.touch() if self._ready else self.forkable.unlink(missing_ok=True)
            if self.problem is not None:
                self.end()
        return self._ready

    def _reply(self) -> dict[str, Any]:
        assert self._channel is not None
        return dict(json.loads(self._channel.recv(4096)))

    def end(self) -> None:
        """End the process; launches that it has forked go on."""
        if self._channel is not None and self.process is not None:
            self._channel.close()
            self.process.kill()
            self.process.wait()
        self._channel, self.process, self._ready = None, None, False


def runner_arguments(command: Sequence[str]) -> list[str] | None:
    """Return the arguments of DeepSpeed's runner if a command starts it with this Python."""
    if Path(command[0]).name == "deepspeed" and (path := shutil.which(command[0])):
        with open(path, "rb") as file:
            interpreter = file.readline().decode(errors="replace").removeprefix("#!").strip()
        return list(command[1:]) if interpreter == sys.executable else None
    if list(command[1:3]) == ["-m", RUNNER] and shutil.which(command[0]) == sys.executable:
        return list(command[3:])
    return None


def end_with_parent() -> None:
    """Have the kernel kill this process if its parent ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


def _adopt_orphans(adopts: bool) -> None:
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(adopts), 0, 0, 0)
