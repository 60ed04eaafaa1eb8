"""From checkpoints back into DeepSpeed's engine: the newest whole one, or the one before it.

Nothing is unpickled before the checksum of every file has been compared with the manifest, whose
own digest was checked before that. zerolm/checkpoint/writer.py makes them.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from zerolm.checkpoint import safe_load
from zerolm.checkpoint.directory import Checkpoint, candidates, problems_of, read, set_aside
from zerolm.common.errors import CheckpointError
from zerolm.common.run_files import DAMAGED, MANIFEST, RunFiles, checkpoint_step
from zerolm.distributed.collectives import broadcast_object, gather_objects, require_on_all_ranks
from zerolm.ds_config import topology
from zerolm.plan.plan import Plan


@dataclass(frozen=True)
class Damage:
    """A checkpoint that is not whole: what was found, and the name it was given."""

    directory: Path
    problems: list[str]
    set_aside: Path | None = None


def newest_whole(
    run_dir: Path, rank: int, world_size: int
) -> tuple[Checkpoint | None, list[Damage]]:
    """Find the newest checkpoint of which every file is what its manifest says.

    Every rank must call; the ranks share the reading. Damaged newer ones are renamed, so that they
    do not count any more; nothing is deleted, and nothing is unpickled.

    Returns:
        The checkpoint, None when the run never had one; and the damaged ones newer than it.

    Raises:
        CheckpointError: on every rank: all checkpoints are damaged or lost.
        ConfigError: on every rank: the hosts do not see the same files.
    """
    listed: list[tuple[str, str]] = []
    damage: list[Damage] = []
    refusal: list[str] = []
    if rank == 0:
        try:
            found, unreadable = candidates(run_dir)
            listed = [(checkpoint.directory.name, checkpoint.digest) for checkpoint in found]
            damage = [Damage(path, [problem]) for path, problem in unreadable.items()]
        except CheckpointError as error:
            refusal = error.problems
    listed, damage, refusal = broadcast_object((listed, damage, refusal))
    if refusal:
        raise CheckpointError(refusal)
    for name, digest in listed:
        checkpoint = _same_on_all_ranks(RunFiles(run_dir).checkpoint(name), digest)
        share = problems_of(checkpoint, rank, world_size)
        problems = [line for lines in gather_objects(share) for line in lines]
        if not problems:
            newer = [
                damaged
                for damaged in damage
                if checkpoint_step(damaged.directory.name) > checkpoint_step(name)
            ]
            return checkpoint, _put_aside(newer, rank)
        damage.append(Damage(checkpoint.directory, problems))
    if damage:
        lines = [line for damaged in damage for line in damaged.problems]
        last = f"{run_dir}: no whole checkpoint is left. Restore one. Nothing was deleted."
        raise CheckpointError([*lines, last])
    return None, []


def _put_aside(damage: list[Damage], rank: int) -> list[Damage]:
    done = damage
    if rank == 0:
        done = [replace(each, set_aside=set_aside(each.directory, DAMAGED)) for each in damage]
    return broadcast_object(done)


def _same_on_all_ranks(directory: Path, digest: str) -> Checkpoint:
    """Return the checkpoint that rank 0 found, as this rank reads it. Every rank must call.

    Hosts may see a shared directory differently for a while; each must load the same checkpoint.
    """
    mine, problem = None, ""
    try:
        mine = read(directory)
        if mine.digest != digest:
            problem = f"{directory / MANIFEST}: not the manifest that the first rank reads."
    except CheckpointError as error:
        problem = str(error)
    require_on_all_ranks(
        not problem, f"{problem} All hosts must share --run_dir {directory.parent.parent}."
    )
    assert mine is not None
    return mine


def load(
    engine: Any,
    checkpoint: Checkpoint,
    plan: Plan,
    reshard: Callable[[Any, Path, dict[str, Any]], None],
) -> None:
    """Load a checkpoint whose files were verified into the engine. Every rank must call.

    Args:
        plan: of this run.
        reshard: loads the files below a directory, whose manifest is given too, if they are cut
            for another topology (`zerolm.checkpoint.reshard.load`).

    Raises:
        CheckpointError: states that cannot be cut anew, files that hold more than data, or none.
    """
    share = checkpoint.manifest["files"][engine.global_rank :: engine.world_size]
    paths = [checkpoint.directory / entry["file"] for entry in share]
    strange = [safe_load.problems_of(path) for path in paths if path.suffix == ".pt"]
    problems = [line for rank in gather_objects(strange) for lines in rank for line in lines]
    if problems:  # found without making any of it, and refused by all ranks alike
        raise CheckpointError(problems)
    if plan.resharded(checkpoint.manifest):
        where = str(checkpoint.directory / MANIFEST)
        problems = topology.problems(checkpoint.manifest, where, plan.profile)
        if problems:
            raise CheckpointError(problems)
        reshard(engine, checkpoint.directory, checkpoint.manifest)
        return
    with safe_load.only_data(engine):
        path, _ = engine.load_checkpoint(
            str(checkpoint.directory.parent), tag=checkpoint.directory.name
        )
    if path is None:
        raise CheckpointError(f"{checkpoint.directory}: DeepSpeed loaded nothing from it.")
