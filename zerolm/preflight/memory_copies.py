"""Check that the hosts have memory for the copies of `--memory_checkpoint_interval`.

Must not know how copies are written.
"""

import contextlib
from collections.abc import Mapping
from pathlib import Path

from zerolm.checkpoint import memory as copies
from zerolm.common import machine
from zerolm.common.errors import Findings
from zerolm.common.values import shown_bytes
from zerolm.plan import memory
from zerolm.plan.plan import Plan

CGROUP = Path("/sys/fs/cgroup")


def sizes(plan: Plan) -> tuple[int, int]:
    """Return the bytes of one copy: per rank, and in addition per host (weights below ZeRO-3).

    All ranks of a host load the same weights, so one of them writes these.
    """
    shapes, profile = plan.model.shapes, plan.profile
    total = memory.checkpoint_bytes(shapes, profile, ema=plan.settings.ema_tokens > 0)
    weights = memory.weight_file_bytes(shapes, profile)
    return -(-(total - weights) // plan.world_size), weights


def figure(plan: Plan) -> str:
    """Return the line of the plan."""
    rank, host = sizes(plan)
    line = f"every {plan.settings.memory_checkpoint_interval} steps, {copies.SHARED_MEMORY}: "
    line += f"{copies.KEPT} x {shown_bytes(rank)} per rank"
    return line + (f" and {copies.KEPT} x {shown_bytes(host)} per host" if host else "")


def check(plan: Plan, environment: Mapping[str, str], found: Findings) -> None:
    """Compare the size of the copies with shared memory and free memory of this host."""
    settings = plan.settings
    if not settings.memory_checkpoint_interval:
        return
    where = settings.where("memory_checkpoint_interval")
    if "nvme" in (plan.profile.optimizer_offload, plan.profile.param_offload):
        found.problems.append(
            f"{where}: {settings.memory_checkpoint_interval}, states on NVMe cannot be copied to "
            f"memory. Remove the flag, or use a profile without NVMe."
        )
    if plan.device == "absent":
        return
    ranks, (rank, host) = machine.ranks_of_host(environment), sizes(plan)
    required = copies.KEPT * (ranks * rank + host)
    needed = max(0, required - copies.bytes_on_host(plan.run_dir))
    places = {
        str(copies.SHARED_MEMORY): machine.free_bytes(copies.SHARED_MEMORY),
        "memory of this host": free_memory(),
    }
    for place, free in places.items():
        if free is not None and free < needed:
            found.problems.append(
                f"{where}: {settings.memory_checkpoint_interval}, {copies.KEPT} copies of "
                f"{ranks} rank(s) need {shown_bytes(needed)}, but {place} has {shown_bytes(free)} "
                f"free. Remove the flag, use more hosts, or make it larger (docker run --shm-size, "
                f"mount -o remount,size=)."
            )


def free_memory() -> int | None:
    """Return the free memory of this host or container, None if it is not known."""
    import psutil

    free = psutil.virtual_memory().available
    with contextlib.suppress(OSError, ValueError):  # no limit is "max"
        limit = int((CGROUP / "memory.max").read_text())
        free = min(free, limit - int((CGROUP / "memory.current").read_text()))
    return free
