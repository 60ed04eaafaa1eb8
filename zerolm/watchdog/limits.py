"""Limits on open files, memory, processes and disk space, for this process and its machine.

`explain` names the limit behind an error; Python and torch report only the symptom.
"""

import errno
import io
import os
import re
import resource
import shutil
import sys
from pathlib import Path
from typing import Any

from zerolm.common.errors import ConfigError, reason
from zerolm.common.files import barrier
from zerolm.common.values import shown_bytes

MAX_FILES = 1 << 16
# With 2 ranks on a CPU, rank 0 has 41 open files (8 of them sockets), and rank 1 has 27 (5 of them
# sockets). Gloo connects all pairs of ranks; NCCL does not, but each rank connects to rank 0's
# store.
FIXED_FILES, FILES_PER_CPU, FILES_PER_GPU = 48, 4, 1
SHARED_MEMORY = Path("/dev/shm")
FULL_BYTES = 1 << 20  # a file system with less free space counts as full
COMPILERS = ("torch._inductor.exc", "torch._dynamo.exc")  # modules of torch.compile's exceptions

_AGAIN = "Run the same command again once it works: the run resumes."
LARGER_SHARED_MEMORY = (
    "Make it larger: docker run --shm-size, a memory emptyDir in Kubernetes, or mount -o "
    "remount,size=; or delete stale files in it."
)
_TEXTS = {  # {error: cause and fix}
    errno.EMFILE: "too many open files: {files} are allowed. {raise_files}",
    errno.ENFILE: "too many open files on this host. Raise sysctl fs.file-max.",
    errno.ENOMEM: "out of memory{address_space}. Lower --micro_batch_size or --num_workers, use "
    "more hosts, or end other processes; a container or job may have its own limit.",
    errno.EAGAIN: "no more processes or threads{processes}. Raise `ulimit -u`, or the container's "
    "PID limit; or lower --num_workers and OMP_NUM_THREADS.",
    errno.EACCES: "{path}: this user may not read or write it. Change its permissions, or use "
    "another path.",
    errno.ENOSPC: "{path}: no {what} left. Remove files there, and run the same command again.",
    errno.EDQUOT: "{path}: the disk quota is used up. Remove files, or request a larger quota.",
    errno.EROFS: "{path}: the file system is read-only, possibly after an error that dmesg "
    f"shows. {_AGAIN}",
    errno.ESTALE: f"{{path}}: the file server has lost this file. {_AGAIN}",
    errno.EIO: f"{{path}}: its disk or file server fails (input/output error). {_AGAIN}",
}
_PHRASES = {  # phrases in torch and Python errors that have no error number
    "can't allocate memory": errno.ENOMEM,
    "can't start new thread": errno.EAGAIN,
    "insufficient shared memory": errno.ENOSPC,
} | {
    os.strerror(number): number
    for number in _TEXTS
    if number != errno.EAGAIN  # socket timeouts have the same text
}
# Messages from torch's allocator, the CUDA runtime (alone or in an NCCL error), and cuBLAS.
_OUT_OF_GPU_MEMORY = re.compile(
    r"(?i:.*(cuda|hip|xpu|npu).*out of memory.*)"
    r"|.*CUBLAS_STATUS_ALLOC_FAILED.*|.*Failed to CUDA calloc.*"
)


class _LossyFile(io.FileIO):
    """A file that discards data that cannot be written."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data) or 0
        except OSError:
            return len(data)


def drop_unwritable_output() -> None:
    """Make stdout and stderr discard output if the disk is full or the terminal is closed.

    Otherwise, a print call in a library would raise an error and end the run; DeepSpeed prints at
    each start.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        file = io.BufferedWriter(_LossyFile(stream.fileno(), "w", closefd=False))
        text = io.TextIOWrapper(file, stream.encoding, "backslashreplace", line_buffering=True)
        setattr(sys, name, text)


def raise_file_limit() -> None:
    """Raise the soft limit on open files, usually 1,024, to the hard limit or `MAX_FILES`.

    The soft limit is low for the sake of programs that use select(2). A rank has connections to
    other ranks, and two memory maps for each open shard.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def file_limit_problem(world_size: int, is_gpu: bool) -> str | None:
    """Return a problem if the limit on open files is too low for a rank of the run, else None."""
    limit = _limit(resource.RLIMIT_NOFILE)
    required = FIXED_FILES + (FILES_PER_GPU if is_gpu else FILES_PER_CPU) * world_size
    if limit is None or limit >= required:
        return None
    return (
        f"environment: ulimit -n: {limit} open files are allowed, but a rank needs {required}. "
        f"{_raise_files(max(4096, required))}"
    )


def explain(error: BaseException | None) -> str | None:
    """Return which limit of the machine caused an error and how to fix it; None if unknown."""
    while error is not None:
        text = str(error)
        if found := _OUT_OF_GPU_MEMORY.search(text):
            # torch's message contains the requested size and the processes that use the memory.
            cause = found[0].partition(" Of the allocated memory")[0].rstrip(".")
            notes = "".join(f". {note}" for note in getattr(error, "__notes__", ()))
            return (
                f"{cause}{notes}. Lower --micro_batch_size, or add --gradient_checkpointing: the "
                f"loss curve stays the same. `zerolm plan` shows what uses the memory. If another "
                f"process holds it, end that process."
            )
        number = _number(error)
        if number is not None:
            return _cause(number, _path(error))
        if type(error).__module__ in COMPILERS:
            from torch._inductor.runtime.cache_dir_utils import cache_dir

            inner = getattr(error, "inner_exception", error)
            line = reason(str(inner).partition("\n")[0])
            fix = f"If this happens again, its cache may be damaged: remove {cache_dir()}"
            if "C compiler" in str(inner) or "Python.h" in str(inner):  # as Triton words it
                fix = "Install a C compiler and Python's headers (Debian: gcc, python3-dev)"
            return f"--compile: {type(inner).__name__}: {line}. {fix}, or train without --compile."
        error = error.__cause__
    return None


def bus_error() -> str:
    """Return a likely cause and fix for a SIGBUS if no shard has been shortened."""
    free = shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else 0
    return (
        f"a memory-mapped file lost its data: no shard is shorter than its manifest states; "
        f"{SHARED_MEMORY} may have been full ({shown_bytes(free)} are free now). "
        f"{LARGER_SHARED_MEMORY}"
    )


def refusal(error: ConfigError | OSError) -> ConfigError:
    """Convert a start-up error to a ConfigError; raise the error if its cause is unknown."""
    if isinstance(error, ConfigError):
        return error
    cause = explain(error)
    if cause is None:
        raise error
    return ConfigError(cause)


def _number(error: BaseException) -> int | None:
    if isinstance(error, MemoryError):
        return errno.ENOMEM
    if isinstance(error, OSError):
        return error.errno if error.errno in _TEXTS else None
    text = str(error) if isinstance(error, RuntimeError) else ""
    return next((number for phrase, number in _PHRASES.items() if phrase in text), None)


def _path(error: BaseException) -> Path | None:
    if isinstance(error, OSError):
        return Path(os.fsdecode(error.filename)) if error.filename is not None else None
    found = re.search(r"(?:file|open) <?(/[^\s<>]+)", str(error))
    return Path(found[1]) if found else None


def _cause(number: int, path: Path | None) -> str:
    """Return the cause and fix for a system error.

    Args:
        number: error number, a key of `_TEXTS`.
        path: file that the error refers to, if known.
    """
    full = SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free < FULL_BYTES
    if number == errno.ENOSPC and (SHARED_MEMORY in path.parents if path else full):
        return f"{SHARED_MEMORY}: no space left. {LARGER_SHARED_MEMORY}"
    space, processes = _limit(resource.RLIMIT_AS), _limit(resource.RLIMIT_NPROC)
    return _TEXTS[number].format(
        path=barrier(path) if path and number == errno.EACCES else path or "a file",
        what="inodes" if path and _no_inodes(path) else "space",
        files=_limit(resource.RLIMIT_NOFILE),
        raise_files=_raise_files(4096),
        address_space=f": ulimit -v allows {shown_bytes(space)}; raise it" if space else "",
        processes=f": ulimit -u allows this user {processes}" if processes else "",
    )


def _no_inodes(path: Path) -> bool:
    try:
        file_system = os.statvfs(next(place for place in (path, *path.parents) if place.exists()))
    except OSError:
        return False
    return file_system.f_files > 0 and file_system.f_favail == 0


def _limit(which: int) -> int | None:
    soft = resource.getrlimit(which)[0]
    return None if soft == resource.RLIM_INFINITY else soft


def _raise_files(number: int) -> str:
    return (
        f"Raise it: `ulimit -n {number}`, nofile in /etc/security/limits.conf, LimitNOFILE= of a "
        f"service, or docker run --ulimit nofile={number}."
    )
