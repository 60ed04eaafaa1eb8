"""`--memory_checkpoint_interval`: copies of the states in host memory."""

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerolm.common.values import shown_bytes
from zerolm.config.flag import count
from zerolm.features.feature import Feature, RunParts
from zerolm.run_dir.metrics import CHECKPOINTS, Metric

if TYPE_CHECKING:
    from zerolm.checkpoint.directory import Checkpoint

CGROUP = Path("/sys/fs/cgroup")


class MemoryCopies(Feature):
    """Copies the states between checkpoints, and resumes from a copy if it is newer than the
    checkpoints.

    zerolm/checkpoint/memory.py defines the layout of the copies; `launch supervise` can also remove
    them.
    """

    name = "memory_copies"
    SECTION = "Checkpoints"
    METRICS = (
        Metric(
            "checkpoint/memory_seconds",
            "s",
            CHECKPOINTS,
            "how long training paused to copy the states for `--memory_checkpoint_interval`",
        ),
    )

    @dataclass(frozen=True)
    class Flags:
        memory_checkpoint_interval: int = count(
            "run",
            "also copy the states into each host's memory (/dev/shm), from which a killed run can "
            "resume; 0: never",
            "STEPS",
            minimum=0,
            default=0,
        )

    @classmethod
    def host_problems(cls, plan: Any, environment: Mapping[str, str]) -> Iterable[str]:
        """Compare the size of the copies with this host's shared memory and free memory."""
        settings = plan.settings
        if not settings.memory_checkpoint_interval:
            return
        from zerolm.checkpoint import memory
        from zerolm.common import machine

        interval = settings.memory_checkpoint_interval
        where = f"{settings.where('memory_checkpoint_interval')}: {interval}"
        if "nvme" in (plan.ds.optimizer_offload, plan.ds.param_offload):
            yield (
                f"{where}: states on NVMe cannot be copied to memory. Remove the flag, or use a "
                f"profile without NVMe."
            )
        if plan.device == "absent":
            return
        (rank, host), ranks = sizes(plan), machine.ranks_of_host(environment)
        ranks = min(ranks, plan.layout.ranks_per_copy)  # ranks with different states
        stages = -(-ranks // plan.layout.replicas) if plan.layout.stages > 1 else 1
        required = memory.KEPT * (ranks * rank + stages * host)
        needed = max(0, required - memory.bytes_on_host(plan.run_dir))
        places = {
            str(memory.SHARED_MEMORY): machine.free_bytes(memory.SHARED_MEMORY),
            "memory of this host": free_memory(),
        }
        for place, free in places.items():
            if free is not None and free < needed:
                yield (
                    f"{where}: {memory.KEPT} copies of {ranks} rank(s) need "
                    f"{shown_bytes(needed)}, but {place} has {shown_bytes(free)} free. Remove the "
                    f"flag, use more hosts, or make it larger (docker run --shm-size, mount -o "
                    f"remount,size=)."
                )

    @classmethod
    def summary(cls, plan: Any) -> Mapping[str, str]:
        if not plan.settings.memory_checkpoint_interval:
            return {}
        from zerolm.checkpoint import memory

        rank, host = sizes(plan)
        line = f"every {plan.settings.memory_checkpoint_interval} steps, {memory.SHARED_MEMORY}: "
        line += f"{memory.KEPT} x {shown_bytes(rank)} per rank"
        where = "stage on a host" if plan.layout.stages > 1 else "host"
        line += f" and {memory.KEPT} x {shown_bytes(host)} per {where}" if host else ""
        return {"copies in memory": line}

    @classmethod
    def wanted(cls, plan: Any) -> bool:
        return bool(plan.settings.memory_checkpoint_interval)

    @classmethod
    def absent(cls, run: RunParts) -> None:
        from zerolm.checkpoint import memory

        memory.forget(run.run_dir, run.rank)

    def attach(self, run: RunParts) -> None:
        from zerolm.checkpoint import memory

        self.run, self.interval = run, self.settings.memory_checkpoint_interval
        weights, states = (run.layout.axis(name, run.rank).ranks[0] for name in ("zero", "copies"))
        self.copies = memory.connect(run.run_dir, run.rank, weights, states)

    def find_checkpoint(
        self, usable: Callable[["Checkpoint"], bool]
    ) -> tuple["Checkpoint | None", Sequence[str]]:
        from zerolm.checkpoint import load

        return load.newest_copy(self.copies, self.run.run_dir, usable)

    def between_saves(self) -> None:
        run = self.run
        if run.progress.step % self.interval == 0:
            run.checkpointing.copy_to_memory(run.progress, run.journal.log, self.copies)

    def close(self) -> None:
        """Remove the copies, since the final checkpoint is on disk."""
        from zerolm.checkpoint import memory

        if self.copies.leads:
            memory.remove_copies(self.run.run_dir)


def sizes(plan: Any) -> tuple[int, int]:
    """Return the bytes of one copy per rank, and the additional bytes per host for the weights
    under ZeRO-1 and 2; with pipeline stages, those of the largest.

    There, all ranks on a host, or of a stage on it, load the same file of weights, so only one rank
    writes it. A rank whose weights are not in it computes them from its master weights.
    """
    from zerolm.plan import memory
    from zerolm.plan.rank_share import shapes_of_rank

    shapes, profile, ranks = plan.model.shapes, plan.ds, plan.layout.ranks_per_copy
    if plan.layout.stages > 1:
        shapes, ranks = shapes_of_rank(shapes, plan.layout, profile.stage_layers)
        profile = replace(profile, stages=1)
    kept, experts = plan.settings.kept_bytes(), plan.layout.experts
    total = memory.checkpoint_bytes(shapes, profile, kept_bytes=kept, experts=experts)
    weights = memory.weight_file_bytes(shapes, profile, experts)
    return -(-(total - weights) // ranks), weights


def free_memory() -> int | None:
    """Return the free memory of this host or container in bytes; None if unknown."""
    import psutil

    free = psutil.virtual_memory().available
    with contextlib.suppress(OSError, ValueError):  # "max" means no limit
        limit = int((CGROUP / "memory.max").read_text())
        free = min(free, limit - int((CGROUP / "memory.current").read_text()))
    return free
