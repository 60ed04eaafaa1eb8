"""`StepProfiler`: torch profiler traces and memory snapshots of selected steps (`--profile 20:23`).

After each selected step, each rank on the first host writes its own files to `profile/` in the run
directory. If writing fails, the error is logged and training continues. Profiling does not change
the result of a step. Checkpoints and evaluations between steps are not recorded.
"""

import gc
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, record_function

from zerolm.common.files import sync_directory
from zerolm.distributed import process_group
from zerolm.run_dir.files import RunFiles, checkpoint_name
from zerolm.train.journal import Journal
from zerolm.watchdog.progress import record_progress

MAX_MEMORY_EVENTS = 500_000  # allocations and frees per snapshot; older events are dropped
TABLE_ROWS = 40  # maximum number of operators in the table


class StepProfiler:
    """Profiles the steps of one rank.

    Args:
        steps: first and last step to profile, or None.
    """

    def __init__(
        self,
        steps: tuple[int, int] | None,
        run_dir: Path,
        device: torch.device,
        journal: Journal,
    ):
        self.steps, self.on_gpu = steps, device.type == "cuda"
        self.journal = journal
        self.rank, local_rank, _ = process_group.environment_rank()
        self.writes = self.rank == local_rank  # true for ranks on the first host
        self.directory = RunFiles(run_dir).profile
        self._has_begun = False

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Profile a step if it is in `steps`. No rank waits for another.

        Args:
            number: number of the step, starting at 1.
        """
        if self.steps is None or not self.writes or number < self.steps[0]:
            yield
            return
        first, last = self.steps
        if number > last:
            self.steps = None
            if not self._has_begun:
                self.journal.print_rank0(
                    f"note: --profile {first}:{last}: the run is past these steps; none is profiled"
                )
            yield
            return
        self._has_begun = True
        activities = [ProfilerActivity.CPU]
        if self.on_gpu:
            activities.append(ProfilerActivity.CUDA)
            # C++ stacks would be unwound at every allocation, and writing them would take minutes.
            torch.cuda.memory._record_memory_history(stacks="python", max_entries=MAX_MEMORY_EVENTS)
        with (
            torch.profiler.profile(
                activities=activities, record_shapes=True, profile_memory=True
            ) as profile,
            record_function(f"step {number}"),
        ):
            yield
        self._write(profile, number)
        if self.on_gpu:
            torch.cuda.memory._record_memory_history(enabled=None)
        del profile
        gc.collect()  # the profile holds millions of small objects

    def _write(self, profile: Any, number: int) -> None:
        """Write the profile files for a step, and log an event."""
        record_progress("profile")
        start = time.monotonic()
        stem = f"{checkpoint_name(number)}-rank-{self.rank:05d}"
        order = "self_cuda_time_total" if self.on_gpu else "self_cpu_time_total"
        table = profile.key_averages().table(sort_by=order, row_limit=TABLE_ROWS)
        trace = f"{stem}.trace.json.gz"
        writers: dict[str, Callable[[Path], Any]] = {
            trace: lambda path: profile.export_chrome_trace(str(path)),
            f"{stem}.operators.txt": lambda path: path.write_text(table),
        }
        if self.on_gpu:
            writers[f"{stem}.memory.pickle"] = lambda path: torch.cuda.memory._dump_snapshot(
                str(path)
            )
        try:
            self.directory.mkdir(exist_ok=True)
            for name, write in writers.items():
                self._write_file(name, write)
            sync_directory(self.directory)
        except (OSError, RuntimeError) as error:
            reason = f"{type(error).__name__}: {error}"
            print(f"rank {self.rank}: cannot write the profile: {reason}", file=sys.stderr)
            self.journal.log.event("profile_failed", number, error=reason)
            return
        self.journal.log.event("profile", number, trace=trace, seconds=time.monotonic() - start)
        self.journal.print_rank0(f"step={number} profile={self.directory / trace}")

    def _write_file(self, name: str, write: Callable[[Path], Any]) -> None:
        temporary = self.directory / f".tmp-{name}"  # torch compresses if the name ends in .gz
        try:
            write(temporary)
            os.replace(temporary, self.directory / name)
        finally:
            temporary.unlink(missing_ok=True)
