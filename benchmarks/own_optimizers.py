"""Tries every optimizer of pytorch-optimizer and heavyball as a user's own, and trains with it.

    pip install --no-deps --target FOLDER pytorch-optimizer==4.1.0 heavyball==3.2.1
    PYTHONPATH=FOLDER python -m benchmarks.own_optimizers --runs RUNS
    python -m benchmarks.own_optimizers --runs RUNS --table own_optimizers.md

Each class gets its default arguments. Those that zerolm accepts at ZeRO-2 or 3 train a tiny Llama
for 10 steps in float32: on one rank, on two, and on one rank in smaller micro-batches, which shows
what rounding alone does. The table has the largest relative difference of a loss, and the largest
difference of a weight as a share of the largest change of a weight. Everything finished is in RUNS,
and is not run again. heavyball trains without torch.compile, which takes minutes for each class.
"""

import argparse
import importlib
import inspect
import json
import multiprocessing
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from tests.end_to_end import runs_in_one_process
from tests.end_to_end.recipe import CLIPPING, recipe
from tests.launching import LLAMA, rows, write_json, write_shards
from zerolm.optim import trial

LIBRARIES = ("pytorch_optimizer", "heavyball")
STAGES, STEPS = (2, 3), 10
VARIANTS = {"one": (1, 2), "two": (2, 2), "rounding": (1, 1)}  # ranks, rows of a micro-batch
# Their loss grows to hundreds at the recipe's rate, where any rounding changes the curve.
LEARNING_RATES = {"pytorch_optimizer.Kate": 1e-7, "heavyball.ADOPT": 1e-7}
BATCH_OF_JOBS = 24  # trained by one process


def optimizers() -> Iterator[str]:
    """Yield the dotted path of each optimizer class of the libraries."""
    for library in LIBRARIES:
        for name, value in sorted(vars(importlib.import_module(library)).items()):
            if inspect.isclass(value) and issubclass(value, torch.optim.Optimizer):
                yield f"{library}.{name}"


def trials(runs: Path) -> dict[str, dict[str, str]]:
    """Return the problems of each optimizer tried so far, by stage."""
    path = runs / "trials.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return dict(json.loads(line) for line in lines)


def tried(name: str) -> tuple[str, dict[int, str]]:
    return name, {stage: trial.trial_problem(name, {}, stage) for stage in STAGES}


def try_out(runs: Path) -> None:
    known = trials(runs)
    with multiprocessing.get_context("fork").Pool(2, maxtasksperchild=1) as pool:
        waiting = [name for name in optimizers() if name not in known]
        for name, problems in pool.imap_unordered(tried, waiting):
            print(name, problems, flush=True)
            with (runs / "trials.jsonl").open("a") as file:
                file.write(json.dumps([name, problems]) + "\n")


def job(runs: Path, name: str, stage: int, variant: str) -> dict[str, Any]:
    base = runs / f"{name}-{stage}-{variant}"
    (base / "weights").mkdir(parents=True)
    profile = write_json(
        base / "profile.json",
        {
            "optimizer": {"type": name, "params": {}},
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": stage},
            "gradient_clipping": CLIPPING,
        },
    )
    micro = VARIANTS[variant][1]
    flags = recipe(runs / "config.json", runs / "shards", base / "run", profile, STEPS, micro)
    if name in LEARNING_RATES:
        for flag in ("--learning_rate", "--min_learning_rate"):
            flags[flags.index(flag) + 1] = LEARNING_RATES[name]
    flags += ["--wandb", "off", "--checkpoint_interval", 1000, "--spike_threshold", 0]
    flags += ["--warmup_tokens", 0, "--schedule", "cosine"]
    return {"flags": flags, "weights": str(base / "weights")}


def train(runs: Path, stage: int) -> None:
    """Train with each optimizer accepted at a stage; one whose process ends is not tried again."""
    accepted = [name for name, problems in trials(runs).items() if not problems[str(stage)]]
    for variant, (ranks, _) in VARIANTS.items():
        while waiting := [n for n in accepted if not (runs / f"{n}-{stage}-{variant}").exists()]:
            batch = waiting[:BATCH_OF_JOBS]
            jobs = [job(runs, name, stage, variant) for name in batch]
            try:
                runs_in_one_process.launch(
                    jobs, runs, ranks, TORCHDYNAMO_DISABLE="1", PYTHONPATH=os.pathsep.join(sys.path)
                )
            except AssertionError as error:
                failed = [name for name in batch if not weights(runs, name, stage, variant)]
                (runs / f"{failed[0]}-{stage}-{variant}" / "error").write_text(str(error))
                for name in failed[1:]:
                    shutil.rmtree(runs / f"{name}-{stage}-{variant}")


def weights(runs: Path, name: str, stage: int, variant: str, step: int = STEPS) -> Any:
    path = runs / f"{name}-{stage}-{variant}" / "weights" / f"{step:03d}.pt"
    return torch.load(path, weights_only=True) if path.exists() else None


def differences(runs: Path, name: str, stage: int, variant: str) -> tuple[float, float] | None:
    """Return the largest differences of losses and weights to one rank; None if not trained."""
    first = weights(runs, name, stage, "one", 1)
    last, other = (weights(runs, name, stage, each) for each in ("one", variant))
    if last is None or other is None:
        return None
    folders = (runs / f"{name}-{stage}-{each}" / "run" for each in ("one", variant))
    one, two = ([*rows(folder, "train/loss").values()] for folder in folders)
    losses = max(abs(a / b - 1) for a, b in zip(one, two, strict=True))
    change = max(float((last[key] - first[key]).abs().max()) for key in first)
    found = max(float((last[key] - other[key]).abs().max()) for key in first)
    return losses, found / change if change else found


def cell(runs: Path, name: str, stage: int, problem: str) -> str:
    if problem:
        end = ". " if problem.startswith("fails") else ", "  # rule and fix follow
        return "refused: " + problem.partition(end)[0].replace("|", "/").replace("\n", " ")
    found = differences(runs, name, stage, "two")
    if not found:
        return "accepted, not trained"
    alone = differences(runs, name, stage, "rounding")
    more = " (rounding alone: {:.0e} / {:.0e})".format(*alone) if alone else ""
    return "{:.0e} / {:.0e}".format(*found) + more


def table(runs: Path) -> str:
    tried = trials(runs)
    lines = [
        "`python -m benchmarks.own_optimizers`: pytorch-optimizer 4.1.0 and heavyball 3.2.1, "
        f"torch {torch.__version__}; 10 steps on 1 and 2 ranks, losses / weights\n",
        "| optimizer | ZeRO-2 | ZeRO-3 |",
        "|---|---|---|",
    ]
    for name, problems in sorted(tried.items()):
        cells = [cell(runs, name, stage, problems[str(stage)]) for stage in STAGES]
        if cells[0] == cells[1]:
            cells[1] = "the same"
        lines.append(f"| {name} | {cells[0]} | {cells[1]} |")
    return "\n".join([*lines, "", *summary(runs, tried), ""])


def summary(runs: Path, tried: dict[str, dict[str, str]]) -> Iterator[str]:
    """Yield sentences about all results; more than rounding is 10 times what it does alone."""
    missing = len([*optimizers()]) - len(tried)
    yield f"{len(tried)} classes were tried out, {missing} are missing."
    for stage in STAGES:
        accepted = [name for name, problems in tried.items() if not problems[str(stage)]]
        found = {name: differences(runs, name, stage, "two") for name in accepted}
        trained = {name: pair for name, pair in found.items() if pair}
        text = f"ZeRO-{stage}: {len(accepted)} accepted, {len(trained)} of them trained"
        if trained:
            losses = max(pair[0] for pair in trained.values())
            weights = max(pair[1] for pair in trained.values())
            text += f"; largest differences {losses:.0e} (losses) and {weights:.0e} (weights)"
        more = []
        for name, pair in trained.items():
            alone = differences(runs, name, stage, "rounding")
            if alone and any(a > max(1e-5, 10 * b) for a, b in zip(pair, alone, strict=True)):
                more.append(name)
        yield f"{text}. More than rounding: {', '.join(more) or 'none'}."
    yield (
        "Weights differ most where a rule normalizes gradients near 0: there, micro-batches of "
        "another size on one rank do the same (rounding alone)."
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--runs", type=Path, required=True, help="folder of the results so far")
    parser.add_argument("--table", type=Path, help="only write the table of the results")
    arguments = parser.parse_args()
    runs = arguments.runs
    if arguments.table:
        arguments.table.write_text(table(runs), encoding="utf-8")
        return
    runs.mkdir(parents=True, exist_ok=True)
    write_json(runs / "config.json", LLAMA)
    if not (runs / "shards").exists():
        write_shards(runs / "shards")
    try_out(runs)
    for stage in STAGES:
        train(runs, stage)


if __name__ == "__main__":
    main()
