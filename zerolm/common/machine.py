"""Inspects this machine and the launch: builds, directories, number of nodes.

Changes no files."""

import contextlib
import ctypes
import errno
import importlib
import os
import platform
import shutil
import socket
import sys
import sysconfig
import tempfile
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from zerolm.common import processes

DEFAULT_HOSTFILE = "/job/hostfile"  # deepspeed/launcher/runner.py, DLTS_HOSTFILE
MAX_COMPILE_WORKERS = 32  # torch/_inductor/config.py, decide_compile_threads

M_MMAP_THRESHOLD, M_TRIM_THRESHOLD = -3, -1  # malloc.h
MMAP_THRESHOLD_BYTES = 1 << 30  # larger allocations are still returned to the system when freed
TRIM_THRESHOLD_BYTES = (1 << 31) - 1  # the maximum of an int


def free_port(wanted: int = 0) -> int:
    """Return a free port: the wanted one if nothing listens on it, otherwise another."""
    with socket.socket() as probe:
        try:
            probe.bind(("", wanted))
        except OSError:
            probe.bind(("", 0))
        return int(probe.getsockname()[1])


def keep_freed_memory() -> bool:
    """Make glibc's malloc keep freed memory, for CPU runs; return whether this succeeded.

    glibc maps each allocation above 32 MiB separately, and the kernel zeroes its pages on first
    touch. For logits and tensors of similar size, mapping and zeroing took a sixth of a step's CPU
    time (docs/log.md). A process that keeps freed memory stays at its peak usage between steps, but
    every step reaches that peak anyway.

    Source: mallopt(3), M_MMAP_THRESHOLD and M_TRIM_THRESHOLD.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    kept = mallopt(M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES) == 1
    return mallopt(M_TRIM_THRESHOLD, TRIM_THRESHOLD_BYTES) == 1 and kept


def running_builds(environment: Mapping[str, str]) -> list[str]:
    """Return the names of operators that a process on this machine is building.

    torch's compilers run in the directory of the operator.
    """
    found = _operator_files(environment, "build.ninja")
    return [each.parent.name for each in found if processes.is_working_directory(each.parent)]


def built_operators(environment: Mapping[str, str]) -> list[Path]:
    """Return the compiled operators that torch finds with these environment variables."""
    return _operator_files(environment, "*.so")


def _operator_files(environment: Mapping[str, str], pattern: str) -> list[Path]:
    cache = environment.get("XDG_CACHE_HOME", f"{environment.get('HOME', '/nowhere')}/.cache")
    root = Path(environment.get("TORCH_EXTENSIONS_DIR", f"{cache}/torch_extensions"))
    return sorted([*root.glob(f"*/{pattern}"), *root.glob(f"*/*/{pattern}")])


def missing_compilers(device_kind: str) -> list[str]:
    """Return what this host lacks for compiling DeepSpeed's operators and torch.compile's code.

    On a GPU, Triton compiles a C module against Python's headers before it launches its first
    kernel. DeepSpeed compiles C++, as does torch.compile on a CPU.

    Source: triton/runtime/build.py, 3.6; torch/_inductor/cpp_builder.py, 2.13.
    """
    has_header = Path(sysconfig.get_path("include"), "Python.h").is_file()
    missing = [] if has_header else ["Python.h (Debian: python3-dev)"]
    if not any(map(shutil.which, filter(None, (os.environ.get("CXX"), "g++", "clang++", "c++")))):
        missing.append("a C++ compiler (Debian: g++)")
    if device_kind != "cpu" and not any(
        map(shutil.which, filter(None, (os.environ.get("CC"), "gcc", "clang")))
    ):
        missing.append("a C compiler (Debian: gcc)")
    return missing


def compile_problem(device_kind: str) -> str | None:
    """Return why torch.compile cannot work on this host, or None if it can."""
    if device_kind != "cpu":
        try:
            importlib.import_module("triton")
        except Exception as error:  # any class: loading a library runs its code
            return f"it needs the package triton on a GPU, which cannot be imported ({error})"
    needed = "a C++ compiler" if device_kind == "cpu" else ("a C compiler", "Python.h")
    missing = [each for each in missing_compilers(device_kind) if each.startswith(needed)]
    return f"it needs {' and '.join(missing)}, which this host lacks" if missing else None


def write_problem(run_dir: str | Path) -> str | None:
    """Return why a directory cannot be created or written, or None if it can.

    Tests this with an anonymous file in the nearest existing directory, and leaves nothing behind.
    """
    path = Path(run_dir).absolute()
    while True:
        try:
            os.lstat(path)  # `Path.exists` hides other errors since Python 3.14
            break
        except (FileNotFoundError, NotADirectoryError):
            path = path.parent
        except OSError as error:  # for example, a name longer than 255 bytes
            return f"cannot be a directory ({error.strerror}). Choose another one."
    if not path.is_dir():
        return f"{path} is not a directory. Remove it, or choose another directory."
    try:
        with tempfile.TemporaryFile(dir=path) as file:
            file.write(b"\0")
            file.flush()
    except OSError as error:
        reason = errno.errorcode.get(error.errno or 0, "") + f": {error.strerror}"
        return f"cannot write in {path} ({reason}). Make it writable, or choose another directory."
    return None


def free_bytes(run_dir: str | Path) -> int | None:
    """Return the number of free bytes on a directory's file system, or None if it is unknown."""
    try:
        return shutil.disk_usage(_existing(run_dir)).free
    except OSError:
        return None


def same_file_system(one: str | Path, other: str | Path) -> bool:
    """Return whether two directories, which may not exist yet, are on the same file system."""
    return _existing(one).stat().st_dev == _existing(other).stat().st_dev


def _existing(path: str | Path) -> Path:
    """Return a path, or the nearest directory above it that exists."""
    path = Path(path).absolute()
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def num_nodes_problem(options: Mapping[str, str], environment: Mapping[str, str]) -> str | None:
    """Return a message if `deepspeed --num_nodes N` silently started fewer than N nodes, or None.

    The runner uses the first N hosts of its hostfile, or all hosts if there are fewer.

    Args:
        options: the runner's options.
        environment: variables set by the node launcher (`CROSS_SIZE`: nodes, `WORLD_SIZE`: ranks).
    """
    nodes, requested = num_nodes(environment), options.get("--num_nodes", "")
    if nodes is None or not requested.isdigit() or int(requested) <= nodes:
        return None
    return (
        f"{options.get('--hostfile', DEFAULT_HOSTFILE)}: --num_nodes: {requested}, but the "
        f"hostfile has {nodes} node(s). Add the missing hosts to it, or use --num_nodes {nodes}."
    )


def ranks_of_host(environment: Mapping[str, str]) -> int:
    """Return the number of ranks on this host, or 1 if no launcher has set a variable for it.

    torchrun sets `LOCAL_WORLD_SIZE`; DeepSpeed's launcher sets `LOCAL_SIZE`.
    """
    ranks = environment.get("LOCAL_WORLD_SIZE") or environment.get("LOCAL_SIZE", "")
    return max(1, int(ranks)) if ranks.isdigit() else 1


def cores_of_rank(environment: Mapping[str, str]) -> int:
    """Return the number of cores for this rank: an equal share, or all cores of its `srun` task."""
    cores = len(os.sched_getaffinity(0))
    is_task = environment.get("SLURM_NTASKS", "1") == environment.get("WORLD_SIZE")
    if is_task and environment.get("SLURM_CPUS_PER_TASK") == str(cores):
        return cores
    return max(1, cores // ranks_of_host(environment))


def keep_operators(environment: MutableMapping[str, str]) -> None:
    """Let torch build DeepSpeed's operators inside this virtual environment.

    Call this before torch is imported. By default, torch uses one directory for all of a user's
    environments, and they would keep rebuilding each other's operators. `TORCH_EXTENSIONS_DIR` is
    kept if it is set, and torch's default is used outside of virtual environments. The
    environment's own ninja is put first on the PATH, since it is missing from the PATH of ssh
    shells and another version of ninja would rebuild every operator at each start.
    """
    programs = Path(sys.executable).parent
    found = shutil.which("ninja", path=environment.get("PATH"))
    if (programs / "ninja").exists() and found != str(programs / "ninja"):
        environment["PATH"] = f"{programs}{os.pathsep}{environment.get('PATH', os.defpath)}"
    directory = Path(sys.prefix, "torch_extensions")
    if sys.prefix != sys.base_prefix and os.access(directory.parent, os.W_OK):
        environment.setdefault("TORCH_EXTENSIONS_DIR", str(directory))


def oom_kills() -> int:
    """Return how many processes the kernel has killed for lack of memory since this host booted."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


def oom_note(kills: int) -> str:
    """Return text with the number of out-of-memory kills, to explain why a process was killed."""
    return (
        f"the out-of-memory killer has killed {kills} process{'es' * (kills > 1)} of this host "
        "since the start"
    )


def share_cores(environment: MutableMapping[str, str]) -> None:
    """Divide the cores among this host's ranks, for OpenMP and torch's compile workers.

    Call this before torch is imported. Otherwise each rank would use all cores for CPUAdam, and
    start up to 32 compile workers. Variables that are already set are kept.
    """
    if ranks_of_host(environment) == 1:
        return
    environment.setdefault("OMP_NUM_THREADS", str(cores_of_rank(environment)))
    environment.setdefault(
        "TORCHINDUCTOR_COMPILE_THREADS", str(min(MAX_COMPILE_WORKERS, cores_of_rank(environment)))
    )


def num_nodes(environment: Mapping[str, str]) -> int | None:
    """Return the number of started nodes, or None if no launcher started this process."""
    if environment.get("CROSS_SIZE", "").isdigit():
        return int(environment["CROSS_SIZE"])
    local = environment.get("LOCAL_WORLD_SIZE") or environment.get("LOCAL_SIZE", "")
    if environment.get("WORLD_SIZE", "").isdigit() and local.isdigit():
        return int(environment["WORLD_SIZE"]) // ranks_of_host(environment)
    return None


def num_hosts(environment: Mapping[str, str]) -> int:
    """Return the number of hosts whose ranks must rendezvous; 1 if torchrun's agents do this."""
    if environment.get("TORCHELASTIC_USE_AGENT_STORE", "False") == "True":
        return 1
    return (num_nodes(environment) or 1) if "MASTER_ADDR" in environment else 1
