"""Print how the run of launch/demo.sh went; exit 1 if it did not learn.

    python -m launch.demo_summary RUN

Reads `metrics.jsonl` alone. Standard library only; knows nothing of zerolm.
"""

import argparse
import json
import sys
from pathlib import Path

LEAST_FALL_NATS = 3.0
GREATEST_GAP_NATS = 0.5  # between the validation loss and the training loss
LAST_STEPS = 10  # one batch is a noisy sample


def summary(metrics: Path) -> tuple[str, bool]:
    """Return what to print, and whether the run learned what it should."""
    rows = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    train = [row["train/loss"] for row in rows if "train/loss" in row]
    held_out = [row["eval/loss"] for row in rows if "eval/loss" in row]
    last = sum(train[-LAST_STEPS:]) / len(train[-LAST_STEPS:])
    lines = [
        f"steps         {rows[-1]['step']}, {rows[-1]['tokens']:,} tokens",
        f"train/loss    {train[0]:.3f} at first, {last:.3f} in the last {LAST_STEPS} steps",
        f"eval/loss     {held_out[-1]:.3f}",
    ]
    fall, gap = train[0] - last, abs(held_out[-1] - last)
    learned = fall >= LEAST_FALL_NATS and gap <= GREATEST_GAP_NATS
    if not learned:
        lines.append(
            f"train/loss should fall by {LEAST_FALL_NATS} nats (fell by {fall:.3f}), and eval/loss "
            f"be within {GREATEST_GAP_NATS} of it (is {gap:.3f} away): something is wrong."
        )
    return "\n".join(lines), learned


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m launch.demo_summary", description="Print how the demo's run went."
    )
    parser.add_argument("run_dir", type=Path)
    text, learned = summary(parser.parse_args().run_dir / "metrics.jsonl")
    print(text)
    sys.exit(0 if learned else 1)


if __name__ == "__main__":
    main()
