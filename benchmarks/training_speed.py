"""Steps per second of pretrain.py, of a bare DeepSpeed loop, and of Hugging Face Trainer.

    python benchmarks/training_speed.py
    python benchmarks/training_speed.py --flags=--compile
    python benchmarks/training_speed.py --model_config model_configs/llama-160m.json \\
        --num_layers 2 --micro_batch_size 4
    python benchmarks/training_speed.py --model_config model_configs/mixtral-tiny.json

All three train the same model with the same DeepSpeed JSON, batch and token shard under the real
`deepspeed` launcher. They are started once, warmed up, and then take turns of a few seconds, the
other two being stopped (SIGSTOP): a machine that slows down slows down all of them, and a ratio is
taken within a round. Each prints a line every few steps, and the time between two lines of a turn
counts: whatever a contender does in between is in it.
"""

import argparse
import contextlib
import json
import os
import platform
import queue
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

OURS, BARE, TRAINER = "pretrain.py", "bare DeepSpeed loop", "Hugging Face Trainer"
STEP_LINE = re.compile(r"^step=(\d+)\b.*\bloss=")
SHARD_TOKENS = 4_000_000
STEPS = 1_000_000  # more than a benchmark takes: it ends by killing its contenders


class Contender:
    """A running `deepspeed` command that prints `step=N ... loss=L`, going on or stopped."""

    pattern = STEP_LINE

    def __init__(self, name: str, words: Sequence[str], arguments: argparse.Namespace):
        self.name, self.arguments, self.port = name, arguments, free_port()
        command = [
            str(Path(sys.executable).with_name("deepspeed")),
            *("--num_gpus", str(arguments.num_processes), "--master_port", str(self.port)),
            *words,
        ]
        threads = str(max(1, (os.cpu_count() or 1) // arguments.num_processes))
        environment = {"OMP_NUM_THREADS": threads, **os.environ}  # alike for all contenders
        environment |= {"PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=environment, text=True, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        self.lines: list[str] = []
        self.steps: queue.Queue[tuple[int, float]] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stdout or ():
            now = time.perf_counter()
            self.lines.append(line)
            if match := self.pattern.match(line):
                self.steps.put((int(match[1]), now))
        self.steps.put((-1, 0.0))

    def next_line(self) -> tuple[int, float]:
        """Wait for the next line; return its step and when it came, in seconds."""
        try:
            step, when = self.steps.get(timeout=self.arguments.timeout)
        except queue.Empty:
            step, when = -1, 0.0
        if step < 0:
            how = f"exit code {self.process.poll()}, None is: it hangs"
            sys.exit("".join(self.lines[-40:]) + f"\n{self.name} prints no more ({how})")
        return step, when

    def warm_up(self) -> None:
        while self.next_line()[0] < self.arguments.warmup_steps:
            pass
        self.stop()

    def take_turn(self) -> tuple[float, list[int]]:
        """Go on for some lines; return the mean seconds of a step, and the steps of those lines."""
        os.killpg(self.process.pid, signal.SIGCONT)
        first_step, began = self.next_line()  # a step was interrupted: this interval does not count
        seen = [self.next_line() for _ in range(self.arguments.turn_lines)]
        self.stop()
        last_step, ended = seen[-1]
        return (ended - began) / (last_step - first_step), [step for step, _ in seen]

    def stop(self) -> None:
        os.killpg(self.process.pid, signal.SIGSTOP)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for buffer in Path("/dev/shm").glob(f"deepspeed_*_{self.port}_*"):  # DeepSpeed leaves them
            buffer.unlink(missing_ok=True)


def main() -> None:
    arguments = parse_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # its contenders end with it
    with tempfile.TemporaryDirectory() as scratch_name:
        scratch = Path(scratch_name)
        if arguments.num_layers:
            config = json.loads(Path(arguments.model_config).read_text())
            arguments.model_config = str(scratch / "model.json")
            shallow = config | {"num_hidden_layers": arguments.num_layers}
            Path(arguments.model_config).write_text(json.dumps(shallow))
        write_shard(scratch / "shards", arguments.model_config)
        contenders: list[Contender] = []
        seconds: dict[str, list[float]] = {OURS: [], BARE: [], TRAINER: []}
        measured: set[int] = set()
        try:
            for name in seconds:
                words = command_of(name, arguments, scratch)
                contenders.append(Contender(name, words, arguments))
                contenders[-1].warm_up()
                print(f"{name}: warm", flush=True)
            for number in range(1, arguments.rounds + 1):
                for contender in contenders:
                    step_seconds, steps = contender.take_turn()
                    seconds[contender.name].append(step_seconds)
                    measured.update(steps if contender.name == OURS else ())
                shown = ", ".join(f"{name} {times[-1]:.4f}" for name, times in seconds.items())
                print(f"round {number}, seconds a step: {shown}", flush=True)
            inside = step_seconds_inside(scratch / "run", measured)
        finally:
            for contender in contenders:
                contender.kill()
    report = table(seconds, inside)
    if arguments.output:
        arguments.output.write_text(report + "\n")
    print("\n" + report)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model_config", default="model_configs/tiny.json")
    parser.add_argument("--num_layers", type=int, help="of the model (default: as in its config)")
    parser.add_argument(
        "--flags", default="", help="more flags of pretrain.py, as --flags=--compile"
    )
    parser.add_argument("--deepspeed_config", default="ds_configs/zero2.json")
    parser.add_argument("--num_processes", type=int, default=2)
    parser.add_argument("--seq_len", type=int, default=256)
    parser.add_argument("--micro_batch_size", type=int, default=8)
    parser.add_argument("--accumulation", type=int, default=2)
    parser.add_argument("--warmup_steps", type=int, default=10, help="before the first round")
    parser.add_argument("--log_interval", type=int, default=4, help="steps between two lines")
    parser.add_argument("--turn_lines", type=int, default=2, help="lines that count in a turn")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--timeout", type=int, default=300, help="seconds to wait for a line")
    parser.add_argument("--output", type=Path, help="also write the table to this Markdown file")
    return parser.parse_args()


def write_shard(directory: Path, model_config: str) -> None:
    """Write a source of random ids: what the ids are does not matter to speed."""
    vocab_size = json.loads(Path(model_config).read_text())["vocab_size"]
    ids = np.random.default_rng(0).integers(0, vocab_size, SHARD_TOKENS, dtype=np.int64)
    about = {"name": "random ids", "fingerprint": "random", "files": []}
    with ShardWriter(directory, vocab_size=vocab_size, eos_id=0, tokenizer=about) as writer:
        writer.add(ids)


def command_of(name: str, arguments: argparse.Namespace, scratch: Path) -> list[str]:
    """Return the words after `deepspeed` that run one contender."""
    seq_len, log_interval = str(arguments.seq_len), str(arguments.log_interval)
    common = ["--model_config", arguments.model_config, "--seq_len", seq_len]
    common += ["--log_interval", log_interval]
    run_dir = scratch / "run"
    if name == OURS:
        step_tokens = (
            arguments.seq_len
            * arguments.micro_batch_size
            * arguments.accumulation
            * arguments.num_processes
        )
        return [
            "pretrain.py", *common, "--deepspeed_config", arguments.deepspeed_config,
            "--data", str(scratch / "shards"), "--run_dir", str(run_dir),
            "--micro_batch_size", str(arguments.micro_batch_size),
            "--batch_tokens", str(step_tokens),
            "--total_tokens", str(STEPS * step_tokens),
            "--checkpoint_interval", str(STEPS), "--wandb", "off", *arguments.flags.split(),
        ]  # fmt: skip
    common += ["--steps", str(STEPS), "--shard", str(scratch / "shards/shard-00000.bin")]
    if name == BARE:
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


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def step_seconds_inside(run_dir: Path, measured: set[int]) -> list[float]:
    """Return `throughput/step_seconds` of the lines that counted: without logging."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    key = "throughput/step_seconds"
    return [row[key] for row in rows if key in row and row["step"] in measured]


def table(seconds: dict[str, list[float]], inside: list[float]) -> str:
    """Return the Markdown table: steps per second, and how many times those pretrain.py makes."""
    lines = [
        f"`python {shlex.join(sys.argv)}`, {time.strftime('%Y-%m-%d')}, {hardware()}",
        "",
        "| contender | steps/s, median | steps/s, all turns | pretrain.py is times as fast |",
        "|---|---|---|---|",
    ]
    for name, times in seconds.items():
        ratios = [other / own for other, own in zip(times, seconds[OURS], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        ratio = "1" if name == OURS else f"{middle:.3f} (quartiles {low:.3f} to {high:.3f})"
        median, mean = 1 / statistics.median(times), 1 / statistics.fmean(times)
        lines.append(f"| {name} | {median:.3f} | {mean:.3f} | {ratio} |")
    lines += [
        "",
        f"{len(seconds[OURS])} rounds; the last column is the median over the rounds. "
        f"pretrain.py itself reports {statistics.median(inside):.4f} s a step (median).",
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
