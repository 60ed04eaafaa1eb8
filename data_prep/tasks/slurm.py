"""Runs tasks as Slurm array jobs through datatrove's executor: submits, polls and cancels the jobs.

Slurm schedules and requeues, and datatrove writes the scripts; task records determine whether a
task is done. No job outlives the command that submitted it, except after SIGKILL.
"""

import contextlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_prep.tasks.phases import Phase, run_task, valid_record
from zerolm.common.errors import ZerolmError, reason

POLL_SECONDS = 10.0
LOST_POLLS = 3  # consecutive polls without a queued job; network file systems may show files late
COMMAND_SECONDS = 60  # timeout for squeue, sacct and scancel; a busy controller is slow
SHOWN_TASKS, SHOWN_LINES = 3, 8  # of lost tasks
MAX_ARRAY_SIZE = 1001  # maximum number of jobs per array: Slurm's default MaxArraySize
LOG_DIRECTORY = "jobs"  # for datatrove's files, in the directory of a phase's records

Json = dict[str, Any]


@dataclass(frozen=True)
class SlurmExecutor:
    """Runs tasks as Slurm array jobs, and waits for them."""

    num_workers: int
    options: Json

    def run(self, phase: Phase, tasks: Sequence[int]) -> None:
        """Submit jobs for the tasks, and return when all jobs have ended."""
        logs = _new_log_directory(phase)
        job_ids: list[str] = []
        options: Json = {"max_array_size": MAX_ARRAY_SIZE, "qos": "", "tasks_per_job": 1}
        options |= {key: value for key, value in self.options.items() if key != "poll_seconds"}
        if not options.keys() & {"env_command", "venv_path", "condaenv"}:
            options["env_command"] = _environment_command()
        try:
            with _log_to_file(logs):
                _submit(phase, tasks, self.num_workers, logs, job_ids, options)
            shown = ", ".join(job_ids)
            print(f"{phase.name}: Slurm job {shown}, {len(tasks):,} tasks", file=sys.stderr)
            unfinished = self._wait(phase, tasks, job_ids)
        except BaseException:  # also on Ctrl-C and SIGTERM, as nothing will wait for the jobs
            _cancel(phase, job_ids)
            raise
        for task in sorted(unfinished)[:SHOWN_TASKS]:
            name = _job_name(job_ids, tasks.index(task), options)
            for line in _lost_task_lines(logs, name):
                print(f"{phase.label(task)}: {line}", file=sys.stderr, flush=True)

    def _wait(self, phase: Phase, tasks: Sequence[int], job_ids: Sequence[str]) -> set[int]:
        """Wait for records as long as jobs exist; return the tasks that have no record."""
        unfinished, polls_without_jobs = set(tasks), 0
        while unfinished and polls_without_jobs < LOST_POLLS:
            time.sleep(float(self.options.get("poll_seconds", POLL_SECONDS)))
            before = len(unfinished)
            unfinished = {task for task in unfinished if not phase.path(task).exists()}
            if len(unfinished) < before:
                done = phase.num_tasks - len(unfinished)
                print(f"{phase.name}: {done:,} of {phase.num_tasks:,} tasks", file=sys.stderr)
            polls_without_jobs = 0 if _in_queue(job_ids) else polls_without_jobs + 1
        return unfinished


def _submit(
    phase: Phase,
    tasks: Sequence[int],
    num_workers: int,
    logs: Path,
    job_ids: list[str],
    options: Json,
) -> None:
    """Submit array jobs, and add their ids to `job_ids`."""
    from datatrove.executor import SlurmPipelineExecutor

    class Executor(SlurmPipelineExecutor):
        def launch_merge_stats(self) -> None:
            """Do not submit a job to merge statistics, because it would wait forever for a failed
            task.
            """

    def add_job_id(output: str) -> str:
        """Return the job id in sbatch's output, such as `Submitted batch job 7 on cluster a`."""
        match = re.search(r"\bjob (\d+)", output) or re.search(r"(\d+)", output)
        if match is None:
            raise ZerolmError(f"sbatch printed {reason(output)!r}, which contains no job id.")
        job_ids.append(match[1])
        return match[1]

    executor = Executor(
        [_pipeline_step(TaskStep(phase, tuple(tasks)))],
        tasks=len(tasks),
        workers=num_workers,
        job_name=phase.name,
        logging_dir=str(logs),
        job_id_retriever=add_job_id,
        **options,
    )
    try:
        executor.run()
    except subprocess.CalledProcessError as error:
        raise ZerolmError(
            f"{phase.name}: sbatch failed with exit code {error.returncode}. "
            f"The script is {logs}/launch_script.slurm."
        ) from error


def _in_queue(job_ids: Sequence[str]) -> bool:
    """Return whether one of the jobs is waiting or running."""
    for job_id in job_ids:  # one at a time, because squeue fails for all jobs if any job is unknown
        try:
            if _output("squeue", "--noheader", "--jobs", job_id).strip():
                return True
        except subprocess.CalledProcessError:
            continue
        except (OSError, subprocess.TimeoutExpired):  # the controller is busy
            return True
    return False


def _cancel(phase: Phase, job_ids: Sequence[str]) -> None:
    if not job_ids:
        return
    command = f"scancel {' '.join(job_ids)}"
    try:
        _output("scancel", *job_ids)
    except (OSError, subprocess.SubprocessError) as error:
        print(f"{phase.name}: {command} failed ({error}). Run it again.", file=sys.stderr)
    else:
        print(f"{phase.name}: {command}: finished tasks are kept", file=sys.stderr, flush=True)


def _job_name(job_ids: Sequence[str], task_index: int, options: Json) -> str:
    """Return the name of the job that ran a task, `ID_INDEX`; `tasks_per_job` tasks share a job."""
    index, array, array_size = task_index // options["tasks_per_job"], 0, options["max_array_size"]
    if array_size > 0:
        array, index = divmod(index, array_size)
    return f"{job_ids[array]}_{index}"


def _lost_task_lines(logs: Path, name: str) -> list[str]:
    """Return lines with the Slurm state of a lost task's job, and with the end of its log."""
    lines = []
    without_log = "it never started, or the log was removed"
    if shutil.which("sacct") is not None:
        try:
            columns = "State,ExitCode,NodeList"
            states = _output("sacct", "-n", "-X", "-P", "-j", name, "-o", columns).splitlines()
            lines += [f"Slurm job {name}: {state} (state, exit code, node)" for state in states]
            if states:  # a state may be "CANCELLED by 1000"
                has_run = not states[-1].endswith("|None assigned")
                without_log = "it could not be written there" if has_run else "it never started"
        except (OSError, subprocess.SubprocessError):  # a cluster without accounting
            pass
    log = logs / "slurm_logs" / f"{name}.out"
    try:
        end = log.read_text(encoding="utf-8", errors="replace").splitlines()[-SHOWN_LINES:]
    except OSError:
        return [*lines, f"Slurm job {name} has no log {log}: {without_log}"]
    return [*lines, f"the end of {log}:", *(f"    {line}" for line in end)]


def _output(*command: str) -> str:
    return subprocess.run(
        command, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=True
    ).stdout


@dataclass
class TaskStep:
    """Runs the task for a datatrove rank; each rank runs a pipeline that consists of this step."""

    phase: Phase
    tasks: tuple[int, ...]

    def __call__(self, data: Any, rank: int = 0, world_size: int = 1) -> None:
        """Run task `tasks[rank]` unless it already has a valid record."""
        task = self.tasks[rank]
        if valid_record(self.phase, task) is None:
            run_task(self.phase, task)


def _pipeline_step(step: TaskStep) -> Any:
    """Wrap a step in an instance of datatrove's `PipelineStep`."""
    from datatrove.pipeline.base import PipelineStep

    class Step(PipelineStep):
        name, type = "zerolm task", "task"

        def __init__(self, inner: TaskStep):
            super().__init__()
            self.inner = inner

        def run(self, data: Any, rank: int = 0, world_size: int = 1) -> Any:
            self.inner(data, rank, world_size)
            return data

    return Step(step)


def _new_log_directory(phase: Phase) -> Path:
    """Create a directory for one submission, in which datatrove marks completed ranks."""
    logs = phase.records / LOG_DIRECTORY / time.strftime("%Y%m%d-%H%M%S")
    number = 0
    while logs.exists():
        number += 1
        logs = logs.with_name(f"{logs.name.partition('.')[0]}.{number}")
    logs.mkdir(parents=True)
    return logs.absolute()


def _environment_command() -> str:
    """Return a shell command that makes a job use this process's Python and module paths."""
    path = os.pathsep.join(filter(None, sys.path))
    programs = os.pathsep.join([str(Path(sys.executable).parent), "$PATH"])
    return f'export PYTHONPATH={shlex.quote(path)}\nexport PATH="{programs}"'


@contextlib.contextmanager
def _log_to_file(logs: Path) -> Iterator[None]:
    """Redirect datatrove's log in this process from the terminal to a file."""
    from datatrove.utils.logging import logger  # importing datatrove configures the logger

    logger.remove()
    number = logger.add(logs / "submission.log")
    try:
        yield
    finally:
        logger.remove(number)
