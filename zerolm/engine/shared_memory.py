"""The buffers of DeepSpeed's CPU collectives in shared memory (0.19.8).

It allocates 69 MB in /dev/shm per rank and launch on a CPU and never removes them, so a machine
would run out of memory after some hundred launches.
"""

import contextlib
import os
import sysconfig
import time
from pathlib import Path

from zerolm.common import processes

# On a GPU it is NCCL that needs some. NVIDIA recommends 1 GB per container, here for eight GPUs:
# "Troubleshooting, shared memory",
# https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html
BYTES_PER_RANK = 128 << 20
DIRECTORY = Path("/dev/shm")
BUFFER = "deepspeed_allreduce_buffer"  # in deepspeed/ops/csrc/cpu/comm/shm.cpp
STALE_SECONDS = 600


def prepare(local_rank: int) -> None:
    """Prepare the process group of a rank on a CPU, before it exists.

    The first rank of each host removes stale buffers; the others create their own after that.
    """
    import deepspeed

    if local_rank == 0:
        remove_stale()
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        # DeepSpeed would try to compile this op and crash; without it Gloo does the same work.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def release() -> None:
    """Unlink the buffer of this rank. Call after a barrier, when all ranks have mapped it.

    Its name is not needed then: the kernel frees it when the last process exits, even if it is
    killed.
    """
    address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    name = f"{BUFFER}_{os.getuid()}_{address}_{port}_{os.environ['RANK']}"
    with contextlib.suppress(OSError):  # does not exist with several hosts or on GPUs
        (DIRECTORY / name).unlink()


def remove_stale() -> None:
    """Remove buffers of this user's ranks that were killed before `release`.

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
