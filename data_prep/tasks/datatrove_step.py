"""Wraps tasks as a step of a datatrove pipeline, which its Slurm executor runs."""

import contextlib
import os
import shlex
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_prep.tasks.phases import Phase, run_task, valid_record

LOG_DIRECTORY = "jobs"  # of datatrove's files, in the directory of a phase's records


@dataclass
class TaskStep:
    """Runs the task of a datatrove rank; each rank runs a pipeline with this single step."""

    phase: Phase
    tasks: tuple[int, ...]

    def __call__(self, data: Any, rank: int = 0, world_size: int = 1) -> None:
        """Run task `tasks[rank]`, unless it already has a valid record."""
        task = self.tasks[rank]
        if valid_record(self.phase, task) is None:
            run_task(self.phase, task)


def pipeline_step(step: TaskStep) -> Any:
    """Wrap a step in a subclass of datatrove's `PipelineStep`."""
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


def new_log_directory(phase: Phase) -> Path:
    """Create a directory for one submission, in which datatrove marks completed ranks."""
    logs = phase.records / LOG_DIRECTORY / time.strftime("%Y%m%d-%H%M%S")
    number = 0
    while logs.exists():
        number += 1
        logs = logs.with_name(f"{logs.name.partition('.')[0]}.{number}")
    logs.mkdir(parents=True)
    return logs.absolute()


def environment_command() -> str:
    """Return a shell command that sets this process's Python and module paths in a job."""
    path = os.pathsep.join(filter(None, sys.path))
    programs = os.pathsep.join([str(Path(sys.executable).parent), "$PATH"])
    return f'export PYTHONPATH={shlex.quote(path)}\nexport PATH="{programs}"'


@contextlib.contextmanager
def log_to_file(logs: Path) -> Iterator[None]:
    """Redirect datatrove's log in this process from the terminal to a file."""
    from datatrove.utils.logging import logger  # its import configures the logger

    logger.remove()
    number = logger.add(logs / "submission.log")
    try:
        yield
    finally:
        logger.remove(number)
