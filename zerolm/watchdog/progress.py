"""This rank's progress, and the heartbeat files in which ranks publish their progress.

The training loop calls `record_progress` when it enters a phase, at the cost of a few assignments.
The watchdog's thread writes the progress to `ranks/rank-00000.json` in the run directory, where
ranks on other hosts and the supervisor read it. Makes no decisions. Standard library only.
"""

import time
from pathlib import Path
from typing import TypedDict

from zerolm.common.errors import RecordError
from zerolm.common.records import Count, Name, read_record
from zerolm.run_dir.files import RunFiles

# {phase of the main thread: whether file I/O in this phase counts as progress}.
PHASES = {
    "start": True,
    "load": True,
    "data": True,
    "forward": False,
    "backward": False,
    "transfer": False,  # between pipeline stages, which wait for each other
    "reduce": False,  # sums over ranks, which wait for the device and for other ranks
    "optimizer": False,
    "checkpoint": True,
    "evaluate": False,
    "profile": True,
    "end": True,
}

OVERWRITE_SECONDS = 0.05  # wait before rereading: a file may seem damaged while it is overwritten


class Progress:
    """The main thread's last record.

    Attributes:
        phase: a key of `PHASES`.
        step: the optimizer step in progress, or the last step.
        sequences: (number of the step's first sequence, number of sequences).
        num_records: number of calls to `record_progress` so far.
        recorded_at: `time.monotonic()` of the last call.
        longest_seconds: {phase: longest time between a record in the phase and the next record}.
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
    """Record the phase that the main thread enters, or progress within a long phase.

    Args:
        phase: a key of `PHASES`.
        step: the optimizer step in progress; None leaves the recorded step unchanged.
        sequences: (number of the step's first sequence, number of sequences); None leaves the
            recorded value unchanged.
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
    """One rank's collectives in a process group.

    Attributes:
        entered: number of the last collective that the rank has entered or enqueued on its device.
        finished: number up to which all collectives have finished; None if unknown.
        started: number of the last collective that the rank's device has started; None if unknown.
    """

    entered: Count
    finished: int | None
    started: int | None


class _Diagnosis(TypedDict, total=False):
    """Keys that are missing in heartbeats from earlier releases.

    Attributes:
        device: index of the rank's device on its host.
        stage: the rank's pipeline stage, such as `1 of 2`; "" without stages.
        doing: the main thread's current Python function; empty unless the rank is stalled.
        groups: {process group: its collectives}; `finished` is None unless the rank is stalled.
        calls: (process group, number, kind and size) of the rank's last collectives, oldest first;
            empty unless the rank is stalled.
    """

    device: Count
    stage: str
    doing: str
    groups: dict[str, Group]
    calls: list[tuple[str, Count, str]]


class Heartbeat(_Diagnosis):
    """The contents of a heartbeat file, created by `Heartbeats.status`.

    Attributes:
        waiting: whether the main thread is inside a torch collective.
        sequences: (number of the step's first sequence, number of sequences).
        quiet_seconds: time since the rank's last progress.
        limit_seconds: time allowed without progress; 0 means no limit.
        monotonic: `time.monotonic()` when the heartbeat was written.
        state: `running` or `ended`.
        reason: why the rank ended; "" while it is running.
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
    """Return the contents of a heartbeat file, or None if it is missing or damaged.

    If the file is damaged, append a message to `problems`.
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
    """Return {rank: heartbeat} from all readable heartbeat files of this and earlier launches.

    For each damaged file, append a message to `problems`.
    """
    paths = RunFiles(run_dir).heartbeats()
    contents = [read_heartbeat(path, problems) for path in paths]
    return {heartbeat["rank"]: heartbeat for heartbeat in contents if heartbeat is not None}
