"""Checkpoints that are either whole or not there.

DeepSpeed writes its files into `checkpoints/.tmp-step-00001000`; each rank syncs and hashes a share
of them; rank 0 writes `MANIFEST.json` last, renames the directory and moves the pointer `latest`.
A directory without a manifest does not exist for us, and DeepSpeed's own `latest` (written before
the other ranks have finished) is never made. Progress is in the manifest, as plain JSON.

`save` is the one place that a writer behind the training loop would replace: everything up to
`publish` fills the temporary directory, `publish` alone makes it visible.
"""

import os
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from zerolm import topology
from zerolm.checkpoint_directory import (
    FORMAT,
    MANIFEST,
    TEMPORARY,
    VERSION,
    Checkpoint,
    Progress,
    by_step,
    clear_debris,
    directory_name,
    files_of,
    problems_of,
    publish,
    read,
)
from zerolm.distributed import agree, barrier, broadcast_object, gather_objects
from zerolm.errors import CheckpointError, CheckpointWriteError
from zerolm.files import sha256_file, sync_directory
from zerolm.plan import Plan
from zerolm.unpickling import only_data


def save(engine: Any, run_dir: Path, progress: Progress, keep: int, **facts: Any) -> float:
    """Write and publish a checkpoint of the engine. Every rank must call.

    Args:
        engine: the DeepSpeed engine; ZeRO stages 1, 2 and 3, offloaded or not.
        run_dir: one directory that every rank sees.
        progress: what a resume continues from.
        keep: how many of the newest checkpoints stay.
        facts: further entries of the manifest, JSON values.

    Returns:
        The seconds that training stood still.

    Raises:
        CheckpointWriteError: on the rank that could not write; the others wait for it, and are
            ended by the launcher when it ends.
    """
    began = time.perf_counter()
    checkpoints = Path(run_dir) / "checkpoints"
    temporary = checkpoints / (TEMPORARY + directory_name(progress.step))
    if engine.global_rank == 0:
        clear_debris(checkpoints)
    # save_checkpoint begins with a barrier, so no rank writes before the debris is gone.
    try:
        engine.save_checkpoint(str(checkpoints), tag=temporary.name, save_latest=False)
        # One list for all: a host whose view of the directory lags must not leave a file out.
        names = broadcast_object([str(p.relative_to(temporary)) for p in files_of(temporary)])
        files = _hash_share(temporary, names[engine.global_rank :: engine.world_size])
    except (OSError, RuntimeError) as error:
        if isinstance(error, OSError) or "inline_container" in str(error):  # torch.save's own
            raise CheckpointWriteError(_why_not(checkpoints, error)) from error
        raise
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "progress": asdict(progress),
        "world_size": engine.world_size,
        "zero_stage": engine.zero_optimization_stage(),
        "optimizer": topology.optimizer_kind(engine.config),
        **facts,
        "files": sorted(
            (entry for share in gather_objects(files) for entry in share),
            key=lambda entry: entry["file"],
        ),
    }
    if engine.global_rank == 0:
        try:
            publish(temporary, manifest, keep)
        except OSError as error:
            raise CheckpointWriteError(_why_not(checkpoints, error)) from error
    barrier()
    return time.perf_counter() - began


def _why_not(checkpoints: Path, error: Exception) -> str:
    free = shutil.disk_usage(checkpoints).free / 1e9
    return (
        f"{checkpoints}: this checkpoint could not be written: {error}. {free:.2f} GB are free "
        f"there. The checkpoints before it are whole: make room, and start the same command again."
    )


def _hash_share(directory: Path, names: list[str]) -> list[dict[str, Any]]:
    """Sync and hash some files of a checkpoint: the ranks share the reading of what they wrote."""
    entries = []
    for path in (directory / name for name in names):
        with open(path, "rb+") as file:
            os.fsync(file.fileno())
        entries.append(
            {
                "file": str(path.relative_to(directory)),
                "size_bytes": path.stat().st_size,
                "sha256": sha256_file(path),
            }
        )
    for child in {path.parent for path in files_of(directory)} | {directory}:
        sync_directory(child)
    return entries


def same_on_all_ranks(found: Checkpoint | None, run_dir: Path) -> Checkpoint | None:
    """Return the checkpoint that rank 0 found, as this rank reads it. Every rank must call.

    Hosts may see a shared directory differently for a while; each must load the same checkpoint.

    Raises:
        ConfigError: on every rank, when a host cannot read it, or reads another manifest.
    """
    name, digest = broadcast_object((found.directory.name, found.digest) if found else (None, None))
    if name is None:
        return None
    mine, problem = None, ""
    try:
        mine = read(Path(run_dir) / "checkpoints" / name)
        if mine.digest != digest:
            problem = f"{mine.directory / MANIFEST}: not the manifest that the first rank reads."
    except CheckpointError as error:
        problem = str(error)
    agree(not problem, f"{problem} All hosts must share --run_dir {run_dir}.")
    return mine


def load(
    engine: Any,
    checkpoint: Checkpoint,
    plan: Plan,
    reshard: Callable[[Any, Path, dict[str, Any]], None],
) -> Progress:
    """Verify a checkpoint on all ranks, then load it into the engine. Every rank must call.

    No file is opened before the checksum of every one has been compared, and then only as data.

    Args:
        plan: of this run.
        reshard: loads the files below a directory, whose manifest is given too, if they are cut
            for another topology (`zerolm.reshard.load`).

    Raises:
        CheckpointError: each file that is not what the manifest says, on every rank alike; or
            states that cannot be cut anew.
    """
    share = problems_of(checkpoint, engine.global_rank, engine.world_size)
    problems = [line for lines in gather_objects(share) for line in lines]
    if problems:
        older = [path.name for path in by_step(checkpoint.directory.parent)[:-1]]
        remedy = (
            f"Restore it, or move {checkpoint.directory} away to resume from {older[-1]}."
            if older
            else "Restore it; there is no older checkpoint. Nothing was deleted."
        )
        raise CheckpointError([f"{line}. {remedy}" for line in problems])
    if plan.cut_anew(checkpoint.manifest):
        where = str(checkpoint.directory / MANIFEST)
        problems = topology.problems(checkpoint.manifest, where, plan.ds_config)
        if problems:
            raise CheckpointError(problems)
        reshard(engine, checkpoint.directory, checkpoint.manifest)
        return checkpoint.progress
    with only_data(engine):
        path, _ = engine.load_checkpoint(
            str(checkpoint.directory.parent), tag=checkpoint.directory.name
        )
    if path is None:
        raise CheckpointError(f"{checkpoint.directory}: DeepSpeed loaded nothing from it.")
    return checkpoint.progress
