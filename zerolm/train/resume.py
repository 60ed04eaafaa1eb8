"""Resumes a run: loads the newest complete checkpoint, and applies rollbacks made since then.

Connects rollback, load, reshard and probe of zerolm/checkpoint, which do not know each other.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from zerolm.checkpoint import load, probe, reshard, rollback
from zerolm.checkpoint.directory import Checkpoint, read
from zerolm.checkpoint.manifest import Progress
from zerolm.common.run_files import MANIFEST
from zerolm.config.run_records import Rollback, read_rollbacks
from zerolm.distributed import collectives
from zerolm.features.feature import Feature
from zerolm.optim import parameter_groups
from zerolm.plan.plan import Plan
from zerolm.preflight import run_record
from zerolm.tracking import run_log
from zerolm.watchdog.progress import record_progress


class ResumePoint(NamedTuple):
    """Where a run starts or resumes.

    Attributes:
        progress: of the checkpoint, with the effects of rollbacks since then.
        found: the checkpoint that was loaded into the engine; None for a new run.
        damage: newer checkpoints that are damaged, and were set aside.
        in_memory: `found` is a copy in the memory of the hosts.
    """

    progress: Progress
    found: Checkpoint | None
    damage: list[load.DamagedCheckpoint]
    in_memory: bool = False


def load_newest(
    engine: Any,
    plan: Plan,
    run_dir: Path,
    progress: Progress,
    probe_batches: Callable[[], Any],
    print_rank0: Callable[..., None],
    features: Sequence[Feature] = (),
) -> ResumePoint:
    """Finish interrupted rollbacks, and load the newest complete checkpoint or copy, if any.

    A new run with `--init_optimizer` loads the states of its source. Every rank must call.

    Args:
        engine: the DeepSpeed engine.
        progress: of a new run.
        probe_batches: returns the micro-batches of the fixed probe batch.
        print_rank0: prints on rank 0.
        features: those that may have a checkpoint that is newer than those on disk.

    Raises:
        CheckpointError: on every rank: there are checkpoints, but the run can resume from none.
    """
    rank = engine.global_rank
    rollbacks = collectives.broadcast_object(read_rollbacks(run_dir))
    record_progress("load")
    if rank == 0:  # which holds the lock of the run directory
        for entry in rollbacks:
            run_log.archive(run_dir, entry["number"], entry["to_step"])
        rollback.apply_recorded(run_dir)
    found: Checkpoint | None = None
    damage: list[load.DamagedCheckpoint] = []
    in_memory = False
    for feature in features:
        newer, problems = feature.find_checkpoint(partial(_is_usable, plan, rollbacks))
        found, in_memory = newer or found, in_memory or newer is not None
        for problem in problems:
            print_rank0(f"note: a copy in memory is damaged, the run resumes from disk: {problem}")
    if found is None:
        found, damage = load.newest_complete(run_dir, rank, engine.world_size)
    for damaged in damage:
        print_rank0(f"damaged: {damaged.directory}, now {damaged.set_aside}", *damaged.problems)
    if found is None:
        initial = plan.initial
        if plan.settings.init_optimizer and initial is not None and initial.checkpoint is not None:
            source = read(initial.checkpoint)
            _load(engine, source, plan, probe_batches, print_rank0, "optimizer states")
        return ResumePoint(rollback.with_rollbacks(progress, rollbacks), None, damage)
    _load(engine, found, plan, probe_batches, print_rank0, "resume")
    progress = continued(found, rollbacks, run_record.data_order(plan))
    return ResumePoint(progress, found, damage, in_memory)


def continued(found: Checkpoint, rollbacks: list[Rollback], new: Mapping[str, Any]) -> Progress:
    """Return the progress from which a run continues after loading a checkpoint.

    What a rollback skips has the sequence numbers of the data order that the run had then, which
    may be neither that of the checkpoint nor the one of now.

    Args:
        rollbacks: all rollbacks of the run; those before the checkpoint have no effect.
        new: `data_order` of this run.
    """
    progress, order = found.progress, found.manifest.get("order", new)
    for entry in rollbacks:
        if entry["number"] > progress.rollbacks:
            then = entry.get("order", order)
            progress = run_record.carry_over(progress, order, then)
            progress = rollback.with_rollbacks(progress, [entry])
            order = then
    return run_record.carry_over(progress, order, new)


def position_after(plan: Plan, found: Checkpoint) -> int:
    """Return the position from which a run would continue after loading a checkpoint."""
    return continued(found, read_rollbacks(plan.run_dir), run_record.data_order(plan)).position


def _is_usable(plan: Plan, rollbacks: list[Rollback], copy: Checkpoint) -> bool:
    """Return whether this run continues a copy: same settings and topology, not rolled back."""
    return (
        copy.manifest.get("plan") == plan.fingerprint()
        and not plan.resharded(copy.manifest)
        and not rollback.undone_by(copy.progress, rollbacks)
    )


def _load(
    engine: Any,
    found: Checkpoint,
    plan: Plan,
    probe_batches: Callable[[], Any],
    print_rank0: Callable[..., None],
    what: str,
) -> None:
    """Load a verified checkpoint into the engine, and measure its probe. Every rank must call."""
    options = {"weight_decay", *plan.profile.optimizer.params}
    options -= {"lr", *(reshard.SCHEDULED_KEYS if engine.lr_scheduler is not None else ())}
    with parameter_groups.keeping_options(engine.optimizer.optimizer, options):
        load.load(engine, found, plan, reshard.load)
    parameter_groups.restore_beta_powers(engine.optimizer.optimizer)
    print_rank0(f"{what}: {found.directory}, step {found.progress.step}")
    path = found.directory / MANIFEST
    loss = probe.check(engine, probe_batches(), plan, found.manifest, path)
    print_rank0(f"probe loss: {loss}")
