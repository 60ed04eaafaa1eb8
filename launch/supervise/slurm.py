"""Requeue the Slurm job of a stopped run if needed.

Slurm itself requeues a job that is preempted, loses a node, or is requeued by a user. A cancelled
job must stay cancelled. In all these cases, Slurm terminates the job's processes with SIGTERM, so
only the job's state distinguishes the cases. Tested with Slurm 22.05.
"""

import os
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass

SECONDS = 60


class SlurmError(Exception):
    """Slurm did not answer, or a Slurm command failed."""


@dataclass(frozen=True)
class Job:
    """A job as reported by Slurm's controller.

    Attributes:
        state: RUNNING, or COMPLETING once Slurm starts to terminate the job for any reason.
        reason: TimeLimit once the job has reached its time limit.
        restarts: number of requeues, including a requeue that is terminating the job now.
    """

    state: str
    reason: str
    restarts: int


def requeue(log: Callable[[str], None]) -> bool:
    """Requeue the job of this process, unless Slurm has requeued it or it was cancelled.

    Returns:
        Whether the job will run again; False if this process does not run in a job.
    """
    number = job_number(os.environ)
    if number is None:
        return False
    try:
        job = _ask(number)
        if job.restarts > int(os.environ.get("SLURM_RESTART_COUNT", "0")):
            log(f"Slurm itself has requeued job {number}")
            return True
        if job.state != "RUNNING" and job.reason != "TimeLimit":
            log(f"job {number} is not requeued: it was cancelled ({job.state})")
            return False
        _call("scontrol", "requeue", number)
    except SlurmError as error:
        log(f"job {number} is not requeued: {error}. To run it again: scontrol requeue {number}")
        return False
    log(f"job {number} is requeued")
    return True


def job_number(environment: Mapping[str, str]) -> str | None:
    """Return an ID that identifies only the job of this process; None outside of a job.

    The last task of an array has the same job ID as the array, and Slurm would requeue all tasks if
    given this ID.
    """
    array, task = (environment.get(f"SLURM_ARRAY_{part}_ID") for part in ("JOB", "TASK"))
    return f"{array}_{task}" if array and task else environment.get("SLURM_JOB_ID")


def _ask(number: str) -> Job:
    """Query Slurm for a job.

    Raises:
        SlurmError: the query failed, or its output cannot be parsed.
    """
    columns = "--Format=State:20,RestartCnt:12,Reason:60"
    shown = _call("squeue", "--noheader", "--states=all", f"--jobs={number}", columns)
    try:
        state, restarts, reason = shown.split(maxsplit=2)
        return Job(state, reason.strip(), int(restarts))
    except ValueError:
        raise SlurmError(f"squeue: {shown[:200]!r} cannot be parsed") from None


def _call(*command: str) -> str:
    """Run a Slurm command and return its output.

    Raises:
        SlurmError: the command failed or timed out.
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
