"""Send published checkpoints to an object store: `zerolm upload RUN_DIR URL`.

`Uploads` starts this process during a run; users may also start it. The process sends the newest
checkpoint that is missing in the store, then the previous one, and so on. It creates hard links
first, so a checkpoint may be rotated away during its upload. The manifest is sent last, since it
marks a checkpoint as complete. Sent files are recorded, so an upload resumes where a killed one
stopped. Failures are logged as events and printed. Must not depend on torch.
"""

import contextlib
import json
import os
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from zerolm.checkpoint.checksums import SHA256, Checksum, checksum_file, checksum_of
from zerolm.checkpoint.directory import published_checkpoints, read
from zerolm.common.errors import CheckpointError, ConfigError, RecordError
from zerolm.common.faults import fault_point
from zerolm.common.files import exists, is_dir, is_file, write_json
from zerolm.common.locks import FileLock, LockTaken, wait_for_lock
from zerolm.common.records import parse_record
from zerolm.common.store import Mismatch, StoreError
from zerolm.run_dir import events, jsonl
from zerolm.run_dir.files import MANIFEST, RunFiles, checkpoint_directories, checkpoint_step
from zerolm.upload.run_store import CHECKSUMS, RECORD_DIRECTORY, Store, record_files

SENT_SUFFIX = ".sent"  # suffix of the list of a checkpoint's files that have been sent
STREAMS = 4
STALLED_SECONDS = 180.0  # if all attempts of a call take longer, a library hangs
LOCK_SECONDS = 10.0  # time for a killed run's upload process to notice and exit


def upload(run_dir: Path, url: str, keep: int) -> list[str]:
    """Send every published checkpoint that is not in the store, newest first.

    Args:
        run_dir: run directory; the run may still be in progress.
        keep: number of checkpoints to keep in the store (0: all); older checkpoints are not sent.

    Returns:
        The names of the checkpoints that were sent.

    Raises:
        ConfigError: another upload of this run is in progress, or `run_dir` is not a run directory.
        StoreError: all attempts of a call failed; the failure has been logged.
        CheckpointError: some checkpoints are damaged on disk; the other checkpoints were sent.
    """
    paths = RunFiles(run_dir)
    if not is_dir(paths.checkpoints):
        raise ConfigError(
            f"{run_dir}: not a run directory with checkpoints. Give the --run_dir of a run."
        )
    paths.uploads.mkdir(exist_ok=True)
    sent: list[str] = []
    damaged: dict[str, str] = {}
    sending = ""

    def failed(error: object) -> None:
        step = checkpoint_step(sending) if sending else -1
        print(f"upload: failed: {error}", flush=True)
        with contextlib.suppress(OSError):  # the run itself reports a full disk
            events.append_event(run_dir, "upload_failed", step, url=url, error=str(error))

    with _lock(paths.uploads_lock):
        _remove_links(run_dir)
        guard = StallGuard(failed)
        store = Store(url, guard.progress)
        try:
            _remove_partial(run_dir, store)
            while sending := _newest_missing(paths.checkpoints, store, keep, set(damaged)):
                try:
                    if _send(run_dir, sending, store):
                        sent.append(sending)
                        _rotate(store, keep)
                except (Mismatch, CheckpointError) as error:  # an older one may be intact
                    damaged[sending] = str(error)
                    failed(error)
        except StoreError as error:
            failed(error)
            raise
        finally:
            guard.close()
            _remove_links(run_dir)
    if damaged:
        raise CheckpointError(damaged.values())
    return sent


class StallGuard:
    """Ends this process if an upload makes no progress for `STALLED_SECONDS`.

    A hanging library call cannot be interrupted, and it is safe to end the process at any time.
    """

    def __init__(self, failed: Callable[[str], None]):
        self._progress_at, self._failed = time.monotonic(), failed
        self._closed = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def progress(self) -> None:
        self._progress_at = time.monotonic()

    def close(self) -> None:
        self._closed.set()

    def _watch(self) -> None:
        while not self._closed.wait(0.5):
            if time.monotonic() - self._progress_at > STALLED_SECONDS:
                self._failed(f"no progress for {STALLED_SECONDS:.0f} s")
                os._exit(1)


def _lock(path: Path) -> FileLock:
    """Acquire the lock for a run's uploads.

    Raises:
        ConfigError: another process holds the lock for longer than `LOCK_SECONDS`.
    """
    deadline = time.monotonic() + LOCK_SECONDS
    try:
        return wait_for_lock(path, lambda: time.monotonic() > deadline, poll_seconds=0.2)
    except LockTaken as error:
        raise ConfigError(f"{path}: another upload of this run is in progress.") from error


def _remove_links(run_dir: Path) -> None:
    for path in checkpoint_directories(RunFiles(run_dir).uploads):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)


def _remove_partial(run_dir: Path, store: Store) -> None:
    """Remove partially sent checkpoints from the store if they no longer exist on disk."""
    paths = RunFiles(run_dir)
    for sent_list in paths.uploads.glob(f"*{SENT_SUFFIX}"):
        name = sent_list.name.removesuffix(SENT_SUFFIX)
        if not exists(paths.checkpoint(name) / MANIFEST):
            if store.marker(name) is None:
                store.remove(name)
            sent_list.unlink()


def _newest_missing(checkpoints: Path, store: Store, keep: int, damaged: set[str]) -> str:
    """Return the name of the newest published checkpoint that is not in the store, or ""."""
    published = published_checkpoints(checkpoints)
    for directory in reversed(published[-keep:] if keep else published):
        if directory.name in damaged:
            continue
        with contextlib.suppress(FileNotFoundError):  # rotated away
            if (directory / MANIFEST).read_bytes() != store.marker(directory.name):
                return directory.name
    return ""


def _send(run_dir: Path, name: str, store: Store) -> bool:
    """Send a checkpoint; return False if it was rotated away before it could be linked."""
    start, step, paths = time.monotonic(), checkpoint_step(name), RunFiles(run_dir)
    staging = paths.uploads / name
    try:
        files, checksums = _stage(run_dir, name, staging)
    except (CheckpointError, FileNotFoundError) as error:
        shutil.rmtree(staging, ignore_errors=True)
        if not exists(paths.checkpoint(name) / MANIFEST):
            return False
        raise CheckpointError(f"{paths.checkpoint(name)} is damaged: {error}") from error
    manifest = (staging / MANIFEST).read_bytes()
    stored = store.files(name)
    if MANIFEST in stored:  # an older checkpoint with this name, which will be overwritten
        store.remove_file(f"{name}/{MANIFEST}")
    sent_list = staging.with_name(name + SENT_SUFFIX)
    sent = _read_sent_list(sent_list)

    def send(file: str) -> int:
        size = files[file].stat().st_size
        if sent.get(file) == checksums[file].digest and stored.get(file) == size:
            return 0
        fault_point("upload.file", step)
        store.send(files[file], f"{name}/{file}", checksums[file])
        jsonl.append_line(sent_list, json.dumps([file, checksums[file].digest]))
        return size

    with ThreadPoolExecutor(STREAMS) as pool:
        sent_bytes = sum(pool.map(send, files))
    arrived = store.files(name)
    for file, path in files.items():
        if arrived.get(file) != (size := path.stat().st_size):
            raise StoreError(
                f"{store.url}/{name}/{file}: {size} bytes were sent, but "
                f"{arrived.get(file, 'none')} arrived"
            )
    for file in sorted(arrived.keys() - files.keys()):
        store.remove_file(f"{name}/{file}")  # from an older checkpoint with this name
    fault_point("upload.marker", step)
    store.write(f"{name}/{MANIFEST}", manifest)
    sent_list.unlink(missing_ok=True)
    shutil.rmtree(staging, ignore_errors=True)
    seconds = round(time.monotonic() - start, 3)
    events.append_event(
        run_dir, "upload", step, checkpoint=name, url=store.url, bytes=sent_bytes, seconds=seconds
    )
    print(f"upload: {name} to {store.url}, {sent_bytes / 1e6:.1f} MB in {seconds} s", flush=True)
    return True


def _stage(run_dir: Path, name: str, staging: Path) -> tuple[dict[str, Path], dict[str, Checksum]]:
    """Link a checkpoint's files and copy the run's record into the directory `staging`.

    Returns:
        {name in the store: local file} and {name in the store: checksum}, without the manifest.

    Raises:
        FileNotFoundError: a file is missing, as the checkpoint was rotated away or is damaged.
        CheckpointError: the manifest cannot be read.
    """
    checkpoint = read(RunFiles(run_dir).checkpoint(name))
    (staging / RECORD_DIRECTORY).mkdir(parents=True)
    shutil.copyfile(checkpoint.directory / MANIFEST, staging / MANIFEST)
    files, checksums = {}, {}
    for entry in checkpoint.entries():
        source, target = checkpoint.directory / entry["file"], staging / entry["file"]
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(source, target)
        except FileNotFoundError:
            raise
        except OSError:  # without hard links, sending fails if the checkpoint is rotated away
            target = source
        files[entry["file"]], checksums[entry["file"]] = target, checksum_of(entry)
    for file in record_files(run_dir):
        source, record = run_dir / file, f"{RECORD_DIRECTORY}/{file}"
        if is_file(source):
            (staging / record).parent.mkdir(parents=True, exist_ok=True)
            try:
                shutil.copyfile(source, staging / record)
            except FileNotFoundError:  # rank0.log was just renamed to rank0-earlier.log
                continue
            files[record] = staging / record
            checksums[record] = checksum_file(staging / record, SHA256)
    listed = [
        {"file": file, "size_bytes": files[file].stat().st_size, SHA256: checksums[file].digest}
        for file in sorted(files)
        if file.startswith(f"{RECORD_DIRECTORY}/")
    ]
    write_json(staging / CHECKSUMS, {"files": listed})
    files[CHECKSUMS] = staging / CHECKSUMS
    checksums[CHECKSUMS] = checksum_file(staging / CHECKSUMS, SHA256)
    return files, checksums


def _read_sent_list(path: Path) -> dict[str, str]:
    """Return {file: digest} for the files that a killed upload had sent; skip incomplete lines."""
    sent: dict[str, str] = {}
    with contextlib.suppress(OSError):  # without the list, all files are sent again
        for line in path.read_bytes().splitlines() if path.is_file() else ():
            with contextlib.suppress(RecordError):
                file, digest = parse_record(line, path, tuple[str, str])
                sent[file] = digest
    return sent


def _rotate(store: Store, keep: int) -> None:
    """Remove the oldest complete checkpoints from the store so that `keep` remain."""
    for step in store.complete(damaged=False)[:-keep] if keep else []:
        fault_point("upload.rotate", checkpoint_step(step))
        store.remove(step)
