"""The names under which W&B shows a run, and whether W&B is used online or offline.

Reads run.json, the environment and netrc; must not import W&B.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

from zerolm.common.errors import RecordError
from zerolm.common.records import Count, Name, read_record
from zerolm.run_dir.files import TRACKER_STATE, RunFiles
from zerolm.run_dir.records import ancestors

MAX_TAG_CHARACTERS = 64  # W&B rejects longer tags
MAX_NAME_CHARACTERS = 128  # of a project, group or run


class _Id(TypedDict):
    id: Name


class TrackerState(_Id, total=False):
    """The contents of `wandb/run.json`: id and URL of the W&B run that the next start continues."""

    rollbacks: Count
    url: str


@dataclass(frozen=True)
class Identity:
    """The names of a run in W&B.

    Attributes:
        entity: user or team; None means the owner of the key.
        project: None means the project in W&B's settings file, or zerolm.
        group: name of the group with all W&B runs for the run directory.
    """

    mode: str
    project: str | None
    entity: str | None
    group: str
    name: str
    tags: tuple[str, ...]


def identity(run_dir: Path, record: Mapping[str, Any], suffix: str = "") -> Identity:
    """Return the identity of a W&B run.

    Args:
        run_dir: run directory, whose name is the default name.
        suffix: text to append to the name, for another W&B run in the same group.
    """
    settings = record.get("settings", {})
    name = settings.get("wandb_name") or run_dir.resolve().name
    tags = split_tags(settings.get("wandb_tags") or "")
    family = ancestors(record.get("branch"))
    tags += ["branch"] * bool(family)
    tags += [f"of {name}@{step}"[-MAX_TAG_CHARACTERS:] for name, step in family]
    return Identity(
        mode=settings.get("wandb") or "auto",
        project=settings.get("wandb_project"),
        entity=settings.get("wandb_entity"),
        group=(settings.get("wandb_group") or name)[:MAX_NAME_CHARACTERS],
        name=name[: MAX_NAME_CHARACTERS - len(suffix)] + suffix,
        tags=tuple(dict.fromkeys(tags)),
    )


def split_tags(text: str) -> list[str]:
    return [tag.strip() for tag in text.split(",") if tag.strip()]


def page_of(run_dir: Path) -> str | None:
    """Return the URL of a run's W&B page; None if there is no page, for example offline."""
    try:
        state = read_record(RunFiles(run_dir).tracker("wandb") / TRACKER_STATE, TrackerState)
    except RecordError:
        return None
    return state.get("url") if state else None


def resolve_mode(mode: str, environment: Mapping[str, str] = os.environ) -> str:
    """Resolve `auto` to the mode set by `WANDB_MODE`, else to online if there is a key.

    `WANDB_MODE=disabled` resolves to offline. This matters only for `wandb-sync`, which then writes
    offline files: a run with that mode has no W&B tracker.
    """
    if mode != "auto":
        return mode
    if variable := mode_variable(environment):
        return "online" if variable == "online" else "offline"
    return "online" if has_key(environment) else "offline"


def has_key(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether W&B can log in without a prompt, using a key from the environment or netrc."""
    import netrc

    if environment.get("WANDB_API_KEY"):
        return True
    try:
        return any("wandb" in host for host in netrc.netrc(environment.get("NETRC")).hosts)
    except (OSError, netrc.NetrcParseError):
        return False


def mode_variable(environment: Mapping[str, str] = os.environ) -> str:
    """Return `WANDB_MODE` as W&B interprets it: online, offline or disabled; "" if not set."""
    mode = environment.get("WANDB_MODE", "").strip()
    mode = {"dryrun": "offline", "run": "online"}.get(mode, mode)
    return mode if mode in ("online", "offline", "disabled") else ""
