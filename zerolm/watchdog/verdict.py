"""Which rank holds up a run: decided from what the ranks say of themselves, never from one clock.

A rank that waits in a collective is held up by another one. Each counts the collectives it has
entered: the one that is behind the others is what they wait for, if it shows no progress either.
Every rank that reads the same heartbeats comes to the same result; the first one writes it down, as
a file of this start of the run that all others obey. Standard library only.
"""

import contextlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from zerolm.pulse import RANKS

Heartbeat = Mapping[str, Any]


def hanging(heartbeats: Iterable[Heartbeat], complete: bool = True) -> tuple[list[int], str] | None:
    """Return the ranks that hold up the run and why they are blamed, or None: it is only slow.

    Args:
        heartbeats: of every rank that has not ended: `quiet_seconds` since its last progress,
            `limit_seconds` that it may be quiet in its phase, `waiting` in a collective,
            `collectives` entered (None: not known), `rank`, `phase`.
        complete: every rank is among them; another one may be at work.
    """
    ranks = list(heartbeats)
    overdue = [rank for rank in ranks if rank["quiet_seconds"] > rank["limit_seconds"]]
    if not overdue:
        return None
    counts = [rank["collectives"] for rank in ranks]
    known = None not in counts and min(counts) != max(counts)
    behind = [rank for rank in ranks if rank["collectives"] == min(counts)] if known else ranks
    # On a GPU a rank that waits for the others may not be seen to wait: then the count decides.
    culprits = [rank for rank in overdue if not rank["waiting"] and rank in behind]
    if culprits:
        return [rank["rank"] for rank in culprits], _why(culprits, ranks)
    at_work = [rank for rank in ranks if rank not in overdue and not rank["waiting"]]
    if at_work or len(overdue) < len(ranks) or not complete:
        return None  # they wait for one that makes progress, or has not had its time yet
    stuck = [rank for rank in behind if rank["waiting"]] if known else ranks
    return [rank["rank"] for rank in stuck or ranks], (
        "every rank waits in a collective, none is at work: the network between the hosts, or "
        "ranks that do not make the same calls"
    )


def _why(culprits: list[Heartbeat], ranks: list[Heartbeat]) -> str:
    quiet = max(rank["quiet_seconds"] for rank in culprits)
    waiting = sum(rank["waiting"] for rank in ranks)
    others = f"; {waiting} of {len(ranks)} ranks wait in a collective" if waiting else ""
    return f"no progress for {quiet:.0f} s and not waiting for another rank{others}"


def path_of(run_dir: Path, token: str) -> Path:
    """Return the file of the verdict on one start of a run, known by its token."""
    return run_dir / RANKS / f"verdict-{token}.json"


def write_once(path: Path, value: Mapping[str, Any]) -> bool:
    """Create a file with all of its content, or return False when it exists.

    On a full disk, or without hard links, it is True: each rank then comes to it by itself.
    """
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        temporary.write_text(json.dumps(value) + "\n")
        os.link(temporary, path)
    except FileExistsError:
        return False
    except OSError:
        with contextlib.suppress(OSError):
            temporary.replace(path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
    return True
