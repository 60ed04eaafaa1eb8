"""Start or resume a run: load the newest complete checkpoint, and open the logs at its step.

Connects rollback, loading and the probe, which do not depend on each other.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

from zerolm.checkpoint import load, probe, rollback
from zerolm.checkpoint.directory import Checkpoint, published_checkpoints, read
from zerolm.checkpoint.manifest import Progress
from zerolm.distributed import collectives
from zerolm.ds_files import reshard
from zerolm.engine import kernel_fixes
from zerolm.features import FEATURES
from zerolm.optim import parameter_groups
from zerolm.optim.spikes import History
from zerolm.plan.plan import Plan
from zerolm.preflight import run_record
from zerolm.run_dir.files import MANIFEST, RunFiles
from zerolm.run_dir.records import Rollback, read_rollbacks
from zerolm.tracking import run_log
from zerolm.train import run_directory
from zerolm.train.run import Run
from zerolm.watchdog.progress import record_progress


class ResumePoint(NamedTuple):
    """The point at which a run starts or resumes.

    Attributes:
        progress: the checkpoint's progress, updated for later rollbacks.
        found: the checkpoint that was loaded into the engine; None for a new run.
        damage: newer checkpoints that were damaged and have been set aside.
        in_memory: whether `found` is a copy in host memory.
    """

    progress: Progress
    found: Checkpoint | None
    damage: list[load.DamagedCheckpoint]
    in_memory: bool = False


def start(run: Run) -> bool:
    """Load the newest complete checkpoint, if any, write run.json, and open the logs.

    Every rank must call this at the start of the run and after each rollback.

    Returns:
        Whether a checkpoint was loaded.

    Raises:
        CheckpointError: on every rank, if there are checkpoints but the run cannot resume from any
            of them.
    """
    run.progress, found, damage, in_memory = _load_newest(run)
    if in_memory:
        published = published_checkpoints(RunFiles(run.run_dir).checkpoints)
        run.checkpointing.newest = str(published[-1]) if published else None
    elif found is not None:
        run.checkpointing.newest = str(found.directory)
    for kind in FEATURES:
        if not kind.wanted(run.plan):
            kind.absent(run)
    for feature in run.features:
        feature.loaded(run.progress.features.get(feature.name, {}))
    run.spike_guard.history = History(**run.progress.history)
    record = run_directory.record(run.plan)
    record["skipped_windows"] = run.progress.skipped_windows
    run.checkpointing.record = record
    run_directory.write(run.run_dir, record, run.rank)
    step = run.progress.step
    run.journal.open(step)
    run.evaluations.restore(run.journal.log, step)
    resharded = run.plan.resharded(found.manifest) if found else []
    newest = str(found.directory) if found else None
    run.journal.log_start(step, newest, damage, resharded)
    return found is not None


def _load_newest(run: Run) -> ResumePoint:
    """Finish interrupted rollbacks, and load the newest complete checkpoint or in-memory copy.

    If there is none, a run with `--init_optimizer` loads the optimizer states of its source. Every
    rank must call this.
    """
    plan, run_dir = run.plan, run.run_dir
    rollbacks = collectives.broadcast_object(read_rollbacks(run_dir))
    record_progress("load")
    if run.rank == 0:  # rank 0 holds the run directory's lock
        for entry in rollbacks:
            run_log.archive(run_dir, entry["number"], entry["to_step"])
        rollback.apply_recorded(run_dir)
    found: Checkpoint | None = None
    damage: list[load.DamagedCheckpoint] = []
    in_memory = False
    for feature in run.features:
        newer, problems = feature.find_checkpoint(partial(_is_usable, plan, rollbacks))
        found, in_memory = newer or found, in_memory or newer is not None
        for problem in problems:
            run.print_rank0(
                f"note: an in-memory copy is damaged, so the run resumes from disk: {problem}"
            )
    if found is None:
        found, damage = load.newest_complete(run_dir, run.rank, run.engine.world_size)
    for damaged in damage:
        run.print_rank0(f"damaged: {damaged.directory}, now {damaged.set_aside}", *damaged.problems)
    if found is None:
        initial = plan.initial
        if plan.settings.init_optimizer and initial is not None and initial.checkpoint is not None:
            _load(run, read(initial.checkpoint), "optimizer states")
        return ResumePoint(rollback.with_rollbacks(run.progress, rollbacks), None, damage)
    _load(run, found, "resume")
    progress = continued(found, rollbacks, run_record.data_order(plan))
    return ResumePoint(progress, found, damage, in_memory)


def continued(found: Checkpoint, rollbacks: list[Rollback], new: Mapping[str, Any]) -> Progress:
    """Return the progress from which a run continues after loading a checkpoint.

    A rollback records the sequences to skip by their index in the data order of that time, which
    may differ from both the checkpoint's and the current data order.

    Args:
        rollbacks: all rollbacks of the run; rollbacks before the checkpoint have no effect.
        new: the current data order, from `run_record.data_order`.
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
    """Return whether the run can resume from an in-memory copy.

    The copy must have the same settings and topology, and must not have been rolled back.
    """
    return (
        copy.manifest.get("plan") == plan.fingerprint()
        and not plan.resharded(copy.manifest)
        and not rollback.undone_by(copy.progress, rollbacks)
    )


def _load(run: Run, found: Checkpoint, what: str) -> None:
    """Load a verified checkpoint into the engine, and check its probe loss.

    Every rank must call this.

    Args:
        what: what is loaded, for the message.
    """
    engine, plan = run.engine, run.plan
    options = {"weight_decay", *plan.ds.optimizer.params}
    options -= {"lr", *(reshard.SCHEDULED_KEYS if engine.lr_scheduler is not None else ())}
    with parameter_groups.keeping_options(engine.optimizer.optimizer, options):
        load.load(engine, found, plan)
    kernel_fixes.restore_beta_powers(engine.optimizer.optimizer)
    run.print_rank0(f"{what}: {found.directory}, step {found.progress.step}")
    path = found.directory / MANIFEST
    loss = probe.check(engine, run.feed.probe_batches(), plan, found.manifest, path)
    run.print_rank0(f"probe loss: {loss}")
