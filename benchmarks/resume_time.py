"""How long a resume takes as a run grows: the log is opened and the data's first batch is read.

    python benchmarks/resume_time.py [--output results.md]

The rest of a resume, verifying and loading a checkpoint, depends on the model and not on how far
the run is. Here the run is 1e3 to 1e7 steps long, with a line of metrics every ten steps, and the
data is as far: each time is the median of five.
"""

import argparse
import json
import platform
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

BATCH_SEQUENCES, SEQ_LEN, LOG_INTERVAL, ROUNDS = 256, 128, 10, 5


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, help="write the table there too")
    arguments = parser.parse_args()
    lines = [
        "| steps taken | metrics.jsonl | log opened, s | first batch, s |",
        "|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory() as directory:
        shards = write_shards(Path(directory, "shards"))
        for steps in (10**3, 10**5, 10**7):
            run_dir = Path(directory, f"run-{steps}")
            size = write_metrics(run_dir, steps)
            log = median(open_log(run_dir, steps) for _ in range(ROUNDS))
            batch = median(first_batch(shards, steps) for _ in range(ROUNDS))
            lines.append(f"| {steps:,} | {size / 1e6:.1f} MB | {log:.4f} | {batch:.4f} |")
    table = "\n".join(
        [
            "# Time of a resume",
            "",
            f"`python benchmarks/resume_time.py`, {time.strftime('%Y-%m-%d')}, "
            f"{platform.machine()}, Python {platform.python_version()}. Medians of {ROUNDS}.",
            "",
            *lines,
            "",
        ]
    )
    print(table)
    if arguments.output:
        arguments.output.write_text(table)


def write_shards(directory: Path) -> Path:
    import numpy as np

    from zerolm.shards import ShardWriter

    tokenizer = {"name": "none", "fingerprint": "none", "files": []}
    with ShardWriter(directory, vocab_size=512, eos_id=0, tokenizer=tokenizer) as writer:
        for _ in range(200):
            writer.add(np.append(np.arange(1, 500), 0))
    return directory


def write_metrics(run_dir: Path, steps: int) -> int:
    """Write the log of a run of so many steps; return its size in bytes."""
    run_dir.mkdir()
    row = {"tokens": 0} | {f"train/metric_{number}": 1.2345678901234 for number in range(20)}
    with open(run_dir / "metrics.jsonl", "w") as file:
        for step in range(LOG_INTERVAL, steps + 2 * LOG_INTERVAL, LOG_INTERVAL):
            file.write(json.dumps({"step": step, **row}) + "\n")
    return (run_dir / "metrics.jsonl").stat().st_size


def open_log(run_dir: Path, steps: int) -> float:
    from zerolm.metrics import RunLog

    began = time.perf_counter()
    log = RunLog(run_dir, steps, writes=True)
    seconds = time.perf_counter() - began
    log.close()
    return seconds


def first_batch(shards: Path, steps: int) -> float:
    from zerolm.data import TokenStream
    from zerolm.schedule import BatchSchedule
    from zerolm.shards import open_source

    began = time.perf_counter()
    stream = TokenStream(
        [open_source(shards)], [1.0], seq_len=SEQ_LEN, seed=0, micro_batch_size=8, rank=0,
        world_size=1, batch_schedule=BatchSchedule(BATCH_SEQUENCES),
        position=steps * BATCH_SEQUENCES, end_position=1 << 62,
    )  # fmt: skip
    next(iter(stream))
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
