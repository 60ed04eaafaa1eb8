"""Processes forked from one that has imported what they need, in place of new ones.

`Forked` stands in for `subprocess.Popen` in DeepSpeed's launchers. In the new process it raises
`Become`, so that the process leaves every function of its parent before it becomes another program.
Reads Linux's /proc. Standard library only.
"""

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import IO, Any, NamedTuple

from zerolm.common.process_tree import end_with_parent
from zerolm.common.processes import PROC

IMPORTS = "ZEROLM_IMPORTS"  # variable with the socket for a process that holds a run's imports
READY, REQUEST_BYTES = b"ready", 1 << 20
FIRST = ("ZEROLM_", "RANK=", "LOCAL_RANK=")  # never left out of an environment that does not fit


class Imports(NamedTuple):
    """The environment with which a process has imported, and the variables that this has set."""

    environment: dict[str, str]
    added: dict[str, str]


imports: Imports | None = None  # what ranks import, if this process has imported it


class Become(BaseException):
    """Raised in a forked process, with the arguments and environment that it is to have."""

    def __init__(self, argv: Sequence[str], environment: Mapping[str, str]):
        super().__init__(argv)
        self.argv, self.environment = list(argv), dict(environment)


class Forked:
    """A process forked from this one.

    Args:
        ends_with_parent: whether the process is killed if this one ends.

    Raises:
        Become: in the new process.
    """

    def __init__(
        self,
        args: Sequence[str],
        env: Mapping[str, str],
        stdout: IO[Any] | None = None,
        stderr: IO[Any] | None = None,
        ends_with_parent: bool = False,
    ):
        self.args, self.returncode = args, None
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            if ends_with_parent:
                end_with(parent)
            for number, file in ((1, stdout), (2, stderr)):
                if file is not None:
                    os.dup2(file.fileno(), number)
            raise Become(args, env)

    returncode: int | None

    def poll(self) -> int | None:
        return self._collect(os.WNOHANG)

    def wait(self) -> int | None:
        return self._collect(0)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def _collect(self, options: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode


def touched() -> str | None:
    """Return what of this process a forked one could not use, or None."""
    tasks = (PROC / "self" / "task").iterdir()
    names = [(task / "comm").read_text().strip() for task in tasks]
    # pandas 2 imports pyarrow, whose jemalloc makes its own threads safe to fork.
    if len(names) - names.count("jemalloc_bg_thd") > 1:
        return f"the imports have started threads: {', '.join(names)}"
    torch = sys.modules["torch"]
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return "the imports have created a process group"
    files = (PROC / "self" / "fd").iterdir()
    with contextlib.suppress(FileNotFoundError):  # the directory that is read here
        if any(str(file.readlink()).startswith("/dev/nvidia-uvm") for file in files):
            return "the imports have initialised CUDA"
    return None


def end_with(parent: int) -> None:
    """Let this forked process be killed when its parent ends, also if that has happened."""
    end_with_parent()
    if os.getppid() != parent:
        os._exit(1)


def adopt(argv: Sequence[str], environment: Mapping[str, str]) -> None:
    """Give this forked process its arguments and environment, also as others see it in /proc.

    The kernel shows what is in the memory where it has put both when the process was started, so
    what does not fit there is left out of /proc: the longest variables, and the last arguments.
    Zeros follow what is shorter.
    """
    os.environ.clear()  # so that no library reads that memory any more
    os.environ.update(environment)
    if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # as in every new process
    stat = (PROC / "self" / "stat").read_text().rpartition(")")[2].split()
    arguments, end, variables, last = map(int, stat[45:49])
    entries = [f"{name}={value}" for name, value in environment.items()]
    _write(arguments, end, argv)
    _write(
        variables, last, sorted(entries, key=lambda each: (not each.startswith(FIRST), len(each)))
    )


def _write(start: int, end: int, texts: Sequence[str]) -> None:
    """Fill memory with zero-terminated strings, as many as fit."""
    content = b""
    for text in texts:
        entry = os.fsencode(text) + b"\0"
        if len(content) + len(entry) <= end - start:
            content += entry
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, content, len(content))
