"""Fault injection for tests, at named points in the code that cost nothing unless `FAULT` is set.

    FAULT=point:rank:step:action[,point:rank:step:action ...]

`rank` and `step` are numbers, or `*` for any. `POINTS` lists the points and `ACTIONS` the actions.
A fault triggers each time its point is reached. With `FAULT_ONCE=DIRECTORY` a fault triggers only
once across all restarts of a run, and a file in that directory records that it has triggered.
Standard library only.
"""

import errno
import os
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from zerolm.common.errors import ConfigError, did_you_mean

FLIP = "flip"
POINTS = {
    "step.begin": "before a step reads its data",
    "step.backward": "before the backward passes; applies nan and x10 to this rank's loss, inf to "
    "its gradients, and flip to its part of the gradient sum after the first pass",
    "step.end": "after the optimizer step; applies flip to this rank's master weights",
    "checkpoint.begin": "before any file or directory of a checkpoint is created",
    "checkpoint.snapshot": "after the copy to host memory",
    "checkpoint.write": "in the writer, before a file is written",
    "checkpoint.written": "in the writer, after all files of this rank are synced",
    "checkpoint.manifest": "in the publisher, before the manifest is written",
    "checkpoint.rename": "in the publisher, before the directory is renamed",
    "checkpoint.pointer": "in the publisher, before `latest` is updated",
    "checkpoint.rotate": "in the publisher, before an old checkpoint is removed",
    "checkpoint.rotated": "in the publisher, half-way through a removal",
    "memory.write": "in the writer, before a file of a copy in memory is written",
    "memory.manifest": "in the writer, after the files of a copy in memory, before its manifest",
    "memory.remove": "in the writer, before older copies in memory are removed",
    "evaluation.begin": "after the checkpoint of the step is complete, before any evaluation",
    "evaluation.measure": "after an evaluation is recorded as started, before it computes",
    "rollback.recorded": "on rank 0, after a rollback is recorded; step: the run's step before it",
    "rollback.aside": "on rank 0, before a checkpoint is set aside; step: the checkpoint's",
    "rollback.load": "before a rollback loads its checkpoint",
    "upload.file": "in the uploader, before a file is sent to the object store",
    "upload.marker": "in the uploader, before the manifest is sent",
    "upload.rotate": "in the uploader, before an old checkpoint is removed from the store",
    "resume.probe": "after a checkpoint is loaded; applies x10 to this rank's weights",
    "loader.read": "in the process that reads the data (a loader worker, if any); step: number of "
    "the first sequence to read",
}
ACTIONS = {
    "kill": "send SIGKILL to this process",
    "stop": "send SIGSTOP to this process",
    "hang": "loop forever",
    "exit": "exit with code 1, without cleanup",
    "raise": "raise a RuntimeError",
    "enospc": "raise an OSError: no space left on device",
    "eio": "raise an OSError: input/output error",
    "sleep=SECONDS": "wait that long",
    "nan": "applied by the code at the point: its value becomes NaN",
    "inf": "applied by the code at the point: its value becomes infinite",
    "x10": "applied by the code at the point: its value is multiplied by 10",
    FLIP: "applied by the code at the point: one bit of one value is flipped",
}


@dataclass(frozen=True)
class Fault:
    """One fault; a `rank` or `step` of None means any."""

    point: str
    rank: int | None
    step: int | None
    action: str


def parse_faults(text: str) -> list[Fault]:
    """Parse the value of `FAULT`.

    Raises:
        ConfigError: names each part that is not a valid `point:rank:step:action`.
    """
    faults, problems = [], []
    names = {action.partition("=")[0] for action in ACTIONS}
    for part in filter(None, text.split(",")):
        where = f"environment: FAULT: {part!r}"
        fields = part.split(":")
        if len(fields) != 4:
            problems.append(f"{where} is not point:rank:step:action. Give all four.")
            continue
        point, rank, step, action = fields
        name, _, value = action.partition("=")
        if point not in POINTS:
            problems.append(f"{where}: no such point.{did_you_mean(point, POINTS)}")
        if name not in names or (name == "sleep") != bool(value):
            problems.append(f"{where}: no such action. One of: {', '.join(ACTIONS)}.")
        try:
            numbers = [None if field == "*" else int(field) for field in (rank, step)]
            if value:
                float(value)
        except ValueError:
            problems.append(f"{where}: rank, step and seconds are numbers, or * for any.")
            continue
        faults.append(Fault(point, numbers[0], numbers[1], action))
    if problems:
        raise ConfigError(problems)
    return faults


# Parsed once, so a point costs only the iteration over an empty list if there are no faults. An
# invalid value makes the process exit here, before it does anything else.
try:
    _FAULTS = parse_faults(os.environ.get("FAULT", ""))
except ConfigError as error:
    print(error, file=sys.stderr, flush=True)
    sys.exit(error.exit_code)


def fault_point(point: str, step: int) -> str | None:
    """Trigger the faults of a point that match this rank and step.

    Args:
        point: a key of `POINTS`.
        step: the current optimizer step, or the step of a checkpoint.

    Returns:
        `nan`, `inf`, `x10` or `flip`, which the caller must apply itself; otherwise None.
    """
    action = None
    for fault in _FAULTS:
        rank = int(os.environ.get("RANK", 0))
        matches = fault.point == point and fault.rank in (None, rank) and fault.step in (None, step)
        if matches and _is_armed(fault, os.environ):
            action = _trigger(fault, rank, step) or action
    return action


def _is_armed(fault: Fault, environment: Mapping[str, str]) -> bool:
    """Return whether a fault may trigger, and record that it has if it may trigger only once."""
    directory = environment.get("FAULT_ONCE")
    if not directory:
        return True
    mark = Path(directory, f"{fault.point}-{fault.rank}-{fault.step}-{fault.action}")
    try:
        mark.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def _trigger(fault: Fault, rank: int, step: int) -> str | None:
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
