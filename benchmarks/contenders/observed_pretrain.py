"""pretrain.py with a timer around everything that only observes training.

benchmarks/observation_overhead.py starts it instead of pretrain.py, with the same arguments. Prints
`mark=N` every `MARK_STEPS` steps. At every mark the first rank writes the seconds of each part and
the number of steps, both since step `WARMUP_STEPS`, to the file that `OBSERVATION_COSTS` names.
Times are wall time in the training thread; `weight norms, ...` includes waiting for other ranks.
"""

import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import pretrain
from zerolm.tracking import report_process, run_log
from zerolm.train import health, noise_scale, throughput
from zerolm.train.run import Run

MARK_STEPS, WARMUP_STEPS = 5, 20
REPORT = "the complete report of a line"
seconds: dict[str, float] = defaultdict(float)
steps_measured = [0]


def timed(owner: Any, name: str, part: str) -> None:
    """Add the seconds of a function to those of a part."""
    original = getattr(owner, name)

    def wrapper(*arguments: Any, **more: Any) -> Any:
        start = time.perf_counter()
        try:
            return original(*arguments, **more)
        finally:
            seconds[part] += time.perf_counter() - start

    setattr(owner, name, wrapper)


def timed_edges(owner: Any, name: str, part: str) -> None:
    """Add the seconds that a context manager takes to enter and exit to those of a part."""
    original: Callable[..., Any] = getattr(owner, name)

    @contextmanager
    def wrapper(*arguments: Any) -> Iterator[None]:
        manager = original(*arguments)
        start = time.perf_counter()
        manager.__enter__()
        seconds[part] += time.perf_counter() - start
        yield
        start = time.perf_counter()
        manager.__exit__(None, None, None)
        seconds[part] += time.perf_counter() - start

    setattr(owner, name, wrapper)


GRADIENTS = "noise scale: gradient norms of micro-batches"
timed(noise_scale, "sum_of_squares", GRADIENTS)
timed_edges(noise_scale.SmallBatches, "backward", GRADIENTS)
timed(health.Health, "begin", "every step: what to measure, clipped gradients")
timed(health.Health, "end_step", "every step: what to measure, clipped gradients")
timed(health.UpdateMeter, "before", "update ratio: copy of the master weights")
timed(health.Health, "row", "weight norms, change of the master weights, one reduction")
timed(throughput, "slowest_rank", "slowest rank: one reduction")
timed(run_log.RunLog, "metrics", "metrics.jsonl, and handing the line to the trackers")
timed(report_process.HtmlReport, "tick", "every step: is a report due, and starting its process")
timed(Run, "report", REPORT)

take_step = Run.step


def step(run: Run, batches: Any) -> None:
    """Take a step, and print a mark every `MARK_STEPS` steps."""
    start = time.perf_counter()
    take_step(run, batches)
    seconds["step"] += time.perf_counter() - start
    steps_measured[0] += 1
    number = run.progress.step
    if number == WARMUP_STEPS:
        seconds.clear()
        steps_measured[0] = 0
    if number % MARK_STEPS == 0 and run.rank == 0:
        print(f"mark={number} loss=", flush=True)
        if path := os.environ.get("OBSERVATION_COSTS"):
            times = {"steps": steps_measured[0], "seconds": dict(seconds)}
            Path(path).write_text(json.dumps(times))


Run.step = step  # type: ignore[method-assign]

if __name__ == "__main__":
    sys.exit(pretrain.main(sys.argv[1:]))
