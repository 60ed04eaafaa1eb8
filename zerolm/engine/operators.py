"""DeepSpeed's operators: which are installed or can be built, and a lock for their builds.

torch builds an operator on first use, in a directory that all ranks of a host share. Before torch
2.15 its lock is a file that a killed build leaves behind, and for which every later start waits
silently and forever.
"""

import inspect
import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

from zerolm.common import processes
from zerolm.common.locks import FileLock, LockTaken
from zerolm.common.machine import built_operators
from zerolm.engine import replaced

POLL_SECONDS = 0.2
COMMUNICATION, OPTIMIZER = "ShareMemCommBuilder", "CPUAdamBuilder"
LOCK = "zerolm.lock"
TORCH_LOCK = "lock"  # its mere existence stops torch before 2.15
Say = Callable[[str], object]
_listeners: list[Say] = []  # the one to tell of builds


def installed() -> set[str]:
    """Return the names of the operators that were compiled when DeepSpeed was installed."""
    from deepspeed.git_version_info import installed_ops

    return {name for name, is_installed in installed_ops.items() if is_installed}


def has_asynchronous_io() -> bool:
    """Return whether DeepSpeed's async_io operator is installed or can be built."""
    from deepspeed.accelerator import get_accelerator

    builder = get_accelerator().create_op_builder("AsyncIOBuilder")
    return builder is not None and builder.is_compatible(verbose=False)


def load_built(builders: Iterable[str], environment: Mapping[str, str]) -> None:
    """Load the operators that are built, on a CPU, so that forked ranks need no seconds for them.

    Beside a lock of torch before 2.15, which a killed build leaves, the ranks load an operator:
    they remove the lock.

    Args:
        builders: names of DeepSpeed's builders.
        environment: has the directory of builds.
    """
    from deepspeed.accelerator import get_accelerator

    if get_accelerator().device_name() != "cpu":
        return
    built = {path.stem: path for path in built_operators(environment)}
    for each in builders:
        builder = get_accelerator().create_op_builder(each)
        file = built.get(builder.name)
        if builder.name in installed() or (file and not file.with_name(TORCH_LOCK).exists()):
            builder.load()


def guard_builds(say: Say) -> None:
    """Make every build by torch in this process hold a lock that ends with this process.

    Args:
        say: called with a line when an operator is compiled or waited for; it replaces that of an
            earlier call, as a forked rank replaces the node launcher's.
    """
    from torch.utils import cpp_extension as torch_builds

    load, run_ninja = torch_builds._jit_compile, torch_builds._run_ninja_build
    _listeners[:] = [say]
    if hasattr(load, "__wrapped__"):
        return
    signature = inspect.signature(load)

    @wraps(load)
    def guarded_load(*arguments: Any, **options: Any) -> Any:
        given = signature.bind(*arguments, **options).arguments
        with _exclusive(Path(given["build_directory"]), given["name"]):
            return load(*arguments, **options)

    @wraps(run_ninja)
    def announced_ninja(build_directory: str, *arguments: Any, **options: Any) -> None:
        plan = subprocess.run(["ninja", "-n"], cwd=build_directory, capture_output=True, text=True)
        if "no work to do" not in plan.stdout:
            name = Path(build_directory).name
            _say(f"compiling {name}: takes minutes, once per environment")
        run_ninja(build_directory, *arguments, **options)

    replaced.install(torch_builds, "_jit_compile", guarded_load)
    replaced.install(torch_builds, "_run_ninja_build", announced_ninja)


def _say(line: str) -> None:
    for listener in _listeners:
        listener(line)


@contextmanager
def _exclusive(directory: Path, name: str) -> Iterator[None]:
    """Hold the lock of an operator's directory, with no compiler at work in it.

    The compilers of a killed process end some time after it. Then torch's own lock is stale, and
    is removed.
    """
    lock, told = None, False
    owner = f"process {os.getpid()} on {socket.gethostname()}"
    while True:
        other = "another process"  # without this lock, or the compiler of one that was killed
        try:
            lock = lock or FileLock(directory / LOCK, owner=owner)
            found = [directory.resolve() / TORCH_LOCK] if (directory / TORCH_LOCK).exists() else []
            if not processes.files_in_use(found) and not processes.is_working_directory(directory):
                break
        except LockTaken as error:
            other = error.owner or other
        if not told:
            _say(f"waiting for {other} to compile {name}: {directory}")
        told = True
        time.sleep(POLL_SECONDS)
    with lock:
        if lock.unsupported is None:
            (directory / TORCH_LOCK).unlink(missing_ok=True)
        yield
