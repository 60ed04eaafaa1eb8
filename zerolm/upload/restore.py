"""Bring a run back from an object store: `python -m zerolm restore URL RUN_DIR`.

Also what `pretrain.py --upload_to` does when its run directory has no checkpoint. The newest whole
checkpoint is fetched under a temporary name, every file is compared with its manifest on the way,
and the directory gets its name last. A damaged one is named, and the one before it is taken; a step
without a manifest does not exist. A store that does not answer is an error, never step 0.
"""

import json
import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any

from zerolm import events
from zerolm.checkpoint_directory import (
    MANIFEST,
    TEMPORARY,
    Checkpoint,
    directory_name,
    publish,
    read,
)
from zerolm.errors import CheckpointError
from zerolm.files import write_json
from zerolm.object_store import (
    CHECKSUMS,
    OFF,
    RECORD_DIRECTORY,
    RECORD_FILES,
    RECORD_PATTERN,
    Mismatch,
    Missing,
    Store,
    StoreError,
)
from zerolm.upload_rules import is_lost

STREAMS = 4


def restore(
    url: str, run_dir: Path, step: int | None = None, say: Callable[[str], None] = print
) -> Checkpoint | None:
    """Fetch the newest whole checkpoint of a store, and the run's record that belongs to it.

    Args:
        run_dir: of which the caller holds the lock, so that no run is going on in it.
        step: this one instead of the newest.
        say: told what is damaged, and what was done.

    Returns:
        The checkpoint on disk; None when the store holds no whole one.

    Raises:
        CheckpointError: the store cannot be read, every checkpoint in it is damaged, the one asked
            for is not there, or there is no room for it.
    """
    began = time.monotonic()
    problems: list[str] = []
    steps = whole_steps(url, step)
    try:
        store = Store(url)
        for name in reversed(steps):
            try:
                size = _fetch(store, name, run_dir)
            except Mismatch as error:
                problems.append(f"{error}. {store.url}/{name} is damaged")
                say(f"restore: {problems[-1]}")
                continue
            return _told(run_dir, name, store.url, problems, size, time.monotonic() - began, say)
    except StoreError as error:
        raise _unreadable(error) from error
    if problems:
        raise CheckpointError([*problems, f"{url}: no checkpoint in it is whole. Nothing was lost"])
    return None


def whole_steps(url: str, step: int | None = None) -> list[str]:
    """Return the whole checkpoints of a store in the order of time, or the one asked for, by name.

    Raises:
        CheckpointError: the store cannot be read, or the one asked for is not there.
    """
    try:
        steps = Store(url).whole()
    except StoreError as error:
        raise _unreadable(error) from error
    if step is None:
        return steps
    if directory_name(step) not in steps:
        has = ", ".join(steps) or "none"
        raise CheckpointError(f"{url}: no whole {directory_name(step)}; it has {has}.")
    return [directory_name(step)]


def _unreadable(error: StoreError) -> CheckpointError:
    return CheckpointError(
        f"{error}. Nothing was restored, and a run would begin at step 0: wait until the store "
        f"answers, or correct the URL or the credentials."
    )


def if_lost(run_dir: Path, url: str | None) -> Checkpoint | None:
    """Restore a run whose directory has no checkpoint, if it has a store. The first rank calls.

    Raises:
        CheckpointError: as `restore`. A store that holds nothing whole is no error: the run begins.
    """
    if url in (None, OFF) or not is_lost(run_dir):
        return None
    found = restore(str(url), run_dir)
    if found is None:
        print(f"restore: {url} has no whole checkpoint: the run begins at step 0", flush=True)
    return found


def _told(
    run_dir: Path,
    name: str,
    url: str,
    problems: list[str],
    size: int,
    seconds: float,
    say: Callable[[str], None],
) -> Checkpoint:
    found = read(run_dir / "checkpoints" / name)
    step = found.progress.step
    for problem in problems:
        events.append(run_dir, "checkpoint_damaged", step, problem=problem)
    about = {"checkpoint": name, "url": url, "bytes": size, "seconds": round(seconds, 3)}
    events.append(run_dir, "restored", step, **about)
    say(f"restore: {name} from {url}, {size / 1e6:.1f} MB in {seconds:.1f} s")
    return found


def _fetch(store: Store, name: str, run_dir: Path) -> int:
    """Fetch one checkpoint and publish it; return its bytes.

    Raises:
        Mismatch: what is damaged.
    """
    checkpoints = run_dir / "checkpoints"
    manifest, listed = _listed(store, f"{name}/{MANIFEST}")
    _, record = _listed(store, f"{name}/{CHECKSUMS}")
    size = sum(entry["size_bytes"] for entry in listed)
    checkpoints.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(checkpoints).free
    if free < size:
        raise CheckpointError(
            f"{checkpoints}: {name} needs {size / 1e9:.2f} GB, its file system has "
            f"{free / 1e9:.2f} GB free. Make room, or choose another directory."
        )
    temporary = checkpoints / (TEMPORARY + name)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    write_json(temporary / MANIFEST, manifest)
    try:
        if directory_name(read(temporary).progress.step) != name:
            raise Mismatch(f"{store.url}/{name}/{MANIFEST}: is of another step")
        _fetch_files(store, name, temporary, [*listed, *record])
    except CheckpointError as error:
        raise Mismatch(str(error).replace(str(temporary), f"{store.url}/{name}")) from error
    except Mismatch:
        shutil.rmtree(temporary, ignore_errors=True)  # the one before needs the room
        raise
    _keep_record(temporary / RECORD_DIRECTORY, run_dir)
    publish(temporary, manifest)
    return size


def _fetch_files(store: Store, name: str, temporary: Path, entries: list[dict[str, Any]]) -> None:
    def fetch(entry: dict[str, Any]) -> None:
        target = temporary / entry["file"]
        target.parent.mkdir(parents=True, exist_ok=True)
        store.fetch(f"{name}/{entry['file']}", target, entry["sha256"], entry["size_bytes"])

    with ThreadPoolExecutor(STREAMS) as pool:
        list(pool.map(fetch, entries))


def _keep_record(fetched: Path, run_dir: Path) -> None:
    """Move the run's record to its place, before the checkpoint appears that needs it."""
    archives = sorted(path.name for path in fetched.glob(RECORD_PATTERN))
    for file in (*RECORD_FILES, *archives):
        source, ours = fetched / file, run_dir / file
        if not source.is_file():
            ours.unlink(missing_ok=True)  # of a time that the checkpoint knows nothing of
        elif file != events.EVENTS or not ours.is_file() or _is_longer(source, ours):
            ours.parent.mkdir(parents=True, exist_ok=True)
            os.replace(source, ours)
    shutil.rmtree(fetched, ignore_errors=True)


def _is_longer(source: Path, ours: Path) -> bool:
    """Compare two copies of a log that only grows: the longer one has all that the other has."""
    return source.stat().st_size > ours.stat().st_size


def _listed(store: Store, name: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Read a list of files with sizes and checksums, trusting nothing in it."""
    try:
        content = json.loads(store.read(name))
        entries: list[dict[str, Any]] = [
            {
                "file": str(entry["file"]),
                "size_bytes": int(entry["size_bytes"]),
                "sha256": str(entry["sha256"]),
            }
            for entry in content["files"]
        ]
    except Missing as error:
        raise Mismatch(f"{store.url}/{name}: missing") from error
    except (ValueError, KeyError, TypeError) as error:
        raise Mismatch(f"{store.url}/{name}: cannot be read: {error!r}") from error
    for entry in entries:
        path = PurePosixPath(entry["file"])
        if path.is_absolute() or ".." in path.parts:
            raise Mismatch(f"{store.url}/{name}: {entry['file']!r} leaves the checkpoint")
    return content, entries
