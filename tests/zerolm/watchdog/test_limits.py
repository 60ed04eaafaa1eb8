"""The limits of a process, each reached for real in a process of its own."""

import re
import subprocess
import sys

import pytest
import torch

from tests.launching import environment
from zerolm.watchdog import limits

# What runs out, how the shell limits it, and code that needs more.
LIMITS = {
    "open files": (
        "ulimit -n 64",
        "kept = [open('/dev/null') for _ in range(99)]",
        "too many open files: 64 are allowed. Raise it: `ulimit -n 4096`",
    ),
    "address space": (
        "ulimit -v 8000000",
        "import torch; torch.empty(1 << 36)",
        "out of memory: ulimit -v allows 7.63 GiB; raise it.",
    ),
    "memory of Python": (
        "ulimit -v 1000000",
        "b'0' * (1 << 36)",
        "out of memory: ulimit -v allows 977 MiB; raise it.",
    ),
    "shared memory": (
        "mount -t tmpfs -o size=64k none /dev/shm",
        "import multiprocessing; open('/dev/shm/x', 'wb', 0).write(bytes(1 << 16)); "
        "multiprocessing.Queue()",
        "/dev/shm: no space left. Make it larger: docker run --shm-size",
    ),
    "inodes": (
        "mount -t tmpfs -o nr_inodes=9 none /mnt",
        "for n in range(99): open(f'/mnt/{n}', 'w')",
        "/mnt/8: no inodes left. Remove files there",
    ),
    "disk space": (
        "mount -t tmpfs -o size=64k none /mnt",
        "import pathlib; pathlib.Path('/mnt/full').write_bytes(bytes(99999))",
        "a file: no space left. Remove files there",
    ),
    "threads": (
        "",
        'raise RuntimeError("can\'t start new thread")',
        "no more processes or threads",
    ),
    "a read-only disk": (
        "mount -t tmpfs -o ro none /mnt",
        "open('/mnt/new', 'w')",
        "/mnt/new: the file system is read-only",
    ),
}
PROGRAM = """
import sys
from zerolm.watchdog import limits
try:
    exec(sys.argv[1])
except BaseException as error:
    print(limits.explain(error))
"""


def run(limit: str, code: str) -> str:
    """Run code under a limit, in a mount namespace of its own; return what is explained."""
    shell = f'{limit or ":"} && exec "$@"'
    command = ["unshare", "--mount", "bash", "-c", shell, "bash", sys.executable, "-c", PROGRAM]
    done = subprocess.run(
        [*command, code], env=environment(), capture_output=True, text=True, timeout=120
    )
    if "unshare: " in done.stderr or "mount: " in done.stderr:
        pytest.skip("needs the right to mount")
    return done.stdout + done.stderr


@pytest.mark.parametrize(("limit", "code", "text"), LIMITS.values(), ids=LIMITS)
def test_the_limit_that_was_reached_is_named_with_its_fix(limit, code, text) -> None:
    assert text in run(limit, code)


def test_a_limit_behind_another_error_is_found_and_other_errors_have_none() -> None:
    error = RuntimeError("a worker failed")
    error.__cause__ = OSError(24, "Too many open files")
    assert "too many open files" in (limits.explain(error) or "")
    assert limits.explain(RuntimeError("shapes differ")) is None
    assert limits.explain(RuntimeError("recv: Resource temporarily unavailable")) is None
    assert limits.explain(FileNotFoundError(2, "No such file", "/x")) is None
    with pytest.raises(FileNotFoundError):
        limits.refusal(FileNotFoundError(2, "No such file", "/x"))


def test_out_of_gpu_memory_names_the_processes_that_hold_it_and_the_settings_that_save_it() -> None:
    held = (
        "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 79.11 GiB "
        "of which 9.00 GiB is free. Process 71 has 60.02 GiB memory in use"
    )
    text = f"{held}. Of the allocated memory 8.00 GiB is allocated by PyTorch, and 1.00 MiB is"
    for error in (torch.OutOfMemoryError(text), torch.OutOfMemoryError(held)):
        assert (limits.explain(error) or "").startswith(f"{held}. Lower --micro_batch_size")
    cublas = "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
    for text, line in (
        ("CUDA error: out of memory\nCUDA kernel errors might be", "CUDA error: out of memory"),
        (f"{cublas}\nmore", cublas),
        (
            "NCCL error in: NCCLUtils.cpp:94, unhandled cuda error, NCCL version 2.28.9\nLast "
            "error:\nCuda failure 2 'out of memory'",
            "Cuda failure 2 'out of memory'",
        ),
    ):
        assert (limits.explain(RuntimeError(text)) or "").startswith(f"{line}. Lower --micro_")


def test_a_failed_compilation_names_the_compiler_that_is_missing_or_the_cache() -> None:
    for text, fix in (
        ("Failed to find C compiler. Please specify via CC", "Install a C compiler and Python's"),
        ("fatal error: Python.h: No such file", "Install a C compiler and Python's headers"),
        ("cannot open shared object", "its cache may be damaged: remove"),
    ):
        error = type("InductorError", (Exception,), {"__module__": "torch._inductor.exc"})(text)
        shown = limits.explain(error) or ""
        assert text in shown and fix in shown and shown.endswith("or train without --compile.")


def test_the_soft_limit_on_files_is_raised_and_too_low_a_hard_one_is_refused() -> None:
    code = (
        "import resource; from zerolm.watchdog import limits; limits.raise_file_limit(); "
        "print(resource.getrlimit(resource.RLIMIT_NOFILE), limits.file_limit_problem(512, False))"
    )
    assert "(4096, 4096) None" in run("ulimit -S -n 256 && ulimit -H -n 4096", code)
    refused = run("ulimit -n 512", code)
    assert "ulimit -n: 512 open files are allowed, but a rank needs" in refused


def test_a_full_disk_under_the_log_ends_nothing(tmp_path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from zerolm.watchdog import limits;"
        "limits.drop_unwritable_output(); print('one'); print('two', file=sys.stderr);"
        "sys.stdout.write('three'); sys.stdout.flush(); Path('done').touch(); os._exit(7)"
    )
    for target, written in (("/dev/full", ""), ("log", "one\ntwo\nthree")):
        shell = f'exec "$0" -u -c "$1" >{target} 2>&1'
        command = ["bash", "-c", shell, sys.executable, code]
        done = subprocess.run(command, cwd=tmp_path, env=environment(), timeout=60)
        assert done.returncode == 7 and (tmp_path / "done").exists()
        (tmp_path / "done").unlink()
        if written:
            assert (tmp_path / target).read_text() == written


def test_a_failed_compilation_names_the_cache_that_may_be_damaged(monkeypatch) -> None:
    from torch._inductor.exc import InductorError

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/some/cache")
    text = limits.explain(InductorError(ImportError("/some/cache/a.so: file too short"), None))
    assert "file too short" in text and "remove /some/cache, or train without" in text
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    text = limits.explain(InductorError(ImportError("a.so: file too short"), None))
    assert re.search(r"remove \S+torchinductor_\w+, or train without", text)
    full = InductorError(OSError(28, "No space left on device", "/some/cache/b"), None)
    assert "no space left" in limits.explain(full)
