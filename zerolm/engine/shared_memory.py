"""Shared-memory buffers of DeepSpeed's CPU collectives (0.19.8).

On CPUs, each rank of a launch makes DeepSpeed allocate 69 MB in /dev/shm that it never frees, so a
machine would run out of memory after a few hundred launches.
"""

import contextlib
import os
import sysconfig
import time
from pathlib import Path

from zerolm.common import processes

# On GPUs, NCCL needs shared memory. NVIDIA recommends 1 GB per container, here divided by eight
# GPUs: "Troubleshooting, shared memory",
# https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html
BYTES_PER_RANK = 128 << 20
DIRECTORY = Path("/dev/shm")
BUFFER = "deepspeed_allreduce_buffer"  # in deepspeed/ops/csrc/cpu/comm/shm.cpp
STALE_SECONDS = 600


def prepare(local_rank: int) -> None:
    """Prepare shared memory on a CPU before this rank's process group is created.

    The first rank on each host removes stale buffers; the other ranks wait for it before creating
    theirs.
    """
    import deepspeed

    if local_rank == 0:
        remove_stale()
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        # DeepSpeed would try to compile this op and crash; Gloo does the same work without the op.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def release() -> None:
    """Unlink this rank's buffer. Call this after a barrier, when all ranks have mapped the buffer.

    The name is then no longer needed: the kernel frees the buffer when the last process exits,
    even if it is killed.
    """
    address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    name = f"{BUFFER}_{os.getuid()}_{address}_{port}_{os.environ['RANK']}"
    with contextlib.suppress(OSError):  # does not exist with several hosts or on GPUs
        (DIRECTORY / name).unlink()


def remove_stale() -> None:
    """Remove the buffers of this user's ranks that were killed before they called `release`.

    A buffer is stale if it is older than ten minutes and no process has it mapped or open: a rank
    opens its buffer by name in its first second.
    """
    oldest = time.time() - STALE_SECONDS
    stale = set()
    for path in DIRECTORY.glob(f"{BUFFER}_{os.getuid()}_*"):
        with contextlib.suppress(OSError):
            status = path.lstat()
            if status.st_uid == os.getuid() and max(status.st_mtime, status.st_ctime) < oldest:
                stale.add(path)
    for path in stale - processes.files_in_use(stale):
        with contextlib.suppress(OSError):
            path.unlink()
