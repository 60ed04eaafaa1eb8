"""Print the first and last losses of launch/demo.sh's run; exit 1 if it did not learn.

python -m launch.demo.summary RUN
"""

import argparse
import json
import sys
from pathlib import Path

from zerolm.run_dir.files import RunFiles

MIN_FALL_NATS = 2.5
MAX_GAP_NATS = 0.5  # largest allowed difference between validation and training loss
LAST_STEPS = 10  # number of losses to average, since the loss of a single batch is noisy


def summary(metrics: Path) -> tuple[str, bool]:
    """Return (text to print, whether the run learned)."""
    rows = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    train = [row["train/loss"] for row in rows if "train/loss" in row]
    validation = [row["eval/loss"] for row in rows if "eval/loss" in row]
    last = sum(train[-LAST_STEPS:]) / len(train[-LAST_STEPS:])
    lines = [
        f"steps         {rows[-1]['step']}, {rows[-1]['tokens']:,} tokens",
        f"train/loss    {train[0]:.3f} at first, {last:.3f} in the last {LAST_STEPS} steps",
        f"eval/loss     {validation[-1]:.3f}",
    ]
    fall, gap = train[0] - last, abs(validation[-1] - last)
    learned = fall >= MIN_FALL_NATS and gap <= MAX_GAP_NATS
    if not learned:
        lines.append(
            f"The run did not learn: train/loss must fall by {MIN_FALL_NATS} nats (it fell by "
            f"{fall:.3f}), and eval/loss must differ by at most {MAX_GAP_NATS} (it differs by "
            f"{gap:.3f})."
        )
    return "\n".join(lines), learned


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m launch.demo.summary",
        description="Print the losses of the demo's run; exit 1 if it did not learn.",
    )
    parser.add_argument("run_dir", type=Path, help="the demo's run directory")
    text, learned = summary(RunFiles(parser.parse_args().run_dir).metrics)
    print(text)
    sys.exit(0 if learned else 1)


if __name__ == "__main__":
    main()
