"""Restores a run from an object store: `zerolm restore URL RUN_DIR`.

`pretrain.py --upload_to` does the same when its run directory has no checkpoint. The newest
complete checkpoint is fetched into a temporary directory, which is renamed once every file matches
the manifest. If the checkpoint is damaged, the damage is logged and the previous checkpoint is
fetched. A checkpoint without a manifest counts as missing. A store that does not respond is an
error, since the run must not restart at step 0.
"""

import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypedDict

from zerolm.checkpoint.checksums import checksum_of
from zerolm.checkpoint.directory import Checkpoint, publish, read
from zerolm.checkpoint.manifest import ListedFile, files_problem, parse_manifest
from zerolm.checkpoint.rotation import point_to, remove_unfinished
from zerolm.common.errors import CheckpointError, RecordError
from zerolm.common.files import is_file, make_directories, sync_directory, sync_tree
from zerolm.common.records import parse_record
from zerolm.common.store import OFF, Mismatch, Missing, StoreError
from zerolm.run_dir import events
from zerolm.run_dir.files import MANIFEST, TEMPORARY, RunFiles, checkpoint_name
from zerolm.upload.rules import is_lost
from zerolm.upload.run_store import CHECKSUMS, RECORD_DIRECTORY, Store, record_files

STREAMS = 4


class _Listed(TypedDict):
    files: list[ListedFile]


def restore(
    url: str, run_dir: Path, step: int | None = None, log: Callable[[str], None] = print
) -> Checkpoint | None:
    """Fetch a store's newest complete checkpoint, and the run's record that is stored with it.

    Args:
        run_dir: run directory, which the caller must lock so that no run writes to it.
        step: fetch the checkpoint from this step instead of the newest checkpoint.
        log: called with one line for each damaged checkpoint and for the restored checkpoint.

    Returns:
        The checkpoint on disk, or None if the store contains no complete checkpoint.

    Raises:
        CheckpointError: the store cannot be read, all its checkpoints are damaged, it has no
            checkpoint from `step`, or there is not enough free disk space.
    """
    start = time.monotonic()
    problems: list[str] = []
    steps = complete_steps(url, step)
    try:
        store = Store(url)
        for name in reversed(steps):
            try:
                size = _fetch(store, name, run_dir)
            except Mismatch as error:
                problems.append(f"{error}. {store.url}/{name} is damaged")
                log(f"restore: {problems[-1]}")
                continue
            seconds = time.monotonic() - start
            values = {"url": store.url, "bytes": size, "seconds": round(seconds, 3)}
            checkpoint = _log_restored(run_dir, name, problems, values)
            log(f"restore: {name} from {store.url}, {size / 1e6:.1f} MB in {seconds:.1f} s")
            return checkpoint
    except StoreError as error:
        raise _unreadable(error) from error
    if problems:
        raise CheckpointError(
            [*problems, f"{url}: contains no undamaged checkpoint. Nothing was changed"]
        )
    return None


def complete_steps(url: str, step: int | None = None) -> list[str]:
    """Return the names of a store's complete checkpoints, oldest first.

    Args:
        step: return only the checkpoint from this step.

    Raises:
        CheckpointError: the store cannot be read, or has no checkpoint from `step`.
    """
    try:
        steps = Store(url).complete()
    except StoreError as error:
        raise _unreadable(error) from error
    if step is None:
        return steps
    if checkpoint_name(step) not in steps:
        has = ", ".join(steps) or "none"
        raise CheckpointError(f"{url}: no complete {checkpoint_name(step)}; it has {has}.")
    return [checkpoint_name(step)]


def _unreadable(error: StoreError) -> CheckpointError:
    return CheckpointError(
        f"{error}. Nothing was restored, and a run would start at step 0. Wait until the store "
        f"responds, or correct the URL or the credentials."
    )


def if_lost(run_dir: Path, url: str | None) -> Checkpoint | None:
    """Restore a run from its store, if any, when the run directory has no checkpoint.

    Only rank 0 may call this. A store without a complete checkpoint is not an error.

    Raises:
        CheckpointError: see `restore`.
    """
    if url in (None, OFF) or not is_lost(run_dir):
        return None
    found = restore(str(url), run_dir)
    if found is None:
        print(f"restore: {url} has no complete checkpoint: the run starts at step 0", flush=True)
    return found


def _log_restored(
    run_dir: Path, name: str, problems: list[str], values: dict[str, Any]
) -> Checkpoint:
    """Log events for the restored and the damaged checkpoints; return the restored checkpoint."""
    checkpoint = read(RunFiles(run_dir).checkpoint(name))
    step = checkpoint.progress.step
    for problem in problems:
        events.append_event(run_dir, "checkpoint_damaged", step, problem=problem)
    events.append_event(run_dir, "restored", step, checkpoint=name, **values)
    return checkpoint


def _fetch(store: Store, name: str, run_dir: Path) -> int:
    """Fetch one checkpoint, publish it, and return its size in bytes.

    Raises:
        Mismatch: the checkpoint is damaged in the store.
        CheckpointError: there is not enough free disk space.
    """
    checkpoints = RunFiles(run_dir).checkpoints
    temporary = checkpoints / (TEMPORARY + name)
    checkpoint = Checkpoint(temporary, _manifest(store, name))
    record = _record(store, f"{name}/{CHECKSUMS}")
    size = checkpoint.size_bytes
    make_directories(checkpoints)
    free = shutil.disk_usage(checkpoints).free
    if free < size:
        raise CheckpointError(
            f"{checkpoints}: {name} needs {size / 1e9:.2f} GB, but the file system has only "
            f"{free / 1e9:.2f} GB free. Make room, or choose another directory."
        )
    remove_unfinished(checkpoints, temporary)
    temporary.mkdir()
    listed = checkpoint.manifest["files"]
    try:
        _fetch_files(store, name, temporary, [*listed, *record])
        _fetch_files(store, name, temporary, checkpoint.entries()[len(listed) :])
    except CheckpointError as error:
        raise Mismatch(str(error).replace(str(temporary), f"{store.url}/{name}")) from error
    except Mismatch:
        shutil.rmtree(temporary, ignore_errors=True)  # make room for the previous checkpoint
        raise
    _move_record(temporary / RECORD_DIRECTORY, run_dir)
    sync_tree(temporary)
    point_to(publish(temporary, checkpoint.manifest))
    return size


def _fetch_files(store: Store, name: str, temporary: Path, entries: list[ListedFile]) -> None:
    def fetch(entry: ListedFile) -> None:
        target = temporary / entry["file"]
        target.parent.mkdir(parents=True, exist_ok=True)
        store.fetch(f"{name}/{entry['file']}", target, checksum_of(entry), entry["size_bytes"])

    with ThreadPoolExecutor(STREAMS) as pool:
        list(pool.map(fetch, entries))


def _move_record(fetched: Path, run_dir: Path) -> None:
    """Move the run's record into the run directory before the checkpoint is published."""
    files = RunFiles(run_dir)
    printed = {files.console, files.earlier_console}  # already contain lines from this start
    appended = {files.events, *printed}
    for file in record_files(fetched):
        source, target = fetched / file, run_dir / file
        if not is_file(source):
            if target not in printed:
                target.unlink(missing_ok=True)  # written after the checkpoint
        elif target not in appended or not is_file(target) or _is_longer(source, target):
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(source, target)
    sync_directory(run_dir)
    shutil.rmtree(fetched, ignore_errors=True)


def _is_longer(source: Path, target: Path) -> bool:
    """Return whether `source` is longer than another copy of the same append-only log."""
    return source.stat().st_size > target.stat().st_size


def _manifest(store: Store, name: str) -> dict[str, Any]:
    """Read and check the manifest of a checkpoint.

    Raises:
        Mismatch: the manifest is missing, damaged, or belongs to another step.
    """
    where = f"{store.url}/{name}/{MANIFEST}"
    try:
        manifest = parse_manifest(store.read(f"{name}/{MANIFEST}"), where)
    except Missing as error:
        raise Mismatch(f"{where}: missing") from error
    except CheckpointError as error:
        raise Mismatch(str(error).rstrip(".")) from error
    if checkpoint_name(manifest["progress"]["step"]) != name:
        raise Mismatch(f"{where}: belongs to another step")
    return manifest


def _record(store: Store, name: str) -> list[ListedFile]:
    """Read and check the list of files in the run's record.

    Raises:
        Mismatch: the list is missing or damaged, or contains a path outside the checkpoint.
    """
    try:
        content = parse_record(store.read(name), f"{store.url}/{name}", _Listed)
    except Missing as error:
        raise Mismatch(f"{store.url}/{name}: missing") from error
    except RecordError as error:
        raise Mismatch(str(error)) from error
    if problem := files_problem(content["files"]):
        raise Mismatch(f"{store.url}/{name}: {problem}")
    return content["files"]
