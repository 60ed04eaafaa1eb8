"""Whether the Slurm job of a stopped run must return to the queue, and how.

Slurm requeues by itself a job that it preempts, that loses a node, or that somebody requeues; one
that is cancelled must stay so. All of these end the processes of the job by SIGTERM, so the state
of the job decides. Tested with Slurm 22.05.
"""

import os
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass

SECONDS = 60


class SlurmError(Exception):
    """Slurm has not answered, or not done what was asked."""


@dataclass(frozen=True)
class Job:
    """A job as Slurm's controller knows it.

    Attributes:
        state: RUNNING; COMPLETING from the moment when Slurm ends it, for whatever reason.
        reason: TimeLimit once its time has passed.
        restarts: how often it has been requeued, also by what ends it now.
    """

    state: str
    reason: str
    restarts: int


def requeue(log: Callable[[str], None]) -> bool:
    """Return the job of this process to the queue, unless Slurm has done so or it is cancelled.

    Returns:
        Whether it will run again. Outside a job nothing happens.
    """
    number = job_number(os.environ)
    if number is None:
        return False
    try:
        job = _ask(number)
        if job.restarts > int(os.environ.get("SLURM_RESTART_COUNT", "0")):
            log(f"Slurm has requeued job {number} itself")
            return True
        if job.state != "RUNNING" and job.reason != "TimeLimit":
            log(f"job {number} is not requeued: it is cancelled ({job.state})")
            return False
        _call("scontrol", "requeue", number)
    except SlurmError as error:
        log(f"job {number} is not requeued: {error}. To run it again: scontrol requeue {number}")
        return False
    log(f"job {number} is requeued")
    return True


def job_number(environment: Mapping[str, str]) -> str | None:
    """Return what names the job of this process alone.

    The last task of an array has the number of the array: with it Slurm would requeue all tasks.
    """
    array, task = (environment.get(f"SLURM_ARRAY_{part}_ID") for part in ("JOB", "TASK"))
    return f"{array}_{task}" if array and task else environment.get("SLURM_JOB_ID")


def _ask(number: str) -> Job:
    """Raises: SlurmError."""
    columns = "--Format=State:20,RestartCnt:12,Reason:60"
    shown = _call("squeue", "--noheader", "--states=all", f"--jobs={number}", columns)
    try:
        state, restarts, reason = shown.split(maxsplit=2)
        return Job(state, reason.strip(), int(restarts))
    except ValueError:
        raise SlurmError(f"squeue: {shown[:200]!r} is not understood") from None


def _call(*command: str) -> str:
    """Run a Slurm command and return its output.

    Raises:
        SlurmError: it failed.
    """
    try:
        ended = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SlurmError(f"{' '.join(command)}: {error}") from None
    if ended.returncode:
        raise SlurmError(f"{' '.join(command)}: {(ended.stderr or ended.stdout).strip()}")
    return ended.stdout
