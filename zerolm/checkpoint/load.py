"""Finds the newest complete checkpoint, and loads it into DeepSpeed's engine.

Nothing is unpickled before the manifest matches its digest and every file matches the manifest.
Must not depend on rollbacks; `zerolm.train.resume` combines them with this module.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from zerolm.checkpoint.checksums import Piece, piece_problem
from zerolm.checkpoint.directory import (
    Checkpoint,
    candidates,
    published_checkpoints,
    read,
    set_aside,
    verify_files,
)
from zerolm.checkpoint.file_lists import pieces
from zerolm.checkpoint.memory import MemoryCopies
from zerolm.common.errors import CheckpointError
from zerolm.common.files import wait_until_visible
from zerolm.distributed.collectives import (
    barrier,
    broadcast_object,
    gather_objects,
    require_on_all_ranks,
)
from zerolm.ds_config import topology
from zerolm.ds_files import checkpoints, reshard
from zerolm.ds_files.safe_load import interpreted, pickle_problems
from zerolm.engine.protocol import Engine
from zerolm.plan.plan import Plan
from zerolm.run_dir.files import DAMAGED, MANIFEST, RunFiles, checkpoint_step


@dataclass(frozen=True)
class DamagedCheckpoint:
    """A checkpoint whose files differ from its manifest, and its new path if it was renamed."""

    directory: Path
    problems: list[str]
    set_aside: Path | None = None


def newest_complete(
    run_dir: Path, rank: int, world_size: int
) -> tuple[Checkpoint | None, list[DamagedCheckpoint]]:
    """Find the newest checkpoint whose files all match its manifest. Every rank must call this.

    Each rank verifies a share of the files. Newer checkpoints that are damaged are renamed, so they
    are not tried again. Nothing is deleted or unpickled.

    Returns:
        The checkpoint, or None if none was ever published; and the newer checkpoints that are
        damaged.

    Raises:
        CheckpointError: on every rank: all checkpoints are damaged or lost.
        ConfigError: on every rank: hosts see different files.
    """
    listed: list[tuple[str, str]] = []
    damage: list[DamagedCheckpoint] = []
    errors: list[str] = []
    if rank == 0:
        try:
            found, unreadable = candidates(run_dir)
            listed = [(checkpoint.directory.name, checkpoint.digest) for checkpoint in found]
            damage = [DamagedCheckpoint(path, [problem]) for path, problem in unreadable.items()]
        except CheckpointError as error:
            errors = error.problems
    listed, damage, errors = broadcast_object((listed, damage, errors))
    if errors:
        raise CheckpointError(errors)
    for name, digest in listed:
        checkpoint = _same_on_all_ranks(RunFiles(run_dir).checkpoint(name), digest)
        found_here = verify_files(checkpoint, rank, world_size)
        problems = [line for lines in gather_objects(found_here) for line in lines]
        if not problems:
            newer = [
                damaged
                for damaged in damage
                if checkpoint_step(damaged.directory.name) > checkpoint_step(name)
            ]
            return checkpoint, _rename_damaged(newer, rank)
        damage.append(DamagedCheckpoint(checkpoint.directory, problems))
    if damage:
        lines = [line for damaged in damage for line in damaged.problems]
        last = f"{run_dir}: no complete checkpoint is left. Restore one. Nothing was deleted."
        raise CheckpointError([*lines, last])
    return None, []


def newest_copy(
    copies: MemoryCopies, run_dir: Path, usable: Callable[[Checkpoint], bool]
) -> tuple[Checkpoint | None, list[str]]:
    """Find the newest in-memory copy that all ranks have, unless a checkpoint on disk is newer.

    All other copies are removed. Every rank must call this.

    Args:
        usable: whether this run can resume from a copy.

    Returns:
        This rank's part of the copy, or None if there is no such copy or a part of it is damaged;
        and one line for each damaged file.
    """
    parts = {step: part for step, part in copies.found().items() if usable(part)}
    published = published_checkpoints(RunFiles(run_dir).checkpoints) if copies.rank == 0 else []
    newest = checkpoint_step(published[-1].name) if published else 0
    newest = broadcast_object(newest)
    common = set.intersection(*map(set, gather_objects(list(parts))))
    step = max((each for each in common if each > newest), default=None)
    found = []
    if step is not None:
        part = parts[step]
        for entry in part.manifest["files"]:
            found.append(piece_problem(part.directory / entry["file"], Piece(entry, None)))
    problems = [line for lines in gather_objects(found) for line in lines if line is not None]
    if problems:
        step = None
    if copies.leads:
        copies.keep_only(step)
    barrier()
    return (None if step is None else parts[step]), problems


def _rename_damaged(damage: list[DamagedCheckpoint], rank: int) -> list[DamagedCheckpoint]:
    if rank == 0:
        damage = [replace(one, set_aside=set_aside(one.directory, DAMAGED)) for one in damage]
    return broadcast_object(damage)


def _same_on_all_ranks(directory: Path, digest: str) -> Checkpoint:
    """Read the checkpoint that rank 0 has found, and check that its manifest has the same digest.

    Every rank must call this.

    On a network file system, hosts may temporarily see different contents, but all must load the
    same checkpoint.
    """
    mine, problem = None, ""
    try:
        wait_until_visible(directory / MANIFEST)
        mine = read(directory)
        if mine.digest != digest:
            problem = f"{directory / MANIFEST}: differs from the manifest that rank 0 reads."
    except CheckpointError as error:
        problem = str(error)
    require_on_all_ranks(
        not problem, f"{problem} All hosts must share --run_dir {directory.parent.parent}."
    )
    assert mine is not None
    return mine


def load(engine: Engine, checkpoint: Checkpoint, plan: Plan) -> None:
    """Load a verified checkpoint into the engine, resharded if it was written with another
    topology. Every rank must call this.

    Raises:
        CheckpointError: on every rank: unpickling a file would run code, the states cannot be
            resharded, or DeepSpeed found nothing to load.
    """
    try:
        ours = pieces(
            checkpoint.directory, checkpoint.manifest, engine.global_rank, engine.world_size
        )
        paths = [checkpoint.directory / entry["file"] for entry, number in ours if not number]
        found = [line for path in paths if path.suffix == ".pt" for line in pickle_problems(path)]
    except CheckpointError as error:  # must reach all ranks
        found = error.problems
    problems = [line for lines in gather_objects(found) for line in lines]
    if problems:
        raise CheckpointError(problems)
    if plan.resharded(checkpoint.manifest):
        where = str(checkpoint.directory / MANIFEST)
        problems = topology.problems(checkpoint.manifest, where, plan.ds)
        if problems:
            raise CheckpointError(problems)
        reshard.load(engine, checkpoint.directory, checkpoint.manifest)
        return
    with interpreted(checkpoint.directory):
        found_any = checkpoints.load(engine, checkpoint.directory)
    if not found_any:
        raise CheckpointError(f"{checkpoint.directory}: DeepSpeed found nothing to load in it.")
