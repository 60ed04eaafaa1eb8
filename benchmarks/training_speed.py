"""Steps per second of pretrain.py, of a bare DeepSpeed loop, and of Hugging Face Trainer.

    python benchmarks/training_speed.py
    python benchmarks/training_speed.py --num_processes 1 --seq_len 2048 \\
        --model_config model_configs/llama-160m.json

All three train the same model with the same DeepSpeed JSON, batch and token shard under the real
`deepspeed` launcher. Repetitions are interleaved (A B C, A B C, ...), so that a machine that slows
down slows down all of them; ratios are taken within a repetition. Each prints a line every few
steps, and the time between two lines counts: whatever a contender does in between is in it.
"""

import argparse
import itertools
import json
import os
import platform
import re
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from zerolm.shard_writer import ShardWriter  # noqa: E402 - this file is run as a script

CONTENDERS = ("pretrain.py", "bare DeepSpeed loop", "Hugging Face Trainer")
STEP_LINE = re.compile(r"^step=(\d+)\b.*\bloss=")
SHARD_TOKENS = 4_000_000


def main() -> None:
    arguments = parse_arguments()
    if arguments.warmup_steps % arguments.log_interval:
        sys.exit("--warmup_steps must be a multiple of --log_interval")
    rates: dict[str, list[list[float]]] = {name: [] for name in CONTENDERS}
    inside: list[float] = []
    with tempfile.TemporaryDirectory() as scratch_name:
        scratch = Path(scratch_name)
        write_shard(scratch / "shards", arguments.model_config)
        for repeat in range(arguments.repeats):
            for name in CONTENDERS:
                run_dir = scratch / f"run-{repeat}"
                command = command_of(name, arguments, scratch, run_dir)
                rates[name].append(seconds_per_step(command, arguments))
                if name == "pretrain.py":
                    inside += step_seconds_inside(run_dir, arguments.warmup_steps)
                median = statistics.median(rates[name][-1])
                print(f"{repeat + 1}/{arguments.repeats} {name}: {median:.4f} s a step", flush=True)
    report = table(arguments, rates, inside)
    if arguments.output:
        arguments.output.write_text(report + "\n")
    print("\n" + report)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model_config", default="model_configs/tiny.json")
    parser.add_argument("--deepspeed_config", default="ds_configs/zero2.json")
    parser.add_argument("--num_processes", type=int, default=2)
    parser.add_argument("--seq_len", type=int, default=256)
    parser.add_argument("--micro_batch_size", type=int, default=8)
    parser.add_argument("--accumulation", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--warmup_steps", type=int, default=10, help="left out of the figures")
    parser.add_argument("--log_interval", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--timeout", type=int, default=600, help="seconds for one run")
    parser.add_argument("--output", type=Path, help="also write the table to this Markdown file")
    return parser.parse_args()


def write_shard(directory: Path, model_config: str) -> None:
    """Write a source of random ids: what the ids are does not matter to speed."""
    vocab_size = json.loads(Path(model_config).read_text())["vocab_size"]
    ids = np.random.default_rng(0).integers(0, vocab_size, SHARD_TOKENS, dtype=np.int64)
    about = {"name": "random ids", "fingerprint": "random", "files": []}
    with ShardWriter(directory, vocab_size=vocab_size, eos_id=0, tokenizer=about) as writer:
        writer.add(ids)


def command_of(name: str, arguments: argparse.Namespace, scratch: Path, run_dir: Path) -> list[str]:
    """Return the words after `deepspeed` that run one contender."""
    seq_len, log_interval = str(arguments.seq_len), str(arguments.log_interval)
    common = ["--model_config", arguments.model_config, "--seq_len", seq_len]
    common += ["--log_interval", log_interval]
    if name == "pretrain.py":
        step_tokens = (
            arguments.seq_len
            * arguments.micro_batch_size
            * arguments.accumulation
            * arguments.num_processes
        )
        never = str(arguments.steps + 1)
        return [
            "pretrain.py", *common, "--deepspeed_config", arguments.deepspeed_config,
            "--data", str(scratch / "shards"), "--run_dir", str(run_dir),
            "--micro_batch_size", str(arguments.micro_batch_size),
            "--batch_tokens", str(step_tokens),
            "--total_tokens", str(arguments.steps * step_tokens),
            "--checkpoint_interval", never, "--wandb", "off",
        ]  # fmt: skip
    common += ["--steps", str(arguments.steps), "--shard", str(scratch / "shards/shard-00000.bin")]
    if name == "bare DeepSpeed loop":
        resolved = scratch / "resolved.json"
        resolved.write_text(json.dumps(resolved_profile(arguments, run_dir)))
        return ["benchmarks/bare_deepspeed.py", *common, "--deepspeed_config", str(resolved)]
    return [
        "benchmarks/hf_trainer.py", *common, "--deepspeed_config", arguments.deepspeed_config,
        "--micro_batch_size", str(arguments.micro_batch_size),
        "--accumulation", str(arguments.accumulation),
    ]  # fmt: skip


def resolved_profile(arguments: argparse.Namespace, run_dir: Path) -> dict[str, Any]:
    """Return the profile as pretrain.py resolved its "auto"s, with the batch of this benchmark."""
    ds_config = json.loads((run_dir / "run.json").read_text())["ds_config"]
    ds_config.pop("train_batch_size", None)
    ds_config["train_micro_batch_size_per_gpu"] = arguments.micro_batch_size
    ds_config["gradient_accumulation_steps"] = arguments.accumulation
    return ds_config


def seconds_per_step(words: Sequence[str], arguments: argparse.Namespace) -> list[float]:
    """Run one contender and return the mean step time of each interval between two of its lines."""
    command = [
        str(Path(sys.executable).with_name("deepspeed")),
        *("--num_gpus", str(arguments.num_processes), "--master_port", str(free_port())),
        *words,
    ]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    timer = threading.Timer(arguments.timeout, os.killpg, (process.pid, signal.SIGKILL))
    timer.start()
    try:
        lines, seen = [], []
        for line in process.stdout or ():
            lines.append(line)
            if match := STEP_LINE.match(line):
                seen.append((int(match[1]), time.perf_counter()))
        if process.wait() != 0:
            sys.exit(
                "".join(lines[-40:]) + f"\nfailed ({process.returncode}): {shlex.join(command)}"
            )
    finally:
        timer.cancel()
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    measured = [(step, when) for step, when in seen if step >= arguments.warmup_steps]
    return [
        (when - when_before) / (step - step_before)
        for (step_before, when_before), (step, when) in itertools.pairwise(measured)
    ]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def step_seconds_inside(run_dir: Path, warmup_steps: int) -> list[float]:
    """Return `throughput/step_seconds` after the warm-up: without logging and evaluation."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    key = "throughput/step_seconds"
    return [row[key] for row in rows if key in row and row["step"] > warmup_steps]


def table(
    arguments: argparse.Namespace, seconds: dict[str, list[list[float]]], inside: list[float]
) -> str:
    """Return the Markdown table: steps per second, and how many times those of pretrain.py."""
    lines = [
        f"`python {shlex.join(sys.argv)}`, {time.strftime('%Y-%m-%d')}, {hardware()}",
        "",
        "| contender | steps/s | whole loop, steps/s | pretrain.py is times as fast (min to max) |",
        "|---|---|---|---|",
    ]
    ours = [statistics.median(run) for run in seconds["pretrain.py"]]
    for name in CONTENDERS:
        theirs = [statistics.median(run) for run in seconds[name]]
        ratios = sorted(other / own for other, own in zip(theirs, ours, strict=True))
        ratio = f"{statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})"
        step = statistics.median(step for run in seconds[name] for step in run)
        whole = statistics.median(statistics.fmean(run) for run in seconds[name])
        shown = "1" if name == "pretrain.py" else ratio
        lines.append(f"| {name} | {1 / step:.3f} | {1 / whole:.3f} | {shown} |")
    lines += [
        "",
        f"Median step time that pretrain.py itself reports: {statistics.median(inside):.4f} s.",
    ]
    return "\n".join(lines)


def hardware() -> str:
    """Say what this was measured on."""
    import torch

    if torch.cuda.is_available():
        device = torch.cuda.get_device_name()
    else:
        found = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
        device = f"{os.cpu_count()} cores of {found[1] if found else platform.machine()}"
    return f"{device}, Python {platform.python_version()}, torch {torch.__version__}"


if __name__ == "__main__":
    main()
