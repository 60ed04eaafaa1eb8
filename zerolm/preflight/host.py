"""What the machine and the launcher say of a run: how many ranks, on which device, and what is
wrong with them. Knows nothing of the model and the data.
"""

import errno
import shutil
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from zerolm.common import machine
from zerolm.common.errors import Findings
from zerolm.common.machine import free_bytes
from zerolm.common.run_files import RunFiles, checkpoint_directories
from zerolm.common.values import shown_bytes
from zerolm.config.settings import Settings
from zerolm.tracking.tracker import enabled_trackers, tracker_class

NO_DEVICE = machine.Device("cpu", None, True)


class Host(NamedTuple):
    """What a run has: ranks in all, and the device of this one.

    Attributes:
        device: its kind is `absent` when the run's devices are not here.
    """

    world_size: int
    device: machine.Device


def detect(
    settings: Settings, argv: Sequence[str], environment: Mapping[str, str], found: Findings
) -> Host:
    """Read the launcher's environment, find the device, and check what the host has for the run.

    Args:
        argv: flags of pretrain.py.
        environment: of the launcher: `WORLD_SIZE`, `LOCAL_RANK`, ...
        found: is added to.
    """
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        value = environment.get(name, "1" if name == "WORLD_SIZE" else "0")
        if not value.isdigit() or (name == "WORLD_SIZE" and value == "0"):
            found.problems.append(
                f"environment: {name}: {value!r}, must be a whole number. Start the run with "
                f"deepspeed, or unset it."
            )
            return Host(1, NO_DEVICE)
    device = machine.local_device(environment, found.problems)
    if settings.check and settings.world_size:
        if not device.is_gpu:
            device = machine.Device("absent", machine.ASSUMED_DEVICE_BYTES, True)
            gibibytes = machine.ASSUMED_DEVICE_BYTES >> 30
            found.notices.append(
                f"the devices of this run are not here: {gibibytes} GiB each are assumed"
            )
        return Host(settings.world_size, device)
    problem = machine.launcher_problem(argv, environment)
    if problem:
        found.problems.append(problem)
    _look_at_builds(environment, found)
    _look_at_what_ranks_share(environment, found)
    _check_trackers(settings, environment, found)
    return Host(int(environment.get("WORLD_SIZE", 1)), device)


def _look_at_builds(environment: Mapping[str, str], found: Findings) -> None:
    """Look for locks of operators that are being built, or were when the build was killed."""
    stale, fresh = machine.build_locks(environment)
    found.problems += [
        f"{lock}: left by a build that was killed: every rank would wait for it forever. Delete it."
        for lock in stale
    ]
    found.notices += [
        f"{lock}: another process builds an operator; this run waits for it. If there is no "
        f"such process, stop this run and delete the lock"
        for lock in fresh
    ]


def _look_at_what_ranks_share(environment: Mapping[str, str], found: Findings) -> None:
    """Look at what the ranks of this host share; the other hosts' ranks look at theirs."""
    ranks = environment.get("LOCAL_WORLD_SIZE") or environment.get("LOCAL_SIZE", "1")
    shared = shared_memory()
    if shared is not None and ranks.isdigit():
        problem = shared_memory_problem(shared[0], int(ranks))
        found.notices += [problem] if problem else []
    port = environment.get("MASTER_PORT", "")
    # Where an agent of torchrun holds the store, the port is rightly in use.
    own = environment.get("TORCHELASTIC_USE_AGENT_STORE", "False") != "True"
    if port.isdigit() and environment.get("RANK") == "0" and own:
        problem = port_problem(int(port))
        found.problems += [f"environment: MASTER_PORT: {problem}"] if problem else []


def _check_trackers(settings: Settings, environment: Mapping[str, str], found: Findings) -> None:
    """Check that the trackers of the run have the account or the package that they need."""
    for name in enabled_trackers(settings):
        found.problems += tracker_class(name).problems(name, settings, environment)


SHARED_MEMORY = Path("/dev/shm")
# DeepSpeed 0.19.8's collectives of one CPU rank take 69 MB there (measured:
# zerolm/distributed/process_group.py).
# For GPUs NVIDIA asks for 1 GB in a container, here for eight of them: "Troubleshooting, shared
# memory", https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html
SHARED_BYTES_PER_RANK = 128 << 20


def checkpoint_room(run_dir: str | Path, checkpoint_bytes: int, keep: int) -> tuple[int, int]:
    """Return (free bytes, bytes that the checkpoints to come need) of a run directory's disk.

    One more than are kept, since the oldest goes when the newest is whole; those on disk have
    theirs already. Free is -1 where the file system does not say.
    """
    free = free_bytes(run_dir)
    there = len(checkpoint_directories(RunFiles(run_dir).checkpoints))
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
