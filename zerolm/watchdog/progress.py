"""The progress of this rank, and the heartbeat files in which the ranks publish theirs.

The training loop calls `record_progress` when it enters a phase, which costs a few assignments. The
watchdog's thread writes the progress to `ranks/rank-00000.json` in the run directory, where ranks
of other hosts and the supervisor read it. Makes no decisions. Standard library only.
"""

import time
from pathlib import Path
from typing import TypedDict

from zerolm.common.errors import RecordError
from zerolm.common.records import Count, Name, read_record
from zerolm.run_dir.files import RunFiles

# Phases of the main thread, and whether reading and writing files counts as progress in them.
PHASES = {
    "start": True,
    "load": True,
    "data": True,
    "forward": False,
    "backward": False,
    "reduce": False,  # sums over ranks, where a rank waits for its device and for the others
    "optimizer": False,
    "checkpoint": True,
    "evaluate": False,
    "profile": True,
    "end": True,
}

OVERWRITE_SECONDS = 0.05  # a file that is read while it is overwritten may seem damaged


class Progress:
    """The last record of the main thread.

    Attributes:
        phase: a key of `PHASES`.
        step: the optimizer step in progress, or the last one.
        sequences: (first, count) of the sequence numbers of the step's global batch.
        num_records: calls of `record_progress` so far.
        recorded_at: `time.monotonic()` of the last call.
        longest_seconds: {phase: longest time from one record in it to the next}.
    """

    def __init__(self) -> None:
        self.phase, self.step, self.num_records = "start", 0, 0
        self.sequences: tuple[int, int] | None = None
        self.recorded_at = time.monotonic()
        self.longest_seconds: dict[str, float] = {}


CURRENT = Progress()


def record_progress(
    phase: str, step: int | None = None, sequences: tuple[int, int] | None = None
) -> None:
    """Record the phase that the main thread enters, or its progress in a long phase.

    Args:
        phase: a key of `PHASES`.
        step: the optimizer step in progress; None: unchanged.
        sequences: (first, count) of the step's sequence numbers; None: unchanged.
    """
    now = time.monotonic()
    if now - CURRENT.recorded_at > CURRENT.longest_seconds.get(CURRENT.phase, -1.0):
        CURRENT.longest_seconds[CURRENT.phase] = now - CURRENT.recorded_at
    CURRENT.phase = phase
    if step is not None:
        CURRENT.step = step
    if sequences is not None:
        CURRENT.sequences = sequences
    CURRENT.num_records += 1
    CURRENT.recorded_at = now


class Group(TypedDict):
    """The collectives of a process group, as one rank has entered them.

    Attributes:
        entered: number of the last one that the rank has entered, or enqueued on a device.
        finished: number up to which all have finished; None if not known.
        started: number of the last one that its device has begun; None if not known.
    """

    entered: Count
    finished: int | None
    started: int | None


class _Diagnosis(TypedDict, total=False):
    """Keys that heartbeats of earlier releases lack.

    Attributes:
        device: number of the rank's device on its host.
        doing: the Python function that the main thread is in; empty unless the rank is quiet.
        groups: {process group: its collectives}, with finished ones if the rank is quiet.
        calls: (process group, number, kind and size) of the last collectives that the rank has
            entered, oldest first; empty unless it is quiet.
    """

    device: Count
    doing: str
    groups: dict[str, Group]
    calls: list[tuple[str, Count, str]]


class Heartbeat(_Diagnosis):
    """The content of a heartbeat file; `Heartbeats.status` writes it.

    Attributes:
        waiting: whether the main thread is inside one of torch's collectives.
        sequences: (first, count) of the sequence numbers of the step's global batch.
        limit_seconds: how long the rank may be quiet; 0 for no limit.
        monotonic: `time.monotonic()` when it was written.
        state: `running` or `ended`.
        reason: why the rank has ended.
    """

    rank: Count
    host: str
    machine: str
    pid: Count
    start_ticks: Count
    launcher_pid: Count | None
    supervisor: str | None
    token: Name | None
    phase: str
    step: Count
    beats: Count
    sequences: tuple[Count, Count] | None
    waiting: bool
    quiet_seconds: float
    limit_seconds: float
    monotonic: float
    state: str
    reason: str


def read_heartbeat(path: Path, problems: list[str] | None = None) -> Heartbeat | None:
    """Return the content of a heartbeat file, None if it is missing or damaged.

    `problems` receives a line if it is damaged.
    """
    try:
        return read_record(path, Heartbeat)
    except RecordError:
        time.sleep(OVERWRITE_SECONDS)
    try:
        return read_record(path, Heartbeat)
    except RecordError as error:
        if problems is not None:
            problems += error.problems
        return None


def read_heartbeats(run_dir: Path, problems: list[str] | None = None) -> dict[int, Heartbeat]:
    """Return {rank: heartbeat} of every readable heartbeat file, of this launch or an earlier one.

    `problems` receives a line for each damaged file.
    """
    paths = RunFiles(run_dir).heartbeats()
    contents = [read_heartbeat(path, problems) for path in paths]
    return {heartbeat["rank"]: heartbeat for heartbeat in contents if heartbeat is not None}
