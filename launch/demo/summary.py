"""Print the first and last losses of launch/demo.sh's run; exit 1 if it did not learn.

python -m launch.demo.summary RUN
"""

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path

from zerolm.run_dir.files import RunFiles
from zerolm.run_dir.records import read_run_json

MIN_FALL_NATS = 2.5
MAX_GAP_NATS = 0.5  # largest allowed difference between validation and training loss
LAST_STEPS = 40  # number of losses to average: those of single batches differ by more than a nat


def summary(metrics: Path, weights: Mapping[str, float]) -> tuple[str, bool]:
    """Return (text to print, whether the run learned).

    `eval/loss` is a mean over tokens, and the library of each Python holds out another share of
    code. So the validation losses of the sources get their weights in training.
    """
    rows = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    train = [row["train/loss"] for row in rows if "train/loss" in row]
    evaluated = [row for row in rows if "eval/loss" in row][-1]
    held_out = {name: evaluated[f"eval/{name}-val/loss"] for name in weights}
    validation = sum(weights[name] * loss for name, loss in held_out.items())
    last = sum(train[-LAST_STEPS:]) / len(train[-LAST_STEPS:])
    lines = [
        f"steps         {rows[-1]['step']}, {rows[-1]['tokens']:,} tokens",
        f"train/loss    {train[0]:.3f} at first, {last:.3f} in the last {LAST_STEPS} steps",
        f"eval/loss     {validation:.3f} ("
        + " + ".join(f"{weights[name]:g} x {held_out[name]:.3f} {name}" for name in weights)
        + ")",
    ]
    fall, gap = train[0] - last, abs(validation - last)
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
    run_dir = parser.parse_args().run_dir
    given = [each.rpartition("=") for each in read_run_json(run_dir)["settings"]["data"]]
    weights = {Path(source).name: float(weight) for source, _, weight in given}
    text, learned = summary(RunFiles(run_dir).metrics, weights)
    print(text)
    sys.exit(0 if learned else 1)


if __name__ == "__main__":
    main()
