"""Measure each part of a start, up to the end of the first step, and each part of a recovery.

pretrain.py marks the end of each part in its process. The first parts end before this code runs, so
they are computed from the kernel's start times of the launchers and of this process. A recovery
begins even earlier; the supervisor has logged when the run failed. Standard library only.
"""

import os
import time
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, TypedDict

from zerolm.common import process_tree, processes
from zerolm.common.records import Count, mismatch
from zerolm.run_dir import events, jsonl
from zerolm.run_dir.files import RunFiles
from zerolm.run_dir.jsonl import EventRow

TICKS = os.sysconf("SC_CLK_TCK")
TAIL_BYTES = 1 << 20  # size of the end of the event log to search for the last failure
_ends: dict[str, float] = {}


def mark(part: str) -> None:
    """Record that a part of the start ends now."""
    _ends[part] = _now()


def parts(runner: processes.Process | None) -> dict[str, float]:
    """Return {part: seconds}, in order.

    The first part begins when the runner, or else this process, was started.
    """
    begun = {name: ticks / TICKS for name, ticks in process_tree.starts(runner).items()}
    before, *_ = begun.values()
    ends = {name: begun[following] for name, following in pairwise(begun)} | _ends
    seconds = {}
    for part, end in ends.items():
        seconds[part] = round(end - before, 2)
        before = end
    return seconds


class Interruption(NamedTuple):
    """The failure that preceded this start.

    Attributes:
        step: the first step that was not completed.
        parts: {part: seconds} for the time from the failure until the run had ended.
        ended_at: when the run had ended, measured with `time.time`.
    """

    step: int
    parts: dict[str, float]
    ended_at: float


class _Failed(TypedDict):
    """The fields of an `attempt_failed` event that this module reads."""

    step: Count
    parts: dict[str, float]
    ended_at: float


def interruption(run_dir: Path) -> Interruption | None:
    """Return the first failure since a step was last completed, or None if none was logged.

    Call this before opening the run's log, which removes the metrics of steps to be repeated.
    """
    files = RunFiles(run_dir)
    try:
        size = files.events.stat().st_size
        rows = list(jsonl.read_rows(files.events, EventRow, start_bytes=max(0, size - TAIL_BYTES)))
        done = jsonl.last_step(files.metrics) or 0
    except OSError:
        return None
    first = None
    for row in rows:  # failures since the last start that completed a step
        if row["event"] == "startup" or events.state_after(row["event"]) in events.ENDED:
            first = None
        elif row["event"] == "attempt_failed" and first is None and not mismatch(row, _Failed):
            first = row
    if first is None:
        return None
    return Interruption(max(done + 1, first["step"]), first["parts"], first["ended_at"])


def recovery(
    failed: Interruption, runner: processes.Process | None
) -> tuple[float, dict[str, float]]:
    """Return the duration of a recovery that ends now, and {part: seconds} in order."""
    mark("repeated steps")
    own = parts(runner)
    began = time.time() - sum(own.values())
    pause = round(max(0.0, began - failed.ended_at), 2)
    found = {**failed.parts, "pause": pause, **own}
    return round(sum(found.values()), 2), found


def _now() -> float:
    """Return the seconds since the machine booted, by the clock that /proc uses."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
