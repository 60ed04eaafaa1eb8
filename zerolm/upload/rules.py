"""What `--upload_to` must be, and what is there already: looked at before a run begins.

Knows settings and the store; must not change either.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zerolm.checkpoint_directory import candidates
from zerolm.errors import CheckpointError
from zerolm.object_store import OFF, RECORD_DIRECTORY, Missing, Store, StoreError, within
from zerolm.settings import COMMAND_LINE, Settings
from zerolm.url import url_problem
from zerolm.values import read_json

REACH_SECONDS = 90.0  # for the first answers of a store, when a run starts


def store_url(settings: Settings) -> str | None:
    """Return the URL of the store, None when the run has none."""
    return None if settings.upload_to == OFF else settings.upload_to


def upload_problems(settings: Settings) -> list[str]:
    """Return what is wrong with the settings of uploads, without any network."""
    url = store_url(settings)
    if url is None:
        return []
    where = f"{settings.where('upload_to')}: {url}"
    problem = url_problem(url)
    if problem:
        return [f"{where}, {problem}"]
    file, separator, _ = settings.where("upload_to").partition(": settings.")
    if separator and settings.where("run_dir").startswith(COMMAND_LINE):
        theirs = read_json(file, "a run.json")
        theirs = theirs.get("settings", theirs)
        if theirs.get("run_dir") != settings.run_dir:
            return [
                f"{where}, belongs to the run in {theirs.get('run_dir')}, and --run_dir is "
                f"{settings.run_dir}. Give --upload_to a place of its own, or off."
            ]
    return []


def is_lost(run_dir: Path) -> bool:
    """Tell whether a run directory has no checkpoint to go on from: never had, or all are lost."""
    try:
        return not candidates(run_dir)[0]
    except CheckpointError:
        return True


def stored_record(settings: Settings, problems: list[str]) -> tuple[str, Mapping[str, Any]] | None:
    """Return the run.json that a restore would bring, and where it is; None when none would be.

    Asks the store, so one rank should. Adds to `problems` when the store does not answer: without
    it nobody knows whether the run begins at step 0.
    """
    url = store_url(settings)
    if url is None or not is_lost(Path(settings.run_dir or "")):
        return None
    try:
        return within(REACH_SECONDS, lambda: _newest_record(url))
    except StoreError as error:
        problems.append(
            f"{settings.where('upload_to')}: {url}, cannot be read, and --run_dir "
            f"{settings.run_dir} has no checkpoint: the run might begin again at step 0. {error}. "
            f"Correct the URL or the credentials, wait until it answers, or use --upload_to off."
        )
        return None


def _newest_record(url: str) -> tuple[str, Mapping[str, Any]] | None:
    store = Store(url, attempts=2)
    for name in reversed(store.whole()):
        where = f"{name}/{RECORD_DIRECTORY}/run.json"
        try:
            return f"{store.url}/{where}", json.loads(store.read(where))
        except (Missing, ValueError):  # damaged: so is its checkpoint
            continue
    return None
