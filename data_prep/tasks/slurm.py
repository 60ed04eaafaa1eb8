"""Tasks as array jobs of Slurm, through datatrove's executor: submitted, watched, ended.

Slurm schedules and requeues, datatrove writes the scripts; what is done is for our records to say.
A job of ours never outlives the command that submitted it, unless that is killed by SIGKILL.
"""

import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data_prep.phases import Phase
from data_prep.remote_tasks import TaskStep, environment, fresh_logs, picklable, quiet
from zerolm.errors import ZerolmError

POLL_SECONDS = 10.0
LOST_POLLS = 3  # in a row without a job in the queue: its files may be seen late over a network
COMMAND_SECONDS = 60  # for squeue, sacct and scancel; a busy controller takes long
SHOWN_TASKS, SHOWN_LINES = 3, 8  # of what was lost
ARRAY_SIZE = 1001  # jobs of an array at most: MaxArraySize, where a cluster does not change it

Json = dict[str, Any]


@dataclass(frozen=True)
class SlurmExecutor:
    """Runs tasks as array jobs of Slurm, and waits for them."""

    workers: int
    options: Json

    def run(self, phase: Phase, tasks: Sequence[int]) -> None:
        """Submit the tasks, and return when no job is left.

        Raises:
            ZerolmError: sbatch failed.
        """
        logs = fresh_logs(phase)
        jobs = Jobs()
        given: Json = {"max_array_size": ARRAY_SIZE, "qos": "", "tasks_per_job": 1}
        given |= {key: value for key, value in self.options.items() if key != "poll_seconds"}
        if not given.keys() & {"env_command", "venv_path", "condaenv"}:
            given["env_command"] = environment()
        try:
            with quiet(logs):
                _submit(phase, tasks, self.workers, logs, jobs, given)
            shown = ", ".join(jobs.ids)
            print(f"{phase.name}: Slurm job {shown}, {len(tasks):,} tasks", file=sys.stderr)
            left = self._wait(phase, tasks, jobs.ids)
        except BaseException:  # Ctrl-C and SIGTERM too: nobody waits for these jobs any more
            _cancel(phase, jobs.ids)
            raise
        places = _Places(tuple(tasks), given["tasks_per_job"], given["max_array_size"])
        for task in sorted(left)[:SHOWN_TASKS]:
            for line in _what_happened(logs, jobs.ids, *places.of(task)):
                print(f"{phase.label(task)}: {line}", file=sys.stderr, flush=True)

    def _wait(self, phase: Phase, tasks: Sequence[int], jobs: Sequence[str]) -> set[int]:
        """Wait for records as long as there are jobs; return the tasks without one."""
        left, gone = set(tasks), 0
        while left and gone < LOST_POLLS:
            time.sleep(float(self.options.get("poll_seconds", POLL_SECONDS)))
            before = len(left)
            left = {task for task in left if not phase.path(task).exists()}
            if len(left) < before:
                done = phase.num_tasks - len(left)
                print(f"{phase.name}: {done:,} of {phase.num_tasks:,} tasks", file=sys.stderr)
            gone = 0 if _in_queue(jobs) else gone + 1
        return left


@dataclass
class Jobs:
    """Collects the numbers of all jobs that are submitted: datatrove remembers the last one."""

    ids: list[str] = field(default_factory=list)

    def __call__(self, output: str) -> str:
        """Return the number in what sbatch says: `Submitted batch job 7 on cluster a`."""
        match = re.search(r"\bjob (\d+)", output) or re.search(r"(\d+)", output)
        if match is None:
            raise ZerolmError(f"sbatch said {output.strip()[:200]!r}, which names no job.")
        self.ids.append(match[1])
        return match[1]


def _submit(
    phase: Phase, tasks: Sequence[int], workers: int, logs: Path, jobs: Jobs, given: Json
) -> None:
    from datatrove.executor import SlurmPipelineExecutor

    class Executor(SlurmPipelineExecutor):
        def launch_merge_stats(self) -> None:
            """Statistics are in our records; such a job would wait for ever for one that failed."""

    executor = Executor(
        [picklable(TaskStep(phase, tuple(tasks)))],
        tasks=len(tasks),
        workers=workers,
        job_name=phase.name,
        logging_dir=str(logs),
        job_id_retriever=jobs,
        **given,
    )
    try:
        executor.run()
    except subprocess.CalledProcessError as error:
        raise ZerolmError(
            f"{phase.name}: sbatch failed with exit code {error.returncode}. "
            f"{logs}/launch_script.slurm is what was submitted."
        ) from error


def _in_queue(jobs: Sequence[str]) -> bool:
    """Say whether one of the jobs waits or runs; squeue forgets jobs, and then fails."""
    for job in jobs:  # one by one: an unknown one makes squeue fail for all
        try:
            if _output("squeue", "--noheader", "--jobs", job).strip():
                return True
        except subprocess.CalledProcessError:
            continue
        except (OSError, subprocess.TimeoutExpired):  # a controller that is busy
            return True
    return False


def _cancel(phase: Phase, jobs: Sequence[str]) -> None:
    if not jobs:
        return
    command = f"scancel {' '.join(jobs)}"
    try:
        _output("scancel", *jobs)
    except (OSError, subprocess.SubprocessError) as error:
        print(f"{phase.name}: {command} failed ({error}). Run it again.", file=sys.stderr)
    else:
        print(f"{phase.name}: {command}: what is done is kept", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class _Places:
    """Where datatrove puts tasks: `tasks_per_job` in one of an array, `array_size` in an array."""

    tasks: tuple[int, ...]
    tasks_per_job: int
    array_size: int

    def of(self, task: int) -> tuple[int, int]:
        """Return the number of the array that a task is in, and the index there."""
        index = self.tasks.index(task) // self.tasks_per_job
        return divmod(index, self.array_size) if self.array_size > 0 else (0, index)


def _what_happened(logs: Path, jobs: Sequence[str], array: int, index: int) -> list[str]:
    """Return what Slurm knows of a lost task, and the end of its log."""
    name = f"{jobs[array]}_{index}"
    lines = []
    if shutil.which("sacct") is not None:
        try:
            columns = "State,ExitCode,NodeList"
            found = _output("sacct", "-n", "-X", "-P", "-j", name, "-o", columns).split()
            lines += [f"Slurm job {name}: {'|'.join(found)} (state, exit code, node)"]
        except (OSError, subprocess.SubprocessError):  # clusters without accounting
            pass
    log = logs / "slurm_logs" / f"{name}.out"
    try:
        end = log.read_text(encoding="utf-8", errors="replace").splitlines()[-SHOWN_LINES:]
    except OSError:
        return [*lines, f"Slurm job {name} has left no {log}: it has not begun, or was removed"]
    return [*lines, f"the end of {log}:", *(f"    {line}" for line in end)]


def _output(*words: str) -> str:
    return subprocess.run(
        words, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=True
    ).stdout
