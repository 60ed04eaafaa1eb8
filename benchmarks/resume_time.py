"""Time of a resume as a run gets longer: opening its log, and reading the first batch.

    python benchmarks/resume_time.py [--output results.md]

The rest of a resume, verifying and loading a checkpoint, depends on the model and not on the
position of the run. Here the run has taken 1e3 to 1e7 steps, with a line of metrics every ten
steps, and the data is at the same position. Times are medians of five.
"""

import argparse
import json
import platform
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

BATCH_SEQUENCES, SEQ_LEN, LOG_INTERVAL, ROUNDS = 256, 128, 10, 5


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, help="also write the table to this file")
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

    from zerolm.shards.writer import ShardWriter

    tokenizer = {"name": "none", "fingerprint": "none", "files": []}
    with ShardWriter(directory, vocab_size=512, eos_id=0, tokenizer=tokenizer) as writer:
        for _ in range(200):
            writer.add(np.append(np.arange(1, 500), 0))
    return directory


def write_metrics(run_dir: Path, steps: int) -> int:
    """Write the log of a run of `steps` steps; return its size in bytes."""
    run_dir.mkdir()
    row = {"tokens": 0} | {f"train/metric_{number}": 1.2345678901234 for number in range(20)}
    with open(run_dir / "metrics.jsonl", "w") as file:
        for step in range(LOG_INTERVAL, steps + 2 * LOG_INTERVAL, LOG_INTERVAL):
            file.write(json.dumps({"step": step, **row}) + "\n")
    return (run_dir / "metrics.jsonl").stat().st_size


def open_log(run_dir: Path, steps: int) -> float:
    from zerolm.tracking.run_log import RunLog

    start = time.perf_counter()
    log = RunLog(run_dir, steps, writes=True)
    seconds = time.perf_counter() - start
    log.close()
    return seconds


def first_batch(shards: Path, steps: int) -> float:
    from zerolm.data.loader import TokenStream
    from zerolm.optim.schedule import BatchSchedule
    from zerolm.shards.reader import open_source

    start = time.perf_counter()
    stream = TokenStream(
        [open_source(shards)], [1.0], seq_len=SEQ_LEN, seed=0, micro_batch_size=8, rank=0,
        world_size=1, batch_schedule=BatchSchedule(BATCH_SEQUENCES),
        position=steps * BATCH_SEQUENCES, end_position=1 << 62,
    )  # fmt: skip
    next(iter(stream))
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
