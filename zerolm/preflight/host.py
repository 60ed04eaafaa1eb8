"""Detect the number of ranks and their device, and check this host: locks, memory, ports, trackers.

Must not depend on the model or the data. `launch doctor` also uses some of these checks.
"""

import errno
import os
import shutil
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from zerolm.common import machine, process_tree
from zerolm.common.errors import ConfigError, Findings
from zerolm.common.values import shown_bytes
from zerolm.config.settings import Settings
from zerolm.distributed import ranks
from zerolm.distributed.device import CPU, NO_DEVICE, Device, local_device, this_cpu
from zerolm.engine.launcher_options import deepspeed_env_files
from zerolm.engine.shared_memory import BYTES_PER_RANK
from zerolm.plan import hardware
from zerolm.run_dir.files import RunFiles, checkpoint_directories
from zerolm.tracking.tracker import enabled_trackers, tracker_class
from zerolm.watchdog import limits
from zerolm.watchdog.limits import SHARED_MEMORY


class Host(NamedTuple):
    """The ranks and devices of a run.

    Attributes:
        device: this rank's device, or the device that `--hardware` names. Its kind is `absent` for
            a GPU that is not in this machine.
    """

    world_size: int
    device: Device


def detect(
    settings: Settings, argv: Sequence[str], environment: Mapping[str, str], found: Findings
) -> Host:
    """Read the launcher's variables, detect the device, and check this host."""
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        value = environment.get(name, "1" if name == "WORLD_SIZE" else "0")
        if not value.isdigit() or (name == "WORLD_SIZE" and value == "0"):
            found.problems.append(
                f"environment: {name}: {value!r} must be a whole number. Start the run with "
                f"deepspeed, or unset it."
            )
            return Host(1, NO_DEVICE)
    world_size = int(environment.get("WORLD_SIZE", 1))
    if settings.check and settings.hardware:
        return Host(settings.world_size or world_size, _named_device(settings.hardware, found))
    device = local_device(environment, found.problems)
    if settings.check and settings.world_size:
        if not device.is_gpu:
            found.notices.append(
                "checked for ranks on this machine's CPU; --hardware H100 checks for GPUs, even on "
                "a machine without them"
            )
        return Host(settings.world_size, device)
    options, variables = process_tree.runner_of(argv)
    if problem := machine.num_nodes_problem(options, environment):
        found.problems.append(problem)
    if "--hostfile" in options and "--no_ssh" not in options and machine.num_hosts(environment) > 1:
        try:
            deepspeed_env_files(variables)
        except ConfigError as error:
            found.problems += error.problems
    if not settings.check:
        found.problems += ranks.problems(environment)
    _check_shared_resources(environment, found)
    problem = limits.file_limit_problem(world_size, device.is_gpu)
    found.problems += [problem] if problem else []
    return Host(world_size, device)


def _named_device(name: str, found: Findings) -> Device:
    """Return the device with a name from `--hardware`."""
    if name.lower() == CPU:
        return this_cpu()
    try:
        return hardware.load(name, {}).device
    except ConfigError as error:
        found.problems += error.problems
        return NO_DEVICE


def _check_shared_resources(environment: Mapping[str, str], found: Findings) -> None:
    """Check this rank's shared memory and cores and, on rank 0, the rendezvous port."""
    cores, ranks_here = os.cpu_count() or 1, machine.ranks_of_host(environment)
    if (shared := shared_memory()) is not None:
        problem = shared_memory_problem(shared[0], ranks_here)
        found.notices += [problem] if problem else []
    if len(os.sched_getaffinity(0)) == 1 < cores // ranks_here:
        found.notices.append(
            f"this rank and its loader workers may use only 1 of the host's {cores} cores. Start "
            f"it with `srun --cpus-per-task {cores // ranks_here}` or `mpirun --bind-to none`"
        )
    port = environment.get("MASTER_PORT", "")
    # Under torchrun the port is already in use, because torchrun's agent runs the store.
    own = environment.get("TORCHELASTIC_USE_AGENT_STORE", "False") != "True"
    if port.isdigit() and environment.get("RANK") == "0" and own:
        problem = port_problem(int(port))
        found.problems += [f"environment: MASTER_PORT: {problem}"] if problem else []


def check_trackers(settings: Settings, environment: Mapping[str, str], found: Findings) -> None:
    """Check that the accounts and packages of the run's trackers are available.

    `settings` must be resolved, because the DeepSpeed JSON may enable a tracker.
    """
    elsewhere = settings.check and settings.world_size is not None
    if environment.get("RANK", "0") != "0":
        return
    for name in enabled_trackers(settings):
        tracker = tracker_class(name)
        found.problems += tracker.value_problems(settings, environment)
        found.notices += tracker.notices(settings, environment)
        if not elsewhere:
            found.problems += tracker.problems(name, settings, environment)


def checkpoint_room(run_dir: str | Path, checkpoint_bytes: int, keep: int) -> tuple[int, int]:
    """Return the free bytes on a run directory's disk, and the bytes that future checkpoints need.

    There is temporarily one checkpoint more than `keep`, because the oldest is removed only after
    the newest is published. Checkpoints already on disk need no more space. Free bytes are -1 if
    unknown.
    """
    free = machine.free_bytes(run_dir)
    existing = len(checkpoint_directories(RunFiles(run_dir).checkpoints))
    required = max(1, keep + 1 - existing) * checkpoint_bytes
    return (-1 if free is None else free), required


def shared_memory() -> tuple[int, int] | None:
    """Return the (free, total) bytes of this host's or container's shared memory; None if it has
    none.
    """
    try:
        usage = shutil.disk_usage(SHARED_MEMORY)
    except OSError:
        return None
    return usage.free, usage.total


def shared_memory_problem(free: int, num_ranks: int) -> str | None:
    """Return a problem if a host's shared memory is too small for its ranks, else None."""
    required = num_ranks * BYTES_PER_RANK
    if free >= required:
        return None
    needed = f"{num_ranks} rank(s) need about {shown_bytes(required)}"
    return f"{SHARED_MEMORY}: {shown_bytes(free)} free, {needed}. {limits.LARGER_SHARED_MEMORY}"


def port_problem(port: int) -> str | None:
    """Return why rank 0 cannot listen on a port of this host; None if it can."""
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
        f"port {port}: in use{f' by {who}' if who else ''}. End that process, or choose another "
        f"port: deepspeed --master_port."
    )


def _listener(port: int) -> str | None:
    """Return the process that listens on a port, such as `process 4 (python)`.

    Returns None if the process is not visible to this user.
    """
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
        except OSError:  # the process has ended, or belongs to another user
            continue
    return None
