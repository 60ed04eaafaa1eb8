"""Measures the seconds from a rank's fault to the end of the first step not completed before.

    python -m benchmarks.recovery_time [--kills 5] [--fault kill] [--output FILE]

A toy Llama on two ranks runs under `zerolm supervise`. A rank gets SIGKILL, or SIGSTOP with
`--fault stop`, three steps after a checkpoint. The figures are medians over the recoveries, by
part. The parts are taken from the event `recovered`; the sum is timed from outside, from the signal
to the new step's line in metrics.jsonl. Two quiet cores are needed; the last line measures the
machine's own speed.
"""

import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import psutil

from benchmarks.machine import hardware
from benchmarks.tables import parser, show, table
from tests.end_to_end.recipe import profile, recipe
from tests.launching import LLAMA, write_json, write_shards
from tests.supervised import Supervised

SAVE, AFTER_SAVE, SECONDS = 10, 3, 600.0
STEP_SECONDS = 0.1  # added to each step: a toy step is shorter than a kill
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
MANY_STEPS = 100_000  # more than the recoveries need


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--kills", type=int, default=5, help="faults (default: 5)")
    flags.add_argument("--fault", choices=SIGNALS, default="kill")
    arguments = flags.parse_args()
    with tempfile.TemporaryDirectory(prefix="recovery-") as directory:
        base = Path(directory)
        llama, corpus = write_json(base / "llama.json", LLAMA), write_shards(base / "corpus")
        json_file = profile(base / "ds.json", 2, bf16=False)
        run_flags = recipe(llama, corpus, base / "run", json_file, MANY_STEPS, micro=2)
        run_flags += ["--checkpoint_interval", SAVE, "--wandb", "off"]
        fault = f"step.begin:*:*:sleep={STEP_SECONDS}"
        with Supervised(base / "run", run_flags, FAULT=fault) as run:
            found = [recovery(run, SIGNALS[arguments.fault]) for _ in range(arguments.kills)]
    sums = [each["sum"] for each in found]
    rows = [[name, f"{median(each[name] for each in found):.2f}"] for name in found[0]]
    rows.append(["largest sum", f"{max(sums):.2f}"])
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    show(
        [
            f"Seconds, medians of {len(found)}.",
            table(["part", "seconds"], rows),
            f"`import torch`: {time.perf_counter() - start:.2f} s.",
        ],
        hardware(), arguments.output,
    )  # fmt: skip


def recovery(run: Supervised, number: int) -> dict[str, float]:
    """Send a signal to a rank; return the seconds of each part of its recovery."""
    run.wait_for_step(newest_step(run) + SAVE + AFTER_SAVE, SECONDS)
    wait(run, lambda: newest_step(run) % SAVE == AFTER_SAVE)
    wait(run, lambda: newest_checkpoint(run) >= newest_step(run) - AFTER_SAVE)
    pid = random.choice(list(run.heartbeats().values()))["pid"]
    before = len(recoveries(run))
    start = time.monotonic()
    run.send(pid, number)
    time.sleep(0.05)
    last = newest_step(run)
    wait(run, lambda: newest_step(run) > last and len(recoveries(run)) > before)
    seconds = time.monotonic() - start
    rank = psutil.Process(run.heartbeats()[0]["pid"])
    launchers = cpu_seconds(*rank.parents()[:2])  # the node's launcher, and `deepspeed`
    return {
        **recoveries(run)[-1]["parts"], "sum": seconds,
        "CPU seconds of the launchers": launchers, "CPU seconds of a rank": cpu_seconds(rank),
    }  # fmt: skip


def wait(run: Supervised, condition) -> None:
    run.wait_for("the run does not continue", condition, SECONDS)


def recoveries(run: Supervised) -> list[dict]:
    return [event for event in run.events() if event["event"] == "recovered"]


def newest_step(run: Supervised) -> int:
    """Return the step of the last complete line of metrics.jsonl, 0 without one."""
    path = run.run_dir / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return int(lines[-1].partition('"step": ')[2].partition(",")[0]) if lines else 0


def newest_checkpoint(run: Supervised) -> int:
    found = run.run_dir.glob("checkpoints/step-*/MANIFEST.json")
    return max((int(path.parent.name.rpartition("-")[2]) for path in found), default=0)


def cpu_seconds(*processes: psutil.Process) -> float:
    """Return the processes' user and system time."""
    return sum(sum(process.cpu_times()[:2]) for process in processes)


if __name__ == "__main__":
    main()
