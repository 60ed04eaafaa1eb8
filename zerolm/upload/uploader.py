"""Send published checkpoints to an object store: `python -m zerolm upload RUN_DIR URL`.

A process of its own, started by a run (zerolm/uploads.py) or by hand. It sends the newest
checkpoint that the store has not, then the one before, and ends. It takes hard links first, so a
checkpoint may be rotated away while it is sent. Files go first and the manifest last: without it
nothing exists over there. What was sent is noted, so that a killed pass is gone on with. Whatever
fails is an event and a line on the console. No torch here.
"""

import contextlib
import fcntl
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from zerolm import events, processes
from zerolm.checkpoint_directory import MANIFEST, by_step, read
from zerolm.errors import CheckpointError, ConfigError
from zerolm.faults import fault_point
from zerolm.files import sha256_file, write_json
from zerolm.object_store import (
    CHECKSUMS,
    RECORD_DIRECTORY,
    RECORD_FILES,
    RECORD_PATTERN,
    Mismatch,
    Store,
    StoreError,
)

DIRECTORY = "uploads"  # below the run directory: links of what is being sent, notes, a lock
NOTES = ".sent"  # ends the name of a list of what a pass has sent of a step
STREAMS = 4
STALLED_SECONDS = 180.0  # longer than all attempts of a call: some library hangs
LOCK_SECONDS = 10.0  # the child of a run that was killed needs a moment to see it


def upload(run_dir: Path, url: str, keep: int, of_process: int | None = None) -> list[str]:
    """Send every published checkpoint that is not in the store, the newest first.

    Args:
        run_dir: of a run, which may be going on.
        url: of the store.
        keep: checkpoints to keep in the store, 0 for all; older ones are not sent either.
        of_process: the run that this process serves, and ends with.

    Returns:
        The names of the checkpoints that were sent.

    Raises:
        ConfigError: another upload of this run is at work, or the directory holds no run.
        StoreError: what failed after all attempts; it was noted and said.
        CheckpointError: checkpoints that are damaged on disk; the others were sent.
    """
    checkpoints = run_dir / "checkpoints"
    if not checkpoints.is_dir():
        raise ConfigError(f"{run_dir}: no checkpoints/ in it, so this is not a run directory.")
    (run_dir / DIRECTORY).mkdir(exist_ok=True)
    sent: list[str] = []
    damaged: dict[str, str] = {}
    sending = ""

    def failed(error: object) -> None:
        step = int(sending.rpartition("-")[2]) if sending else -1
        print(f"upload: failed: {error}", flush=True)
        with contextlib.suppress(OSError):  # a full disk is reported by whoever needs the space
            events.append(run_dir, "upload_failed", step, url=url, error=str(error))

    with _only_one(run_dir / DIRECTORY / "lock"):
        _drop_links(run_dir)
        pulse = Pulse(of_process, failed)
        store = Store(url, pulse)
        try:
            _drop_halves(run_dir, store)
            while sending := _newest_missing(checkpoints, store, keep, set(damaged)):
                try:
                    if _send(run_dir, sending, store):
                        sent.append(sending)
                        _rotate(store, keep)
                except (Mismatch, CheckpointError) as error:  # the one before may be whole
                    damaged[sending] = str(error)
                    failed(error)
        except StoreError as error:
            failed(error)
            raise
        finally:
            pulse.close()
            _drop_links(run_dir)
    if damaged:
        raise CheckpointError(damaged.values())
    return sent


class Pulse:
    """Ends this process when nothing moves any more, or when the run that it serves is gone.

    A library that hangs in a call cannot be interrupted from inside. To end is safe here at any
    time, until `close`.
    """

    def __init__(self, of_process: int | None, failed: Callable[[str], None]):
        self._moved, self._of_process, self._failed = time.monotonic(), of_process, failed
        self._closed = threading.Event()
        if of_process is not None:
            processes.be_quiet()
        threading.Thread(target=self._watch, daemon=True).start()

    def __call__(self) -> None:
        self._moved = time.monotonic()

    def close(self) -> None:
        self._closed.set()

    def _watch(self) -> None:
        while not self._closed.wait(0.5):
            if self._of_process is not None and os.getppid() != self._of_process:
                os._exit(1)
            if time.monotonic() - self._moved > STALLED_SECONDS:
                self._failed(f"nothing moved for {STALLED_SECONDS:.0f} s")
                os._exit(1)


@contextlib.contextmanager
def _only_one(path: Path) -> Iterator[None]:
    with open(path, "a+") as lock:
        deadline = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() > deadline:
                    raise ConfigError(f"{path}: another upload of this run is at work.") from error
                time.sleep(0.2)
            except OSError:  # a file system without locks: one is started at a time
                break
        yield


def _drop_links(run_dir: Path) -> None:
    for path in (run_dir / DIRECTORY).glob("step-*"):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)


def _drop_halves(run_dir: Path, store: Store) -> None:
    """Remove from the store what a killed pass has begun and nobody can complete any more."""
    for notes in (run_dir / DIRECTORY).glob(f"step-*{NOTES}"):
        name = notes.name.removesuffix(NOTES)
        if not (run_dir / "checkpoints" / name / MANIFEST).exists():
            if store.marker(name) is None:
                store.remove(name)
            notes.unlink()


def _newest_missing(checkpoints: Path, store: Store, keep: int, damaged: set[str]) -> str:
    """Return the name of the newest published checkpoint that the store has not; '' for none."""
    published = by_step(checkpoints)
    for directory in reversed(published[-keep:] if keep else published):
        if directory.name in damaged:
            continue
        with contextlib.suppress(FileNotFoundError):  # rotated away
            if (directory / MANIFEST).read_bytes() != store.marker(directory.name):
                return directory.name
    return ""


def _send(run_dir: Path, name: str, store: Store) -> bool:
    """Send one checkpoint; False when it was rotated away before its links were taken."""
    began, step = time.monotonic(), int(name.rpartition("-")[2])
    staging = run_dir / DIRECTORY / name
    try:
        files, checksums = _stage(run_dir, name, staging)
    except (CheckpointError, FileNotFoundError) as error:
        shutil.rmtree(staging, ignore_errors=True)
        if not (run_dir / "checkpoints" / name / MANIFEST).exists():
            return False
        raise CheckpointError(f"{run_dir}/checkpoints/{name} is damaged: {error}") from error
    manifest = (staging / MANIFEST).read_bytes()
    there = store.files(name)
    if MANIFEST in there:  # of another content under this name, which is not whole from here on
        store.remove_file(f"{name}/{MANIFEST}")
    notes = staging.with_name(name + NOTES)
    already = _noted(notes)

    def send(file: str) -> int:
        size = files[file].stat().st_size
        if already.get(file) == checksums[file] and there.get(file) == size:
            return 0
        fault_point("upload.file", step)
        store.send(files[file], f"{name}/{file}", checksums[file])
        events.append_line(notes, json.dumps([file, checksums[file]]))
        return size

    with ThreadPoolExecutor(STREAMS) as pool:
        sent_bytes = sum(pool.map(send, files))
    arrived = store.files(name)
    for file, path in files.items():
        if arrived.get(file) != (size := path.stat().st_size):
            raise StoreError(
                f"{store.url}/{name}/{file}: {size} bytes were sent, {arrived.get(file, 'none')} "
                f"are there"
            )
    for file in sorted(arrived.keys() - files.keys()):
        store.remove_file(f"{name}/{file}")  # of another content under this name
    fault_point("upload.marker", step)
    store.write(f"{name}/{MANIFEST}", manifest)
    notes.unlink(missing_ok=True)
    shutil.rmtree(staging, ignore_errors=True)
    seconds = round(time.monotonic() - began, 3)
    events.append(
        run_dir, "upload", step, checkpoint=name, url=store.url, bytes=sent_bytes, seconds=seconds
    )
    print(f"upload: {name} to {store.url}, {sent_bytes / 1e6:.1f} MB in {seconds} s", flush=True)
    return True


def _stage(run_dir: Path, name: str, staging: Path) -> tuple[dict[str, Path], dict[str, str]]:
    """Take hold of a checkpoint's files, and of the run's record as it is now.

    Returns:
        {name in the store: file here} and {name in the store: SHA-256}, without the manifest.

    Raises:
        FileNotFoundError: a file is missing: the checkpoint was rotated away, or is damaged.
        CheckpointError: its manifest cannot be read.
    """
    checkpoint = read(run_dir / "checkpoints" / name)
    (staging / RECORD_DIRECTORY).mkdir(parents=True)
    shutil.copyfile(checkpoint.directory / MANIFEST, staging / MANIFEST)
    files, checksums = {}, {}
    for entry in checkpoint.manifest["files"]:
        source, target = checkpoint.directory / entry["file"], staging / entry["file"]
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(source, target)
        except FileNotFoundError:
            raise
        except OSError:  # no hard links here: if it is rotated away, sending it fails
            target = source
        files[entry["file"]], checksums[entry["file"]] = target, entry["sha256"]
    archives = sorted(path.name for path in run_dir.glob(RECORD_PATTERN))
    for file in (*RECORD_FILES, *archives):
        source, record = run_dir / file, f"{RECORD_DIRECTORY}/{file}"
        if source.is_file():
            (staging / record).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, staging / record)
            files[record], checksums[record] = staging / record, sha256_file(staging / record)
    listed = [
        {"file": file, "size_bytes": files[file].stat().st_size, "sha256": checksums[file]}
        for file in sorted(files)
        if file.startswith(f"{RECORD_DIRECTORY}/")
    ]
    write_json(staging / CHECKSUMS, {"files": listed})
    files[CHECKSUMS], checksums[CHECKSUMS] = staging / CHECKSUMS, sha256_file(staging / CHECKSUMS)
    return files, checksums


def _noted(path: Path) -> dict[str, str]:
    """Return {file: SHA-256} of what a killed pass has sent; half a line counts for nothing."""
    noted: dict[str, str] = {}
    if path.is_file():
        for line in path.read_text(errors="replace").splitlines():
            with contextlib.suppress(ValueError, TypeError):
                file, sha256 = json.loads(line)
                noted[file] = sha256
    return noted


def _rotate(store: Store, keep: int) -> None:
    """Remove the oldest whole checkpoints beyond `keep`, now that a newer one is whole."""
    for step in store.whole(damaged=False)[:-keep] if keep else []:
        fault_point("upload.rotate", int(step.rpartition("-")[2]))
        store.remove(step)
