"""Where a run goes on: its newest whole checkpoint, and what rollbacks have made of it since.

The parts that it puts together (rollback, checkpoint, reshard, probe) know nothing of each other.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from zerolm.checkpoint import load, probe, reshard, rollback
from zerolm.checkpoint.directory import Checkpoint, Progress
from zerolm.common.run_files import MANIFEST
from zerolm.distributed import collectives
from zerolm.optim import parameter_groups
from zerolm.plan.plan import Plan
from zerolm.preflight import run_record
from zerolm.tracking import run_log
from zerolm.watchdog.progress import record_progress


class Resumption(NamedTuple):
    """Where a run goes on.

    Attributes:
        progress: of the checkpoint, with what rollbacks since then have left.
        found: the checkpoint that the engine was loaded from, None for a run that begins.
        damage: newer checkpoints that are not whole, and were set aside.
    """

    progress: Progress
    found: Checkpoint | None
    damage: list[load.DamagedCheckpoint]


def load_newest(
    engine: Any,
    plan: Plan,
    run_dir: Path,
    progress: Progress,
    probes: Callable[[], Any],
    say: Callable[..., None],
) -> Resumption:
    """Settle what rollbacks have decided, and load the newest whole checkpoint, if any.

    Every rank must call.

    Args:
        engine: the DeepSpeed engine.
        progress: what a run without a checkpoint begins with.
        probes: makes the micro-batches of the fixed batch.
        say: prints on rank 0.

    Raises:
        CheckpointError: on every rank: there are checkpoints, but none can be gone on from.
    """
    rank = engine.global_rank
    rollbacks = collectives.broadcast_object(rollback.entries(run_dir))
    record_progress("load")
    if rank == 0:  # now that the lock is held
        for entry in rollbacks:
            run_log.archive(run_dir, entry["number"], entry["to_step"])
        rollback.apply_recorded(run_dir)
    found, damage = load.newest_complete(run_dir, rank, engine.world_size)
    for damaged in damage:
        say(f"damaged: {damaged.directory}, now {damaged.set_aside}", *damaged.problems)
    if found is None:
        return Resumption(rollback.with_rollbacks(progress, rollbacks), None, damage)
    load.load(engine, found, plan, reshard.load)
    parameter_groups.restore_beta_powers(engine.optimizer.optimizer)
    say(f"resume: {found.directory}, step {found.progress.step}")
    where = found.directory / MANIFEST
    say(f"probe loss: {probe.check(engine, probes(), plan, found.manifest, where)}")
    new = run_record.data_order(plan)
    old = found.manifest.get("order", new)
    progress = rollback.with_rollbacks(found.progress, rollbacks)
    return Resumption(run_record.carry_over(progress, old, new), found, damage)
