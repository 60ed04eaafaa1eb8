"""Executors of tasks: local processes, or Slurm and Ray through datatrove's executors.

datatrove schedules, requeues and logs. Only task records decide whether a task is done: a preempted
or lost task runs again, a task with a valid record does not.
"""

import contextlib
import os
import shutil
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from data_prep.tasks.datatrove_step import TaskStep, log_to_file, new_log_directory, pipeline_step
from data_prep.tasks.phases import Executor, LocalExecutor, Phase, Record
from data_prep.tasks.slurm import SlurmExecutor
from zerolm.common.errors import ConfigError, unknown_keys

EXECUTORS = ("local", "slurm", "ray")
SLURM_KEYS = {
    "time": str, "partition": str, "cpus_per_task": int, "mem_per_cpu_gb": int, "qos": str,
    "env_command": str, "venv_path": str, "condaenv": str, "sbatch_args": dict,
    "max_array_size": int, "tasks_per_job": int, "srun_args": dict, "poll_seconds": float,
}  # fmt: skip
RAY_KEYS = {
    "address": str, "cpus_per_task": int, "mem_per_cpu_gb": float, "tasks_per_job": int,
    "ray_remote_kwargs": dict,
}  # fmt: skip

CONNECT_SECONDS = 20.0  # to a Ray cluster

Json = dict[str, Any]


def make_executor(name: str, num_workers: int, options: Json, where: str) -> Executor:
    """Return an executor.

    Args:
        options: `executor` of the recipe: `{"slurm": {...}, "ray": {...}}`.
    """
    problems = unknown_keys(f"{where}: executor", options, EXECUTORS[1:])
    for key, known in (("slurm", SLURM_KEYS), ("ray", RAY_KEYS)):
        problems += _option_problems(options.get(key, {}), known, f"{where}: executor.{key}")
    if name not in EXECUTORS:
        problems.append(f"--executor {name}: is not one of {', '.join(EXECUTORS)}.")
    if name == "slurm":
        problems += _slurm_problems(options.get("slurm", {}), where)
    if name in ("slurm", "ray"):
        problems += _package_problems(name)
    if name == "ray" and not problems:
        problems += _ray_problems(options.get("ray", {}), where)
    if problems:
        raise ConfigError(problems)
    if name == "slurm":
        return SlurmExecutor(num_workers, options["slurm"])
    if name == "ray":
        return RayExecutor(num_workers, options.get("ray", {}))
    return LocalExecutor(num_workers, print_progress)


def _option_problems(options: Any, known: dict[str, type], where: str) -> list[str]:
    if not isinstance(options, dict):
        return [f"{where}: {options!r} is not an object of options."]
    return unknown_keys(where, options, known) + [
        f"{where}.{key}: {options[key]!r} is not of type {kind.__name__}."
        for key, kind in known.items()
        if key in options and not isinstance(options[key], (int, float) if kind is float else kind)
    ]


def _slurm_problems(options: Json, where: str) -> list[str]:
    problems = [
        f"{where}: executor.slurm.{key}: is missing, and sbatch needs it."
        for key in ("time", "partition")
        if key not in options
    ]
    if shutil.which("sbatch") is None:
        problems.append("--executor slurm: there is no sbatch on PATH. Run it on a login node.")
    if "SLURM_ARRAY_TASK_ID" in os.environ:  # datatrove would run one task here, and exit
        problems.append("--executor slurm: this is a job of a Slurm array. Run it outside of one.")
    return problems


def _ray_problems(options: Json, where: str) -> list[str]:
    """Connect to the address once: Ray itself waits for minutes, without a word."""
    address = options.get("address", "")
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not port.isdecimal():  # none, or "auto"
        return []
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
    except OSError as error:
        return [
            f"{where}: executor.ray.address: {address}: no Ray cluster answers there ({error}). "
            f"Start it (on that host: ray start --head --port {port}), or correct the address."
        ]
    return []


def _package_problems(name: str) -> list[str]:
    problems = []
    for package, extra in [("datatrove", "pipeline")] + ([("ray", "ray")] if name == "ray" else []):
        try:
            __import__(package)
        except ImportError as error:
            problems.append(
                f"--executor {name}: {error}. Install the extra: bash launch/setup.sh {extra}."
            )
    return problems


def print_progress(phase: Phase, record: Record) -> None:
    """Print the number of finished tasks: after each if there are few, else about 20 times."""
    done = record["task"] + 1
    if done == phase.num_tasks or done % max(1, phase.num_tasks // 20) == 0:
        print(f"{phase.name}: {done:,} of {phase.num_tasks:,} tasks", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class RayExecutor:
    """Runs tasks on a Ray cluster, or on a new local one if there is no address."""

    num_workers: int
    options: Json

    def run(self, phase: Phase, tasks: Sequence[int]) -> None:
        """Run the tasks, and return when all have ended or failed."""
        import ray
        from datatrove.executor.ray import RayPipelineExecutor

        logs = new_log_directory(phase)
        options = {key: value for key, value in self.options.items() if key != "address"}
        if not ray.is_initialized():
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # telemetry of a cluster
            path = os.pathsep.join(filter(None, sys.path))
            ray.init(
                address=self.options.get("address"),
                log_to_driver=False,
                include_dashboard=False,
                runtime_env={"env_vars": {"PYTHONPATH": path}},
            )
        executor = RayPipelineExecutor(
            [pipeline_step(TaskStep(phase, tuple(tasks)))],
            tasks=len(tasks),
            workers=self.num_workers,
            logging_dir=str(logs),
            **options,
        )
        with log_to_file(logs), contextlib.suppress(ray.exceptions.RayTaskError):
            executor.run()  # run_phase reports the notes of failed tasks
