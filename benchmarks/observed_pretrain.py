"""pretrain.py with a stopwatch around everything that only looks at training.

Started by benchmarks/observation_overhead.py in the place of pretrain.py, with the same arguments.
Prints `mark=N` every `MARK_STEPS` steps, whatever pretrain.py prints. With `OBSERVATION_COSTS`
naming a file, the first rank writes the seconds of each part there at every mark: from step
`WARMUP_STEPS` on, in all and of how many steps. Each is wall time in the thread that trains; of
`weight norms, ...` waiting for the other ranks is part.
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

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import pretrain
from zerolm import health, metrics, noise_scale, reporting, throughput
from zerolm.run import Run

MARK_STEPS, WARMUP_STEPS = 5, 20
SEEN = "the whole report of a line"
seconds: dict[str, float] = defaultdict(float)
steps_measured = [0]


def timed(owner: Any, name: str, part: str) -> None:
    """Count the seconds that a function takes for a part."""
    original = getattr(owner, name)

    def wrapper(*words: Any, **more: Any) -> Any:
        began = time.perf_counter()
        try:
            return original(*words, **more)
        finally:
            seconds[part] += time.perf_counter() - began

    setattr(owner, name, wrapper)


def timed_edges(owner: Any, name: str, part: str) -> None:
    """Count the seconds that a context manager takes to enter and to leave."""
    original: Callable[..., Any] = getattr(owner, name)

    @contextmanager
    def wrapper(*words: Any) -> Iterator[None]:
        manager = original(*words)
        began = time.perf_counter()
        manager.__enter__()
        seconds[part] += time.perf_counter() - began
        yield
        began = time.perf_counter()
        manager.__exit__(None, None, None)
        seconds[part] += time.perf_counter() - began

    setattr(owner, name, wrapper)


GRADIENTS = "noise scale: gradient norms of micro-batches"
timed(noise_scale, "square", GRADIENTS)
timed_edges(noise_scale.SmallBatches, "backward", GRADIENTS)
timed(health.Health, "begin", "every step: what is measured, what was clipped")
timed(health.Health, "end_step", "every step: what is measured, what was clipped")
timed(health.UpdateMeter, "before", "update ratio: copy of the masters")
timed(health.Health, "row", "weight norms, change of the masters, one reduction")
timed(throughput, "slowest_rank", "slowest rank: one reduction")
timed(metrics.RunLog, "metrics", "metrics.jsonl, and handing the line to the trackers")
timed(reporting.Reporting, "poke", "every step: is the page due, and starting its process")
timed(Run, "report", SEEN)

take_step = Run.step


def step(run: Run, batches: Any) -> None:
    """Take a step, and print a mark after every so many."""
    began = time.perf_counter()
    take_step(run, batches)
    seconds["step"] += time.perf_counter() - began
    steps_measured[0] += 1
    number = run.progress.step
    if number == WARMUP_STEPS:
        seconds.clear()
        steps_measured[0] = 0
    if number % MARK_STEPS == 0 and run.rank == 0:
        print(f"mark={number} loss=", flush=True)
        if path := os.environ.get("OBSERVATION_COSTS"):
            found = {"steps": steps_measured[0], "seconds": dict(seconds)}
            Path(path).write_text(json.dumps(found))


Run.step = step  # type: ignore[method-assign]

if __name__ == "__main__":
    sys.exit(pretrain.main(sys.argv[1:]))
