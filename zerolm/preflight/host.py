"""What a run takes of a host beside its devices: room for checkpoints, shared memory, a port.

Each is a fact, and the one line that says what is wrong with it. `preflight` asks on every start,
`python -m launch doctor` on every host. Nothing is changed.
"""

import errno
import shutil
import socket
from pathlib import Path

from zerolm.machine import free_bytes
from zerolm.values import shown_bytes

SHARED_MEMORY = Path("/dev/shm")
# DeepSpeed 0.19.8's collectives of one CPU rank take 69 MB there (measured: zerolm/distributed.py).
# For GPUs NVIDIA asks for 1 GB in a container, here for eight of them: "Troubleshooting, shared
# memory", https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html
SHARED_BYTES_PER_RANK = 128 << 20


def checkpoint_room(run_dir: str | Path, checkpoint_bytes: int, keep: int) -> tuple[int, int]:
    """Return (free bytes, bytes that the checkpoints to come need) of a run directory's disk.

    One more than are kept, since the oldest goes when the newest is whole; those on disk have
    theirs already. Free is -1 where the file system does not say.
    """
    free = free_bytes(run_dir)
    there = len(list(Path(run_dir, "checkpoints").glob("step-*")))
    wanted = max(1, keep + 1 - there) * checkpoint_bytes
    return (-1 if free is None else free), wanted


def shared_memory() -> tuple[int, int] | None:
    """Return (free, in all) bytes of the shared memory of this host or container; None: no such."""
    try:
        usage = shutil.disk_usage(SHARED_MEMORY)
    except OSError:
        return None
    return usage.free, usage.total


def shared_memory_problem(free: int, num_ranks: int) -> str | None:
    """Say why so many ranks of one host would run out of it, None if they would not."""
    wanted = num_ranks * SHARED_BYTES_PER_RANK
    if free >= wanted:
        return None
    return (
        f"{SHARED_MEMORY}: {shown_bytes(free)} free, {num_ranks} rank(s) need about "
        f"{shown_bytes(wanted)}. Make it larger: docker run --shm-size, a memory emptyDir in "
        f"Kubernetes, or mount -o remount,size=; or remove what is left over in it."
    )


def port_problem(port: int) -> str | None:
    """Say why rank 0 could not listen on a port of this host, None if it could."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as torch's store does
        try:
            probe.bind(("", port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                return f"port {port}: {error.strerror}. Choose another: --master_port."
        else:
            return None
    who = _listener(port)
    return (
        f"port {port}: in use{f' by {who}' if who else ''}. End that, or choose another one: "
        f"deepspeed --master_port."
    )


def _listener(port: int) -> str | None:
    """Return who listens on a port, as far as this user may see: `process 4242 (python)`."""
    inodes = set()
    for table in ("tcp", "tcp6"):
        try:
            lines = Path("/proc/net", table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if int(fields[1].rpartition(":")[2], 16) == port and fields[3] == "0A":  # listening
                inodes.add(f"socket:[{fields[9]}]")
    if not inodes:
        return None
    for descriptors in Path("/proc").glob("[0-9]*/fd"):
        try:
            if any(str(entry.readlink()) in inodes for entry in descriptors.iterdir()):
                name = (descriptors.parent / "comm").read_text().strip()
                return f"process {descriptors.parent.name} ({name})"
        except OSError:  # it has ended, or is another user's
            continue
    return None
