"""Where tasks run: processes of this machine, or Slurm and Ray through datatrove's executors.

datatrove starts a pipeline of one step for every rank; the step runs our task of that number, which
writes its own record. datatrove schedules, requeues and logs; what is done is for our records to
say, so a task that was preempted or lost is run again, and one that has its record never.
"""

import contextlib
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from data_prep.phases import Executor, LocalExecutor, Phase, Record
from data_prep.remote_tasks import TaskStep, fresh_logs, picklable, quiet
from data_prep.slurm import SlurmExecutor
from zerolm.errors import ConfigError, did_you_mean

NAMES = ("local", "slurm", "ray")
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
        if "SLURM_ARRAY_TASK_ID" in os.environ:  # datatrove would run one task here, and end
            problems.append("--executor slurm: this is an array job of Slurm. Run it outside.")
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


@dataclass(frozen=True)
class RayExecutor:
    """Runs tasks on a Ray cluster, or on a local one where no address is given."""

    workers: int
    options: Json

    def run(self, phase: Phase, tasks: Sequence[int]) -> None:
        """Run the tasks, and return when all have ended or failed."""
        import ray
        from datatrove.executor.ray import RayPipelineExecutor

        logs = fresh_logs(phase)
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
            [picklable(TaskStep(phase, tuple(tasks)))],
            tasks=len(tasks),
            workers=self.workers,
            logging_dir=str(logs),
            **options,
        )
        with quiet(logs), contextlib.suppress(ray.exceptions.RayTaskError):
            executor.run()  # a task that failed has left its note, which run_phase shows
