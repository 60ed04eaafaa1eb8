"""Our tasks as datatrove runs them elsewhere: what its executors of Slurm and of Ray are given."""

import contextlib
import os
import shlex
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_prep.phases import Phase, run_task, valid_record

LOGS = "jobs"  # what datatrove writes, in the directory of a phase's records


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


def fresh_logs(phase: Phase) -> Path:
    """Return a directory for datatrove: its own marks of completion are of one submission only."""
    logs = phase.records / LOGS / time.strftime("%Y%m%d-%H%M%S")
    number = 0
    while logs.exists():
        number += 1
        logs = logs.with_name(f"{logs.name.partition('.')[0]}.{number}")
    logs.mkdir(parents=True)
    return logs.absolute()


def picklable(step: TaskStep) -> Any:
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


def environment() -> str:
    """Return a command that gives a job this process's Python and modules."""
    path = os.pathsep.join(filter(None, [str(Path.cwd()), *sys.path]))
    programs = os.pathsep.join([str(Path(sys.executable).parent), "$PATH"])
    return f'export PYTHONPATH={shlex.quote(path)}\nexport PATH="{programs}"'


@contextlib.contextmanager
def quiet(logs: Path) -> Any:
    """Send what datatrove logs in this process to a file."""
    from datatrove.utils.logging import logger  # which sets it up when it is imported

    logger.remove()
    number = logger.add(logs / "submission.log")
    try:
        yield
    finally:
        logger.remove(number)
