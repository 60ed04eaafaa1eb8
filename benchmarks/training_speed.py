"""Measures steps per second in pretrain.py, a bare DeepSpeed loop, and Hugging Face Trainer.

    python benchmarks/training_speed.py --flags=--compile --trainer_flags=--compile
    python benchmarks/training_speed.py --model_config model_configs/llama-160m.json --num_layers 2

All three train the same model with the same DeepSpeed JSON, batch and token shard under the real
`deepspeed` launcher. They are started once, warmed up, and then take turns of a few seconds, while
the other two are paused (SIGSTOP). A temporarily slow machine affects all of them, since ratios are
computed within a round. Each prints a line every few steps; the time between two lines in a turn
counts, and includes everything that a contender does.

Since pretrain.py stays in its learning-rate warm-up, the others get an equally small learning rate.
Learning routers in a mixture of experts send all tokens to a few experts, which reduces the
computation.
"""

import argparse
import contextlib
import json
import os
import queue
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import ROOT, require
from benchmarks.contenders import LOOPS, argv, pretrain
from benchmarks.machine import hardware
from benchmarks.random_shard import write_random_shard
from benchmarks.tables import parser, show, spread, table
from tests.launching import free_port

OURS, BARE, TRAINER = "pretrain.py", "bare DeepSpeed loop", "Hugging Face Trainer"
STEP_LINE = re.compile(r"^step=(\d+)\b.*\bloss=")
STEPS = 1_000_000  # more than a benchmark needs: it kills its contenders before
PRECISIONS = ("bf16", "fp16")  # keys of the JSON that pretrain.py resolves for all contenders
LEARNING_RATE = 1e-5  # for contenders without a warm-up


def main() -> None:
    arguments = parse_arguments()
    require("accelerate")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # also ends its contenders
    with tempfile.TemporaryDirectory() as scratch_name:
        scratch = Path(scratch_name)
        if arguments.num_layers:
            config = json.loads(Path(arguments.model_config).read_text())
            arguments.model_config = str(scratch / "model.json")
            shallow = config | {"num_hidden_layers": arguments.num_layers}
            Path(arguments.model_config).write_text(json.dumps(shallow))
        write_random_shard(scratch / "shards", arguments.model_config)
        contenders: list[Contender] = []
        try:
            for name in (OURS, BARE, TRAINER):
                script = command_of(name, arguments, scratch)
                contenders.append(Contender(name, script, arguments))
                contenders[-1].warm_up()
                print(f"{name}: warm", flush=True)
            seconds = take_turns(contenders, arguments.rounds)
        finally:
            for contender in contenders:
                contender.kill()
        precision = (
            "bf16" if resolved_profile(arguments, scratch / "run")["bf16"]["enabled"] else "fp32"
        )
    show(describe(seconds, step_tokens(arguments), precision), hardware(), arguments.output)


def parse_arguments() -> argparse.Namespace:
    flags = parser(__doc__)
    flags.add_argument("--model_config", default="model_configs/tiny.json")
    flags.add_argument("--deepspeed_config", default="ds_configs/zero2.json")
    flags.add_argument("--num_processes", type=int, default=2)
    flags.add_argument("--num_layers", type=int, help="number of layers (default: from the config)")
    flags.add_argument("--seq_len", type=int, default=256)
    flags.add_argument("--micro_batch_size", type=int, default=8)
    flags.add_argument("--accumulation", type=int, default=2)
    flags.add_argument("--warmup_steps", type=int, default=10, help="before the first round")
    flags.add_argument("--log_interval", type=int, default=4, help="steps per line")
    flags.add_argument("--turn_lines", type=int, default=2, help="lines timed per turn")
    flags.add_argument("--rounds", type=int, default=20)
    flags.add_argument("--timeout", type=int, default=300, help="seconds to wait for a line")
    flags.add_argument(
        "--flags", default="", help="additional flags of pretrain.py, such as --flags=--compile"
    )
    flags.add_argument("--trainer_flags", default="", help="additional flags of hf_trainer.py")
    return flags.parse_args()


# ---- Contenders, all but one of which are paused at any time


class Contender:
    """A `deepspeed` command that prints `step=N ... loss=L`, running or paused."""

    def __init__(self, name: str, script: Sequence[str], arguments: argparse.Namespace):
        self.name, self.arguments, self.port = name, arguments, free_port()
        threads = max(1, (os.cpu_count() or 1) // arguments.num_processes)
        environment = {"OMP_NUM_THREADS": str(threads), **os.environ}
        environment |= {"PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
        launcher = str(Path(sys.executable).with_name("deepspeed"))
        ranks = ["--num_gpus", str(arguments.num_processes), "--master_port", str(self.port)]
        self.process = subprocess.Popen(
            [launcher, *ranks, *script], cwd=ROOT, env=environment, text=True,
            start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        self.lines: list[str] = []
        self.steps: queue.Queue[tuple[int, float]] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stdout or ():
            now = time.perf_counter()
            self.lines.append(line)
            if match := STEP_LINE.match(line):
                self.steps.put((int(match[1]), now))
        self.steps.put((-1, 0.0))

    def next_line(self) -> tuple[int, float]:
        """Wait for the next line; return its step and the time when it was printed, in seconds."""
        try:
            step, when = self.steps.get(timeout=self.arguments.timeout)
        except queue.Empty:
            step, when = -1, 0.0
        if step < 0:
            how = f"exit code {self.process.poll()}; None if it hangs"
            sys.exit("".join(self.lines[-40:]) + f"\n{self.name} prints no more steps ({how})")
        return step, when

    def warm_up(self) -> None:
        while self.next_line()[0] < self.arguments.warmup_steps:
            pass
        self.stop()

    def take_turn(self) -> float:
        """Run until it has printed some lines; return the mean seconds per step."""
        os.killpg(self.process.pid, signal.SIGCONT)
        first_step, start = self.next_line()  # exclude the step that the pause interrupted
        lines = [self.next_line() for _ in range(self.arguments.turn_lines)]
        self.stop()
        last_step, end = lines[-1]
        return (end - start) / (last_step - first_step)

    def stop(self) -> None:
        os.killpg(self.process.pid, signal.SIGSTOP)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for buffer in Path("/dev/shm").glob(f"deepspeed_*_{self.port}_*"):
            buffer.unlink(missing_ok=True)  # left behind by DeepSpeed


def take_turns(contenders: Sequence[Contender], rounds: int) -> dict[str, list[float]]:
    """Let paused contenders run in turn; return {name: mean seconds per step in each turn}."""
    seconds: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    for number in range(rounds):
        for contender in contenders:
            seconds[contender.name].append(contender.take_turn())
        shown = ", ".join(f"{name} {times[-1]:.4f}" for name, times in seconds.items())
        print(f"round {number + 1}, seconds per step: {shown}", flush=True)
    return seconds


def step_tokens(arguments: argparse.Namespace) -> int:
    """Return the tokens per optimizer step, which are the same for all contenders."""
    sequences = arguments.micro_batch_size * arguments.accumulation * arguments.num_processes
    return arguments.seq_len * sequences


def command_of(name: str, arguments: argparse.Namespace, scratch: Path) -> list[str]:
    """Return a contender's script with its arguments."""
    run_dir, data = scratch / "run", scratch / "shards"
    common = argv(
        model_config=arguments.model_config,
        seq_len=arguments.seq_len,
        log_interval=arguments.log_interval,
    )
    batch = {"micro_batch_size": arguments.micro_batch_size}
    profile = {"deepspeed_config": arguments.deepspeed_config}
    if name == OURS:
        flags = {**profile, **batch, "checkpoint_interval": STEPS}
        own = pretrain(step_tokens(arguments), STEPS, run_dir, data, **flags)
        return [*own, *common, *arguments.flags.split()]
    common += argv(steps=STEPS, shard=data / "shard-00000.bin")
    resolved, ours = scratch / "resolved.json", resolved_profile(arguments, run_dir)
    if name == BARE:
        resolved.write_text(json.dumps(ours))
        return [f"{LOOPS}/bare_deepspeed.py", *common, *argv(deepspeed_config=resolved)]
    own = json.loads(
        Path(arguments.deepspeed_config).read_text()
    )  # Trainer fills its "auto" values
    resolved.write_text(json.dumps(own | {key: ours[key] for key in PRECISIONS if key in ours}))
    more = argv(deepspeed_config=resolved, **batch, accumulation=arguments.accumulation)
    more += argv(learning_rate=LEARNING_RATE)
    return [f"{LOOPS}/hf_trainer.py", *common, *more, *arguments.trainer_flags.split()]


def resolved_profile(arguments: argparse.Namespace, run_dir: Path) -> dict[str, Any]:
    """Return the profile with this batch, and "auto" values as resolved by pretrain.py."""
    ds_config = json.loads((run_dir / "run.json").read_text())["ds_config"]
    ds_config.pop("train_batch_size", None)
    ds_config["train_micro_batch_size_per_gpu"] = arguments.micro_batch_size
    ds_config["gradient_accumulation_steps"] = arguments.accumulation
    ds_config["optimizer"]["params"]["lr"] = LEARNING_RATE
    return ds_config


def describe(seconds: dict[str, list[float]], tokens: int, precision: str) -> list[str]:
    """Return the table of steps per second and of ratios to pretrain.py, and a description."""
    rows = []
    for name, times in seconds.items():
        ratios = [other / ours for other, ours in zip(times, seconds[OURS], strict=True)]
        median, mean = 1 / statistics.median(times), 1 / statistics.fmean(times)
        ratio = "1" if name == OURS else spread(ratios)
        rows.append([name, f"{median:.3f}", f"{mean:.3f}", f"{median * tokens:,.0f}", ratio])
    head = [
        "contender", "steps/s, median", "steps/s, all turns", "tokens/s, median",
        "speed of pretrain.py / contender",
    ]  # fmt: skip
    return [
        table(head, rows),
        f"{len(seconds[OURS])} rounds of {tokens:,} tokens per step, all in {precision}; the last "
        f"column is the median over the rounds.",
    ]


if __name__ == "__main__":
    main()
