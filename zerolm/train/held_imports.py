"""A process that keeps the imports of a run's ranks for supervised restarts.

The supervisor passes a socket to the first launch, in a variable that each launcher passes on. The
node launcher forks the holder before its ranks, and the holder forks the runner of each restart,
until the supervisor ends. `launch/supervise/imports.py` has the other end of the socket.
"""

import contextlib
import json
import os
import signal
import socket
import stat
import sys
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any, NoReturn

from zerolm.common import processes
from zerolm.common.forked import IMPORTS, READY, REQUEST_BYTES, Become, adopt, end_with

TITLE = "zerolm.train.held_imports"
OWN = ("zerolm", "pretrain")


class Held(BaseException):
    """Raised in the holder, so that it leaves every function of the node launcher."""

    def __init__(self, descriptor: int):
        super().__init__(descriptor)
        self.descriptor = descriptor


def fork_holder(environment: MutableMapping[str, str]) -> None:
    """Fork a holder if the supervisor has passed a socket for it, which is closed here.

    Raises:
        Held: in the holder.
    """
    descriptor = environment.pop(IMPORTS, "")
    os.environ.pop(IMPORTS, None)
    if not descriptor.isdecimal() or not _is_socket(int(descriptor)):
        return
    if child := os.fork():  # which ends at once, so that the holder is no child of the launcher
        os.waitpid(child, 0)
        os.close(int(descriptor))
        return
    if os.fork():
        os._exit(0)
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(null, number)
    raise Held(int(descriptor))


def _is_socket(descriptor: int) -> bool:
    try:
        return stat.S_ISSOCK(os.fstat(descriptor).st_mode)
    except OSError:
        return False


def hold(descriptor: int) -> NoReturn:
    """Fork a process for each request until the supervisor has ended.

    Raises:
        Become: in the new process.
    """
    channel = socket.socket(fileno=descriptor)
    own = {name: text for name, text in os.environ.items() if name != processes.SUPERVISOR}
    adopt([sys.executable, TITLE], own)
    files = _files()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the children
    while True:
        with contextlib.suppress(OSError):  # the supervisor has ended: there is no message
            channel.send(READY)
        message, descriptors, *_ = socket.recv_fds(channel, REQUEST_BYTES, 2)
        if not message or files != _files():
            os._exit(0)  # the supervisor has ended, or starts the changed code
        holder = os.getpid()
        if not os.fork():
            end_with(holder)
            channel.close()
            _start(json.loads(message), *descriptors)
        for each in descriptors:
            os.close(each)


def _start(request: Mapping[str, Any], output: int, status: int) -> NoReturn:
    """Fork the requested process, and report its number and its exit code as `Popen` does."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    parent = os.getpid()
    if child := os.fork():
        os.write(status, str(child).encode())
        os.write(status, str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])).encode())
        os._exit(0)
    os.setsid()
    end_with(parent)
    for number in (1, 2):
        os.dup2(output, number)
    os.close(output)
    os.close(status)
    raise Become(request["argv"], request["environment"])


def _files() -> dict[str, tuple[int, int]]:
    """Return {file: time of its last change and size} of this project, and of other packages."""
    found = {}
    for name, module in list(sys.modules.items()):
        path = getattr(module, "__file__", None)
        if path and (name.partition(".")[0] in OWN or "." not in name):
            try:
                state = Path(path).stat()
                found[path] = (state.st_mtime_ns, state.st_size)
            except OSError:
                found[path] = (0, 0)
    return found
