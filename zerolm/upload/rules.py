"""Check `--upload_to` before a run starts, and read the run.json that a restore would fetch.

Must not change the store or the settings.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zerolm.checkpoint.directory import candidates
from zerolm.common.errors import CheckpointError, RecordError
from zerolm.common.records import parse_record, read_json
from zerolm.common.store import OFF, Missing, StoreError, call_within
from zerolm.common.url import url_problem
from zerolm.config.settings import COMMAND_LINE, Settings
from zerolm.run_dir.records import RunJson
from zerolm.upload.run_store import RECORD_DIRECTORY, Store

REACH_SECONDS = 90.0  # time limit for reaching the store when a run starts


def store_url(settings: Settings) -> str | None:
    """Return the store's URL, or None if the run has no store."""
    return None if settings.upload_to == OFF else settings.upload_to


def upload_problems(settings: Settings) -> list[str]:
    """Return problems with the upload settings, without using the network."""
    url = store_url(settings)
    if url is None:
        return []
    where = f"{settings.where('upload_to')}: {url}"
    problem = url_problem(url)
    if problem:
        return [f"{where}: {problem}"]
    file, separator, _ = settings.where("upload_to").partition(": settings.")
    if separator and settings.where("run_dir").startswith(COMMAND_LINE):
        recorded = read_json(file, "a run.json")
        recorded = recorded.get("settings", recorded)
        if Path(str(recorded.get("run_dir"))).resolve() != Path(str(settings.run_dir)).resolve():
            return [
                f"{where} belongs to the run in {recorded.get('run_dir')}, but --run_dir is "
                f"{settings.run_dir}. Give another --upload_to, or off."
            ]
    return []


def is_lost(run_dir: Path) -> bool:
    """Return whether a run directory has no complete checkpoint, as it is new, lost or damaged."""
    try:
        return not candidates(run_dir)[0]
    except CheckpointError:
        return True


def stored_record(settings: Settings, problems: list[str]) -> tuple[str, Mapping[str, Any]] | None:
    """Return (URL, contents) of the run.json that a restore would fetch, or None.

    Reads from the store, so only one rank should call it.

    Args:
        problems: list to append a problem to if the store cannot be read, since the run might then
            restart at step 0.
    """
    url = store_url(settings)
    if url is None or not is_lost(Path(settings.run_dir or "")):
        return None
    try:
        return call_within(REACH_SECONDS, lambda: _newest_record(url))
    except StoreError as error:
        problems.append(
            f"{settings.where('upload_to')}: {url} cannot be read, and --run_dir "
            f"{settings.run_dir} has no checkpoint: the run might restart at step 0. {error}. "
            f"Correct the URL or the credentials, wait until the store responds, or use "
            f"--upload_to off."
        )
        return None


def _newest_record(url: str) -> tuple[str, Mapping[str, Any]] | None:
    store = Store(url, attempts=2)
    for name in reversed(store.complete()):
        where = f"{name}/{RECORD_DIRECTORY}/run.json"
        try:
            return f"{store.url}/{where}", dict(parse_record(store.read(where), where, RunJson))
        except (Missing, RecordError):  # its checkpoint is damaged as well
            continue
    return None
