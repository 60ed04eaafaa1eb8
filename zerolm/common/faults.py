"""Faults on purpose, for tests: named points in the code that cost nothing without `FAULT`.

    FAULT=point:rank:step:action[,point:rank:step:action ...]

`rank` and `step` are numbers, or `*` for any. `POINTS` has the names, `ACTIONS` what can happen
there; an action that only the place itself can do (`nan`) is handed back to it. A fault strikes
each time its place is passed. With `FAULT_ONCE=DIRECTORY` it strikes once, over all restarts of a
run: a file in that directory remembers it. Standard library only.
"""

import errno
import os
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from zerolm.errors import ConfigError, did_you_mean

POINTS = {
    "step.begin": "before a step reads its data",
    "step.backward": "before the backward passes; takes nan and x10, of this rank's loss, and inf, "
    "of its gradients",
    "step.end": "after the optimizer step",
    "checkpoint.begin": "before anything of a checkpoint is made",
    "checkpoint.snapshot": "after the copy to host memory",
    "checkpoint.write": "in the writer, before a file is written",
    "checkpoint.written": "in the writer, after all files of this rank are synced",
    "checkpoint.manifest": "in the publisher, before the manifest is written",
    "checkpoint.rename": "in the publisher, before the directory gets its name",
    "checkpoint.pointer": "in the publisher, before `latest` is moved",
    "checkpoint.rotate": "in the publisher, before an old checkpoint is removed",
    "checkpoint.rotated": "in the publisher, half-way through a removal",
    "evaluation.begin": "when the checkpoint of the step is whole, before anything is measured",
    "evaluation.measure": "when an evaluation is noted as begun, before it computes",
    "rollback.recorded": "in rank 0, after a rollback is written down; its step is the one left",
    "rollback.aside": "in rank 0, before a checkpoint is set aside; its step is the checkpoint's",
    "rollback.load": "before the checkpoint is loaded that a rollback goes back to",
    "upload.file": "in the uploader, before a file is sent to the object store",
    "upload.marker": "in the uploader, before the manifest is sent",
    "upload.rotate": "in the uploader, before an old checkpoint is removed from the store",
    "resume.probe": "after a checkpoint was loaded; takes x10, of this rank's weights",
    "loader.read": "in the process that reads the data, a loader worker if there are any; its step "
    "is the number of the first sequence that is read",
}
ACTIONS = {
    "kill": "SIGKILL to this process",
    "stop": "SIGSTOP to this process",
    "hang": "an endless loop",
    "exit": "end with exit code 1, without cleaning up",
    "raise": "a RuntimeError",
    "enospc": "an OSError: no space left on device",
    "eio": "an OSError: input/output error",
    "sleep=SECONDS": "wait that long",
    "nan": "done by the place: what it has becomes not a number",
    "inf": "done by the place: what it has becomes infinite",
    "x10": "done by the place: what it has becomes ten times as large",
}


@dataclass(frozen=True)
class Fault:
    """One fault. `rank` and `step`: None is any."""

    point: str
    rank: int | None
    step: int | None
    action: str


def parse_faults(text: str) -> list[Fault]:
    """Read the value of `FAULT`.

    Raises:
        ConfigError: every part that is not `point:rank:step:action` with known names.
    """
    faults, problems = [], []
    names = {action.partition("=")[0] for action in ACTIONS}
    for part in filter(None, text.split(",")):
        where = f"environment: FAULT: {part!r}"
        words = part.split(":")
        if len(words) != 4:
            problems.append(f"{where}, is not point:rank:step:action. Give all four.")
            continue
        point, rank, step, action = words
        name, _, value = action.partition("=")
        if point not in POINTS:
            problems.append(f"{where}, no such point.{did_you_mean(point, POINTS)}")
        if name not in names or (name == "sleep") != bool(value):
            problems.append(f"{where}, no such action. One of: {', '.join(ACTIONS)}.")
        try:
            numbers = [None if word == "*" else int(word) for word in (rank, step)]
            if value:
                float(value)
        except ValueError:
            problems.append(f"{where}, rank, step and seconds are numbers, or * for any.")
            continue
        faults.append(Fault(point, numbers[0], numbers[1], action))
    if problems:
        raise ConfigError(problems)
    return faults


# Read once: a place costs one look at an empty list while there is none. A value that cannot be
# read ends the process here, before anything began.
try:
    _FAULTS = parse_faults(os.environ.get("FAULT", ""))
except ConfigError as error:
    print(error, file=sys.stderr, flush=True)
    sys.exit(error.exit_code)


def fault_point(point: str, step: int) -> str | None:
    """Let the fault of this place happen, if there is one for this rank and step.

    Args:
        point: a key of `POINTS`.
        step: the optimizer step being taken, or the one that a checkpoint is of.

    Returns:
        `nan`, `inf` or `x10` for the place to do it; else None.
    """
    handed_back = None
    for fault in _FAULTS:
        rank = int(os.environ.get("RANK", 0))
        here = fault.point == point and fault.rank in (None, rank) and fault.step in (None, step)
        if here and _strikes(fault, os.environ):
            handed_back = _strike(fault, rank, step) or handed_back
    return handed_back


def _strikes(fault: Fault, environment: Mapping[str, str]) -> bool:
    directory = environment.get("FAULT_ONCE")
    if not directory:
        return True
    mark = Path(directory, f"{fault.point}-{fault.rank}-{fault.step}-{fault.action}")
    try:
        mark.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def _strike(fault: Fault, rank: int, step: int) -> str | None:
    print(f"FAULT {fault.point} rank {rank} step {step}: {fault.action}", flush=True)
    name, _, value = fault.action.partition("=")
    if name in ("kill", "stop"):
        os.kill(os.getpid(), signal.SIGKILL if name == "kill" else signal.SIGSTOP)
    elif name == "exit":
        os._exit(1)
    elif name == "hang":
        while True:
            pass
    elif name == "sleep":
        time.sleep(float(value))
    elif name == "raise":
        raise RuntimeError(f"fault at {fault.point}")
    elif name in ("enospc", "eio"):
        number = errno.ENOSPC if name == "enospc" else errno.EIO
        raise OSError(number, os.strerror(number), fault.point)
    else:
        return name
    return None
