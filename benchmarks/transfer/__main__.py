"""The best learning rate at several widths and depths, with and without CompleteP.

    python -m benchmarks.transfer --output results-of-this-gpu --minutes 9
    python -m benchmarks.transfer --output toy --toy         # the same end to end on a CPU
    python -m benchmarks.transfer --output results-of-this-gpu --minutes 0 --plot transfer.png

Each run is `python pretrain.py` in a process of its own: a Llama with heads of 32 in float32, the
text of launch/demo.sh (its shards must exist), ZeRO-1, AdamW without clipping, a linear schedule.
`--jobs` runs are executed concurrently. First come seven learning rates at factors of 2 for each
size, the largest sizes first; then rates beyond, where the best is at an end; then two more seeds
at each best one. The base is the smallest model, where both parametrizations are the same in every
bit, so it runs once. The figure is the validation loss at the end.

A run that cannot end in time is not started, and one that has not ended is stopped. The same
command resumes with the missing runs: `runs.jsonl` in the output folder has a line for each run
that has ended, including runs that diverged. At the end come the tables, which `transfer.md` in
that folder has, too.
"""

import argparse
import contextlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import ROOT, tables
from benchmarks.transfer import optima
from benchmarks.transfer.optima import COMPLETEP, STANDARD, Losses, Run
from zerolm.common.errors import EXIT_DONE, EXIT_GAVE_UP

HEAD, VOCABULARY = 32, 4096
SEEDS = (0, 1, 2)
BEYOND = 3  # further exponents at an end, at most


class Scale(NamedTuple):
    """What is trained.

    Attributes:
        base: hidden size and layers of the base; `sizes` has it, too.
        exponents: base-2 exponents of the learning rates.
    """

    base: tuple[int, int]
    sizes: tuple[tuple[int, int], ...]
    exponents: tuple[int, ...]
    tokens: int
    batch_tokens: int
    seq_len: int


# The largest first, so that none of them is left for the end.
FULL = Scale(
    (64, 2), ((512, 2), (256, 8), (64, 2), (256, 4), (256, 2), (128, 2)), (*range(-10, -3),),
    2_000_000, 8192, 256,
)  # fmt: skip
TOY = Scale((32, 1), ((64, 2), (32, 1)), (-8, -7, -6), 8192, 1024, 64)


def main() -> None:
    arguments = parse_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    scale = TOY if arguments.toy else FULL
    scale = scale._replace(tokens=arguments.tokens or scale.tokens)
    arguments.output.mkdir(parents=True, exist_ok=True)
    path = arguments.output / "runs.jsonl"
    if arguments.minutes:
        with tempfile.TemporaryDirectory() as scratch:
            train_all(arguments, scale, path, Path(scratch))
    losses = optima.read(path)
    if not losses:
        sys.exit(f"{path}: no run has ended")
    if arguments.plot:
        optima.plot(losses, scale.base, arguments.plot)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    about = f"{len(losses)} runs of {scale.tokens:,} tokens, {rows[-1]['device']}"
    tables.show(optima.show(losses, scale.base), about, arguments.output / "transfer.md")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.transfer",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--output", type=Path, required=True, help="folder of runs.jsonl")
    parser.add_argument("--minutes", type=float, default=9, help="time limit; 0: only the tables")
    parser.add_argument("--jobs", type=int, default=14, help="runs at the same time")
    parser.add_argument("--tokens", type=int, help="tokens of a run (default: 2M)")
    parser.add_argument(
        "--data", type=Path, default=ROOT / "demo/shards", help="shards of the demo"
    )
    parser.add_argument("--plot", type=Path, help="also draw the losses into this PNG")
    parser.add_argument("--toy", action="store_true", help="tiny models, and a few tokens")
    return parser.parse_args()


def wanted(losses: Losses, scale: Scale) -> list[Run]:
    """Return all wanted runs, as far as the losses so far determine them, most important first."""
    lines = [
        (*size, name)
        for size in scale.sizes
        for name in (STANDARD, COMPLETEP)
        if size != scale.base or name == STANDARD
    ]
    first = [Run(*line, each) for line in lines for each in scale.exponents]
    later, seeds = list[Run](), list[Run]()
    limits = scale.exponents[0] - BEYOND, scale.exponents[-1] + BEYOND
    for line in lines:
        curve = optima.of_line(losses, line)
        if not set(scale.exponents) <= set(curve):
            continue
        later += [Run(*line, each) for each in optima.edges(curve, limits)]
        if not optima.edges(curve, limits):
            seeds += [Run(*line, optima.best(curve), seed) for seed in SEEDS[1:]]
    return [*first, *later, *seeds]


def train_all(arguments: argparse.Namespace, scale: Scale, path: Path, scratch: Path) -> None:
    """Keep `--jobs` runs training until all are done or the time is over."""
    begin = time.monotonic()
    deadline = begin + arguments.minutes * 60 - 5  # to write the tables
    training: dict[Run, tuple[subprocess.Popen[bytes], float]] = {}
    failed: set[Run] = set()
    seconds: dict[tuple[int, int], float] = {}  # of the slowest run of a size
    try:
        while time.monotonic() < deadline:
            losses = optima.read(path)
            given = {*losses, *training, *failed}
            missing = [run for run in wanted(losses, scale) if run not in given]
            now = time.monotonic()
            missing = [run for run in missing if now + seconds.get(run[:2], 0) < deadline]
            for run in missing[: arguments.jobs - len(training)]:
                training[run] = start(run, arguments, scale, scratch), time.monotonic()
            if not training:
                break
            time.sleep(0.2)
            for run, (process, started) in list(training.items()):
                if process.poll() is None:
                    continue
                took = round(time.monotonic() - started, 1)
                seconds[run[:2]] = max(seconds.get(run[:2], 0.0), took)
                del training[run]
                row, error = result(run, process.returncode, scratch)
                if error:
                    failed.add(run)
                else:
                    with path.open("a") as file:
                        file.write(json.dumps(row | {"seconds": took}) + "\n")
                shown = error or f"loss {row['loss']}"
                print(f"{time.monotonic() - begin:.0f} s: {run} {took} s: {shown}", flush=True)
    finally:
        for process, _ in training.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def folder(run: Run, scratch: Path) -> Path:
    return scratch / "-".join(map(str, run))


def start(
    run: Run, arguments: argparse.Namespace, scale: Scale, scratch: Path
) -> "subprocess.Popen[bytes]":
    """Start pretrain.py with the model and settings of a run."""
    base = folder(run, scratch)
    base.mkdir()
    model = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": VOCABULARY,
        "hidden_size": run.width, "intermediate_size": 3 * run.width,
        "num_hidden_layers": run.layers, "num_attention_heads": run.width // HEAD,
        "num_key_value_heads": run.width // HEAD, "max_position_embeddings": scale.seq_len,
        "tie_word_embeddings": False,
    }  # fmt: skip
    (base / "model.json").write_text(json.dumps(model))
    profile = {"zero_optimization": {"stage": 1}, "gradient_clipping": 0.0}
    (base / "ds.json").write_text(json.dumps(profile))
    shards = [arguments.data / name for name in ("code", "prose", "code-val", "prose-val")]
    flags: list[object] = [
        "--model_config", base / "model.json", "--deepspeed_config", base / "ds.json",
        "--precision", "fp32", "--data", shards[0], "--data", shards[1], "--val_data", shards[2],
        "--val_data", shards[3], "--run_dir", base / "run", "--total_tokens", scale.tokens,
        "--batch_tokens", scale.batch_tokens, "--seq_len", scale.seq_len,
        "--micro_batch_size", scale.batch_tokens // scale.seq_len,
        "--learning_rate", 2.0**run.exponent, "--schedule", "linear", "--min_learning_rate", 0,
        "--warmup_tokens", scale.tokens // 10, "--seed", run.seed, "--log_interval", 20,
        "--eval_interval", 1_000_000, "--checkpoint_interval", 1_000_000, "--spike_threshold", 0,
        "--report_interval", 0, "--wandb", "off",
    ]  # fmt: skip
    if run.parametrization == COMPLETEP:
        flags += ["--parametrization", COMPLETEP]
        flags += ["--base_hidden_size", scale.base[0], "--base_layers", scale.base[1]]
    environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    with (base / "log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, ROOT / "pretrain.py", *map(str, flags)], cwd=ROOT,
            env={**os.environ, **environment}, stdout=log, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip


def result(run: Run, code: int, scratch: Path) -> tuple[dict[str, Any], str]:
    """Return (log line of an ended run, error if it neither ended well nor diverged).

    Removes the files of the run. A diverged run has no loss.
    """
    base = folder(run, scratch)
    metrics, record = base / "run/metrics.jsonl", base / "run/run.json"
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    rows = [json.loads(line) for line in lines]
    losses = [row["eval/loss"] for row in rows if "eval/loss" in row]
    found: dict[str, Any] = run._asdict() | {"loss": None}
    if code == EXIT_DONE and math.isfinite(losses[-1]):
        found["loss"] = losses[-1]
    found["train_losses"] = [row["train/loss"] for row in rows if "train/loss" in row]
    found["device"] = json.loads(record.read_text())["device"] if record.exists() else ""
    error = "" if code in (EXIT_DONE, EXIT_GAVE_UP) else (base / "log").read_text()[-600:]
    shutil.rmtree(base)
    return found, error and f"code {code}: {error}"


if __name__ == "__main__":
    main()
