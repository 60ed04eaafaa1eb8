"""The process of a spare: it imports the modules of a rank once, then forks the next launch.

Imports are most of a restart: DeepSpeed's runner, its node launcher and each rank import torch. The
supervisor starts one spare while the run trains, and asks it for each later launch. What it forks
runs DeepSpeed's own launchers and pretrain.py: only the import of a library is not repeated. Each
process gets the arguments, environment, parent and output that `deepspeed` would have given it, in
/proc too. The spare never has a second thread, a GPU or a process group. Standard library only, as
what this module imports is not reloaded in the ranks. It is run by launch/supervise/spare.py.
"""

import contextlib
import ctypes
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

RUNNER, NODE_LAUNCHER = "deepspeed.launcher.runner", "deepspeed.launcher.launch"
OWN = ("zerolm", "launch", "pretrain")  # what has state, or may be edited: imported by each rank
PR_SET_PDEATHSIG = 1
ADOPTION_SECONDS = 5.0
POLL_SECONDS = 0.002
# Fields of /proc/PID/stat after the name: where the arguments and the environment begin and end.
ARGUMENTS, ENVIRONMENT = 45, 47
NO_RESTS = b"no rests"  # a message, as long as the size that begins a request
PADDING_BYTES = 1 << 15  # of arguments, so that those of a rank fit in their place

Job = Callable[[], Any]


class Become(BaseException):
    """Unwinds a forked process to the top, where it runs its job like a new process."""

    def __init__(self, job: Job):
        super().__init__()
        self.job = job


class Forked:
    """A child process that was forked: the part of `subprocess.Popen` that is used of it."""

    def __init__(self, pid: int, stdout: Any = None):
        self.pid, self.stdout = pid, stdout
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            with contextlib.suppress(ChildProcessError):
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(["deepspeed"], timeout or 0.0)
            time.sleep(0.05)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


# ---- The spare itself


def main(argv: Sequence[str]) -> Job:
    """Import modules and serve the supervisor; return the job of a process that was forked.

    Args:
        argv: descriptor of the socket, file with the names of the modules, padding.
    """
    channel, oom_score = socket.socket(fileno=int(argv[0])), _read_oom_score()
    _write_oom_score(1000)  # without memory the kernel kills this process first
    before = dict(os.environ)
    _import(json.loads(Path(argv[1]).read_text()), channel)
    set_by_imports = {key: text for key, text in os.environ.items() if before.get(key) != text}
    files = _file_states()
    if problem := _unsafe():
        _reply(channel, declined=problem)
        sys.exit(1)
    _reply(channel, ready=True)
    try:
        while (request := _receive(channel)) is not None:
            message, output = request
            message["environment"] |= set_by_imports
            if changed := [path for path, state in files.items() if _state(path) != state]:
                _reply(channel, declined=f"{changed[0]} has changed")
                sys.exit(1)
            intermediate = os.fork()
            if not intermediate:
                _fork_launch(channel, message, output, oom_score)
            os.close(output)
            os.waitpid(intermediate, 0)
    except Become as become:
        return become.job
    sys.exit(0)


def _import(names: Sequence[str], channel: socket.socket) -> None:
    """Import modules, resting as long as it takes, for the sake of the run that is training.

    Without rests as soon as the supervisor has sent something: it waits.
    """
    for name in [RUNNER, NODE_LAUNCHER, *names]:
        if name.partition(".")[0] in OWN:
            continue
        start = time.monotonic()
        with contextlib.suppress(Exception):  # names that other modules have added to sys.modules
            importlib.import_module(name)
        select.select([channel], [], [], min(time.monotonic() - start, 1.0))


def _unsafe() -> str | None:
    """Return why this process must not be forked, None if it may be."""
    probe = os.fork()  # OpenBLAS ends its threads before a fork
    if not probe:
        mark, torch = {"ZEROLM_PROBE": "1"}, sys.modules.get("torch")
        _take_on(sys.argv, {**mark, **os.environ}, {})
        shown = Path("/proc/self/environ").read_bytes().startswith(b"ZEROLM_PROBE=1\0")
        os._exit(2 * (not shown) + (torch is not None and torch.cuda._is_in_bad_fork()))
    if code := os.waitstatus_to_exitcode(os.waitpid(probe, 0)[1]):
        return "the imports have initialised CUDA" if code == 1 else "/proc cannot be changed"
    threads = len(list(Path("/proc/self/task").iterdir()))
    return f"the imports have started {threads - 1} thread(s)" if threads > 1 else None


def _file_states() -> dict[str, tuple[int, int] | None]:
    """Return the size and time of each file that was imported."""
    paths = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    return {path: _state(path) for path in paths if isinstance(path, str)}


def _state(path: str) -> tuple[int, int] | None:
    try:
        status = Path(path).stat()
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns


# ---- Messages


def _reply(channel: socket.socket, **message: Any) -> None:
    channel.sendall(json.dumps(message).encode() + b"\n")


def _receive(channel: socket.socket) -> tuple[dict[str, Any], int] | None:
    """Return the next request and the descriptor for the output; None if the supervisor ended."""
    size = NO_RESTS
    while size == NO_RESTS:
        size, descriptors, *_ = socket.recv_fds(channel, 8, 1)
    if not size:
        return None
    content = b""
    while len(content) < int(size, 16):
        content += channel.recv(int(size, 16) - len(content))
    return json.loads(content), descriptors[0]


# ---- What is forked


def _fork_launch(
    channel: socket.socket, message: dict[str, Any], output: int, oom_score: str
) -> None:
    """Fork a launch and exit, so that the supervisor adopts it. Raises `Become` in the launch.

    Runs in a child of the spare, so that neither needs the other: the launch lives on without the
    spare, and ends with the supervisor.
    """
    if os.fork():
        os._exit(0)
    deadline = time.monotonic() + ADOPTION_SECONDS
    while os.getppid() != message["supervisor"]:
        if time.monotonic() > deadline:
            os._exit(1)
        time.sleep(POLL_SECONDS)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != message["supervisor"]:
        os._exit(1)
    os.setsid()
    _write_oom_score(oom_score)
    command, environment = message["command"], message["environment"]
    _take_on(command, environment, {1: output, 2: output})
    os.close(output)
    _reply(channel, pid=os.getpid())
    channel.close()
    arguments = message["arguments"]
    raise Become(lambda: _run_launcher(RUNNER, [command[0], *arguments]))


def _take_on(
    command: Sequence[str], environment: Mapping[str, str], streams: Mapping[int, int]
) -> None:
    """Give this process a command line, an environment, and output descriptors."""
    for target, descriptor in streams.items():
        os.dup2(descriptor, target)
    os.environ.clear()
    os.environ.update(environment)
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    # The marks first: they must not be cut off.
    ordered = sorted(environment.items(), key=lambda item: not item[0].startswith("ZEROLM_"))
    _overwrite(fields, ARGUMENTS, [argument.encode() for argument in command])
    _overwrite(fields, ENVIRONMENT, [os.fsencode(f"{name}={value}") for name, value in ordered])


def _overwrite(fields: Sequence[str], index: int, entries: Sequence[bytes]) -> None:
    """Replace the memory that the kernel shows as this process's arguments or environment.

    No variable of C's `environ` is left in it, since `os.environ` was filled anew.
    """
    start, end = int(fields[index]), int(fields[index + 1])
    size = end - start
    if not size:
        return  # hidden by the kernel, which `_unsafe` notices
    content = b"".join(entry + b"\0" for entry in entries)[: size - 1]
    ctypes.memmove(start, content.ljust(size, b"\0"), size)


class _Subprocess:
    """The module `subprocess` in DeepSpeed's launchers, where a new Python is a fork of this."""

    def __getattr__(self, name: str) -> Any:
        return getattr(subprocess, name)

    @staticmethod
    def Popen(command: Sequence[str], env: Mapping[str, str] | None = None, **options: Any) -> Any:
        job = _job(command)
        if job is None:
            return subprocess.Popen(command, env=env, **options)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        pid = os.fork()
        if pid:
            return Forked(pid)
        numbers = {"stdout": 1, "stderr": 2}
        streams = {numbers[name]: file.fileno() for name, file in options.items()}
        _take_on(command, os.environ.copy() if env is None else dict(env), streams)
        raise Become(job)


def _job(command: Sequence[str]) -> Job | None:
    """Return what does the same as a command of DeepSpeed's launchers, None if nothing does."""
    if list(command[:2]) != [sys.executable, "-u"]:
        return None
    if list(command[2:4]) == ["-m", NODE_LAUNCHER]:
        return lambda: _run_launcher(NODE_LAUNCHER, command[3:])
    if command[2].endswith(".py"):
        return lambda: _run_script(command[2:])
    return None


def _run_launcher(name: str, argv: Sequence[str]) -> None:
    module = importlib.import_module(name)
    module.subprocess = _Subprocess()  # type: ignore[attr-defined]
    sys.argv = list(argv)
    try:
        module.main()
    except SystemExit as end:
        if not isinstance(end.code, int):
            raise
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(end.code & 0xFF)  # the modules of a rank take 0.7 s to be torn down


def _run_script(argv: Sequence[str]) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] in OWN]:
        del sys.modules[name]
    sys.argv, sys.path[0] = list(argv), str(Path(argv[0]).resolve().parent)
    runpy.run_path(argv[0], run_name="__main__")


# ---- Memory


def _read_oom_score() -> str:
    with contextlib.suppress(OSError):
        return Path("/proc/self/oom_score_adj").read_text()
    return "0"


def _write_oom_score(score: object) -> None:
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(score))


def run(argv: Sequence[str]) -> NoReturn:
    """Run the spare; in a process that it has forked, the job of that."""
    job = main(argv)
    while True:
        try:
            job()
        except Become as become:
            job = become.job
        else:
            sys.exit(0)


if __name__ == "__main__":
    run(sys.argv[1:])
