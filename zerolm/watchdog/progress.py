"""What a rank is doing now, and the heartbeat files that say so to the others.

The training loop calls `beat` when it begins something else, which is a few assignments. A thread
(watchdog.py) writes them to `ranks/rank-00000.json` in the run directory; the ranks of other hosts
and the supervisor read those. Knows nothing of training and decides nothing. Standard library only.
"""

import json
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

RANKS = "ranks"
# What the main thread may be doing, and whether reading and writing files is progress in it.
PHASES = {
    "start": True,
    "load": True,
    "data": True,
    "step": False,
    "checkpoint": True,
    "evaluate": False,
    "end": True,
}

Item = TypeVar("Item")


class Pulse:
    """The main thread's last sign of life.

    Attributes:
        phase: a key of `PHASES`.
        step: the optimizer step being taken, or the last one taken.
        sequences: (first, count) of the sequence numbers of the step's global batch.
        beats: how often there was one.
        since: `time.monotonic()` of the last one.
        longest: {phase: seconds between two beats} that did come.
    """

    def __init__(self) -> None:
        self.phase, self.step, self.beats = "start", 0, 0
        self.sequences: tuple[int, int] | None = None
        self.since = time.monotonic()
        self.longest: dict[str, float] = {}


PULSE = Pulse()


def beat(phase: str, step: int | None = None, sequences: tuple[int, int] | None = None) -> None:
    """Say what the main thread begins to do; also a sign of life within a long phase.

    Args:
        phase: a key of `PHASES`.
        step: the optimizer step being taken; None: as before.
        sequences: (first, count) of the step's sequence numbers; None: as before.
    """
    now = time.monotonic()
    if now - PULSE.since > PULSE.longest.get(PULSE.phase, -1.0):
        PULSE.longest[PULSE.phase] = now - PULSE.since
    PULSE.phase = phase
    if step is not None:
        PULSE.step = step
    if sequences is not None:
        PULSE.sequences = sequences
    PULSE.beats += 1
    PULSE.since = now


def each(phase: str, items: Iterable[Item]) -> Iterator[Item]:
    """Yield `items`, with a beat before each."""
    for item in items:
        beat(phase)
        yield item


def heartbeat_path(run_dir: Path, rank: int) -> Path:
    return Path(run_dir) / RANKS / f"rank-{rank:05d}.json"


def stacks_path(run_dir: Path, rank: int) -> Path:
    return Path(run_dir) / RANKS / f"rank-{rank:05d}.stacks.txt"


def stop_path(run_dir: Path, token: str) -> Path:
    """Return the file that asks one start of a run to save and stop: rank 0 looks for it."""
    return Path(run_dir) / RANKS / f"stop-{token}"


def read_heartbeat(path: Path) -> dict[str, Any] | None:
    """Return what a rank last said, or None when it cannot be read."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def read_heartbeats(run_dir: Path) -> dict[int, dict[str, Any]]:
    """Return {rank: its last heartbeat} of every file that can be read, whatever start it is of."""
    found = (read_heartbeat(path) for path in sorted((Path(run_dir) / RANKS).glob("rank-*.json")))
    return {heartbeat["rank"]: heartbeat for heartbeat in found if heartbeat is not None}
