"""Decides which ranks hang, from the heartbeats of all of them.

A rank that waits in a collective is held up by another rank. Each rank counts the collectives that
it has entered; the others wait for the rank with the lowest count. That rank hangs if it makes no
progress. Clocks of different hosts are never compared. Every rank that reads the same heartbeats
reaches the same verdict. No side effects.
"""

from collections.abc import Iterable, Mapping
from typing import Any

Heartbeat = Mapping[str, Any]


def find_hung_ranks(
    heartbeats: Iterable[Heartbeat], complete: bool = True
) -> tuple[list[int], str] | None:
    """Return the ranks that hang and the reason, or None if the run is only slow.

    Args:
        heartbeats: of every rank that has not ended. Used keys: `rank`, `quiet_seconds` (since its
            last progress), `limit_seconds` (how long it may be quiet in its phase), `waiting` (is
            in a collective), `collectives` (number entered; None if unknown).
        complete: whether every rank is included; a missing one may be making progress.
    """
    ranks = list(heartbeats)
    overdue = [rank for rank in ranks if rank["quiet_seconds"] > rank["limit_seconds"]]
    if not overdue:
        return None
    counts = [rank["collectives"] for rank in ranks]
    counts_differ = None not in counts and min(counts) != max(counts)
    behind = ranks
    if counts_differ:
        behind = [rank for rank in ranks if rank["collectives"] == min(counts)]
    # On a GPU, a rank that waits for others may not appear to wait: then the counts decide.
    culprits = [rank for rank in overdue if not rank["waiting"] and rank in behind]
    if culprits:
        return [rank["rank"] for rank in culprits], _reason(culprits, ranks)
    working = [rank for rank in ranks if rank not in overdue and not rank["waiting"]]
    if working or len(overdue) < len(ranks) or not complete:
        return None  # the others wait for a rank that makes progress or still has time left
    stuck = [rank for rank in behind if rank["waiting"]] if counts_differ else ranks
    return [rank["rank"] for rank in stuck or ranks], (
        "every rank waits in a collective and none is working: either the network between the "
        "hosts has failed, or the ranks do not make the same calls"
    )


def _reason(culprits: list[Heartbeat], ranks: list[Heartbeat]) -> str:
    quiet = max(rank["quiet_seconds"] for rank in culprits)
    waiting = sum(rank["waiting"] for rank in ranks)
    others = f"; {waiting} of {len(ranks)} ranks wait in a collective" if waiting else ""
    return f"no progress for {quiet:.0f} s and not waiting for another rank{others}"
