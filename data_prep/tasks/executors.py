"""Executors for tasks: local processes, or Slurm through datatrove's executor.

datatrove schedules, requeues and logs. Only task records determine whether a task is done:
preempted and lost tasks run again, but tasks with a valid record do not.
"""

import os
import shutil
import sys
from typing import Any

from data_prep.tasks.phases import Executor, LocalExecutor, Phase, Record
from data_prep.tasks.slurm import SlurmExecutor
from zerolm.common.errors import ConfigError, unknown_keys

EXECUTORS = ("local", "slurm")
SLURM_KEYS = {
    "time": str, "partition": str, "cpus_per_task": int, "mem_per_cpu_gb": int, "qos": str,
    "env_command": str, "venv_path": str, "condaenv": str, "sbatch_args": dict,
    "max_array_size": int, "tasks_per_job": int, "srun_args": dict, "poll_seconds": float,
}  # fmt: skip

Json = dict[str, Any]


def make_executor(name: str, num_workers: int, options: Json, where: str) -> Executor:
    """Return an executor.

    Args:
        options: the recipe's key `executor`: `{"slurm": {...}}`.
    """
    problems = unknown_keys(f"{where}: executor", options, EXECUTORS[1:])
    slurm = options.get("slurm", {})
    problems += _option_problems(slurm, f"{where}: executor.slurm")
    if name not in EXECUTORS:
        problems.append(f"--executor {name}: is not one of {', '.join(EXECUTORS)}.")
    if name == "slurm":
        problems += _slurm_problems(slurm, where)
    if problems:
        raise ConfigError(problems)
    if name == "slurm":
        return SlurmExecutor(num_workers, slurm)
    return LocalExecutor(num_workers, print_progress)


def _option_problems(options: Any, where: str) -> list[str]:
    if not isinstance(options, dict):
        return [f"{where}: {options!r} is not an object of options."]
    return unknown_keys(where, options, SLURM_KEYS) + [
        f"{where}.{key}: {options[key]!r} is not of type {kind.__name__}."
        for key, kind in SLURM_KEYS.items()
        if key in options and not isinstance(options[key], (int, float) if kind is float else kind)
    ]


def _slurm_problems(options: Json, where: str) -> list[str]:
    problems = [
        f"{where}: executor.slurm.{key}: is missing, but sbatch needs it."
        for key in ("time", "partition")
        if key not in options
    ]
    if shutil.which("sbatch") is None:
        problems.append("--executor slurm: sbatch is not on PATH. Run the command on a login node.")
    if "SLURM_ARRAY_TASK_ID" in os.environ:  # datatrove would run one task here, then exit
        problems.append(
            "--executor slurm: this is a job of a Slurm array. Run the command outside the array."
        )
    try:
        import datatrove  # noqa: F401
    except ImportError as error:
        problems.append(
            f"--executor slurm: {error}. Install the extra: bash launch/setup.sh pipeline."
        )
    return problems


def print_progress(phase: Phase, record: Record) -> None:
    """Print the number of finished tasks: after each task if there are few, else about 20 times."""
    done = record["task"] + 1
    if done == phase.num_tasks or done % max(1, phase.num_tasks // 20) == 0:
        print(f"{phase.name}: {done:,} of {phase.num_tasks:,} tasks", file=sys.stderr, flush=True)
