"""Where tasks run: processes of this machine, or Slurm and Ray through datatrove's executors.

datatrove starts a pipeline of one step for every rank; the step runs our task of that number, which
writes its own record. datatrove schedules, requeues and logs; what is done is for our records to
say, so a task that was preempted or lost is run again, and one that has its record never.
"""

import contextlib
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_prep.phases import Executor, LocalExecutor, Phase, Record, run_task, valid_record
from zerolm.errors import ConfigError, ZerolmError, did_you_mean

NAMES = ("local", "slurm", "ray")
LOGS = "jobs"  # what datatrove writes, in the directory of a phase's records
POLL_SECONDS = 10.0
LOST_POLLS = 3  # in a row without a job in the queue: its files may be seen late over a network
SLURM_KEYS = {
    "time": str, "partition": str, "cpus_per_task": int, "mem_per_cpu_gb": int, "qos": str,
    "env_command": str, "venv_path": str, "condaenv": str, "sbatch_args": dict,
    "max_array_size": int, "tasks_per_job": int, "srun_args": dict, "poll_seconds": float,
}  # fmt: skip
RAY_KEYS = {
    "address": str, "cpus_per_task": int, "mem_per_cpu_gb": float, "tasks_per_job": int,
    "ray_remote_kwargs": dict,
}  # fmt: skip

Json = dict[str, Any]


def make_executor(name: str, workers: int, options: Json, where: str) -> Executor:
    """Return an executor.

    Args:
        workers: tasks at a time.
        options: `executor` of the recipe: `{"slurm": {...}, "ray": {...}}`.

    Raises:
        ConfigError: unknown names and options, or an optional package that is not installed.
    """
    problems = [
        f"{where}: executor.{key}: there are no options of it.{did_you_mean(key, NAMES[1:])} "
        f"There are slurm and ray."
        for key in options
        if key not in NAMES[1:]
    ]
    for key, known in (("slurm", SLURM_KEYS), ("ray", RAY_KEYS)):
        problems += _option_problems(options.get(key, {}), known, f"{where}: executor.{key}")
    if name not in NAMES:
        problems.append(f"--executor {name}: is not one of {', '.join(NAMES)}.")
    if name == "slurm":
        problems += [
            f"{where}: executor.slurm.{key}: is missing, and sbatch needs it."
            for key in ("time", "partition")
            if key not in options.get("slurm", {})
        ]
        if shutil.which("sbatch") is None:
            problems.append("--executor slurm: there is no sbatch on PATH. Run it on a login node.")
    if name in ("slurm", "ray"):
        problems += _package_problems(name)
    if problems:
        raise ConfigError(problems)
    if name == "slurm":
        return SlurmExecutor(workers, options["slurm"])
    if name == "ray":
        return RayExecutor(workers, options.get("ray", {}))
    return LocalExecutor(workers, show_progress)


def _option_problems(given: Any, known: dict[str, type], where: str) -> list[str]:
    if not isinstance(given, dict):
        return [f"{where}: {given!r} is not an object of options."]
    problems = []
    for key, value in given.items():
        if key not in known:
            hint = did_you_mean(key, known)
            problems.append(f"{where}.{key}: is not an option.{hint} Known: {', '.join(known)}.")
        elif not isinstance(value, (int, float) if known[key] is float else known[key]):
            problems.append(f"{where}.{key}: {value!r} is not of type {known[key].__name__}.")
    return problems


def _package_problems(name: str) -> list[str]:
    problems = []
    for package, extra in [("datatrove", "pipeline")] + ([("ray", "ray")] if name == "ray" else []):
        try:
            __import__(package)
        except ImportError as error:
            problems.append(
                f"--executor {name}: {error}. Install the extra: pip install 'zerolm[{extra}]'."
            )
    return problems


def show_progress(phase: Phase, record: Record) -> None:
    """Say that a task is done, if tasks are few or it is one in a hundred."""
    done = record["task"] + 1
    if done == phase.num_tasks or done % max(1, phase.num_tasks // 20) == 0:
        print(f"{phase.name}: {done:,} of {phase.num_tasks:,} tasks", file=sys.stderr, flush=True)


@dataclass
class TaskStep:
    """The one step of a datatrove pipeline: runs the task that a rank stands for."""

    phase: Phase
    tasks: tuple[int, ...]

    def __call__(self, data: Any, rank: int = 0, world_size: int = 1) -> None:
        """Run task `tasks[rank]`, unless its record is there by now."""
        task = self.tasks[rank]
        if valid_record(self.phase, task) is None:
            run_task(self.phase, task)


@dataclass(frozen=True)
class SlurmExecutor:
    """Runs tasks as an array job of Slurm, and waits for them."""

    workers: int
    options: Json

    def run(self, phase: Phase, tasks: Sequence[int]) -> None:
        """Submit the tasks, and return when no job is left.

        Raises:
            ZerolmError: sbatch failed.
        """
        from datatrove.executor import SlurmPipelineExecutor

        logs = _fresh_logs(phase)
        options = {key: value for key, value in self.options.items() if key != "poll_seconds"}
        executor = SlurmPipelineExecutor(
            [_picklable(TaskStep(phase, tuple(tasks)))],
            tasks=len(tasks),
            workers=self.workers,
            job_name=phase.name,
            logging_dir=str(logs),
            **{"qos": "", "env_command": _environment(), **options},
        )
        with _quiet(logs):
            try:
                executor.run()
            except subprocess.CalledProcessError as error:
                raise ZerolmError(
                    f"{phase.name}: sbatch failed with exit code {error.returncode}. "
                    f"{logs}/launch_script.slurm is what was submitted."
                ) from error
        job = executor.job_id
        print(f"{phase.name}: Slurm job {job}, {len(tasks):,} tasks", file=sys.stderr, flush=True)
        self._wait(phase, tasks, job)

    def _wait(self, phase: Phase, tasks: Sequence[int], job: str) -> None:
        left, gone = set(tasks), 0
        while left and gone < LOST_POLLS:
            time.sleep(float(self.options.get("poll_seconds", POLL_SECONDS)))
            before = len(left)
            left = {task for task in left if not phase.path(task).exists()}
            if len(left) < before:
                done = phase.num_tasks - len(left)
                print(f"{phase.name}: {done:,} of {phase.num_tasks:,} tasks", file=sys.stderr)
            gone = 0 if _in_queue(job) else gone + 1


def _in_queue(job: str) -> bool:
    """Say whether a job waits or runs; squeue forgets jobs, and then fails."""
    try:
        result = subprocess.run(
            ["squeue", "--noheader", "--jobs", str(job)],
            capture_output=True, text=True, timeout=60, check=True,
        )  # fmt: skip
    except subprocess.CalledProcessError:
        return False
    except (OSError, subprocess.TimeoutExpired):  # a controller that is busy
        return True
    return bool(result.stdout.strip())


@dataclass(frozen=True)
class RayExecutor:
    """Runs tasks on a Ray cluster, or on a local one where no address is given."""

    workers: int
    options: Json

    def run(self, phase: Phase, tasks: Sequence[int]) -> None:
        """Run the tasks, and return when all have ended or failed."""
        import ray
        from datatrove.executor.ray import RayPipelineExecutor

        logs = _fresh_logs(phase)
        options = {key: value for key, value in self.options.items() if key != "address"}
        if not ray.is_initialized():
            path = os.pathsep.join(filter(None, sys.path))
            ray.init(
                address=self.options.get("address"),
                log_to_driver=False,
                include_dashboard=False,
                runtime_env={"env_vars": {"PYTHONPATH": path}},
            )
        executor = RayPipelineExecutor(
            [_picklable(TaskStep(phase, tuple(tasks)))],
            tasks=len(tasks),
            workers=self.workers,
            logging_dir=str(logs),
            **options,
        )
        with _quiet(logs), contextlib.suppress(ray.exceptions.RayTaskError):
            executor.run()  # a task that failed has left its note, which run_phase shows


def _fresh_logs(phase: Phase) -> Path:
    """Return a directory for datatrove: its own marks of completion are of one submission only."""
    logs = phase.records / LOGS / time.strftime("%Y%m%d-%H%M%S")
    number = 0
    while logs.exists():
        number += 1
        logs = logs.with_name(f"{logs.name.partition('.')[0]}.{number}")
    logs.mkdir(parents=True)
    return logs.absolute()


def _picklable(step: TaskStep) -> Any:
    """Return a pipeline step: datatrove calls it, and wants to count in it."""
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


def _environment() -> str:
    """Return a command that gives a job this process's Python and modules."""
    path = os.pathsep.join(filter(None, [str(Path.cwd()), *sys.path]))
    programs = os.pathsep.join([str(Path(sys.executable).parent), "$PATH"])
    return f'export PYTHONPATH={shlex.quote(path)}\nexport PATH="{programs}"'


@contextlib.contextmanager
def _quiet(logs: Path) -> Any:
    """Send what datatrove logs in this process to a file."""
    from loguru import logger

    logger.remove()
    number = logger.add(logs / "submission.log")
    try:
        yield
    finally:
        logger.remove(number)
