"""Measures how long `zerolm train` takes to its first step, and what the start costs.

    python -m benchmarks.start_time [--rounds 5] [--other CHECKOUT] [--ranks 8 --counts]

Contenders take turns: `zerolm train`, the same of another checkout (in the same Python
environment), and Hugging Face Trainer under `deepspeed` with the same model, data and DeepSpeed
JSON. Each trains a tiny Llama for five steps, from the command to its end. With `--commands`, the
time of `zerolm plan` (first with an empty cache, then again) and `zerolm train --check`.

With `--counts` each contender runs once more: under strace, which counts the calls that name a
file, and sampled for the memory of all its processes (PSS: shared pages count once).
"""

import contextlib
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import ROOT, require
from benchmarks.contenders import LOOPS, argv, launcher
from benchmarks.machine import hardware
from benchmarks.random_shard import write_random_shard
from benchmarks.tables import parser, show, spread, table
from tests.launching import free_port, kill_session, session_members

OURS, OTHER, TRAINER = "zerolm train", "the other checkout", "Hugging Face Trainer"
MODEL, PROFILE = "model_configs/tiny.json", "ds_configs/zero2.json"
STEPS, SEQ_LEN, BATCH = 5, 256, 32
FIRST_STEP = re.compile(r"step=1\b")
SECONDS = 600.0  # for one command
SAMPLE_SECONDS = 0.5


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--ranks", type=int, default=2)
    flags.add_argument("--rounds", type=int, default=5, help="of each contender, after one more")
    flags.add_argument("--other", type=Path, help="another checkout of zerolm")
    flags.add_argument("--commands", action="store_true", help="also measure plan and --check")
    flags.add_argument("--counts", action="store_true", help="also count files, and memory")
    arguments = flags.parse_args()
    require("accelerate")
    if arguments.counts and shutil.which("strace") is None:
        sys.exit("--counts needs strace: apt-get install strace")
    with tempfile.TemporaryDirectory() as name:
        paragraphs = measure(arguments, Path(name))
    show(paragraphs, hardware(), arguments.output)


def measure(arguments: Any, scratch: Path) -> list[str]:
    """Return the tables."""
    write_random_shard(scratch / "shards", MODEL)
    roots = {OURS: ROOT} | ({OTHER: arguments.other.resolve()} if arguments.other else {})
    runs = {name: Run(root, zerolm_train(scratch, arguments.ranks)) for name, root in roots.items()}
    runs[TRAINER] = Run(ROOT, trainer(scratch, arguments.ranks))
    paragraphs = [timed(runs, arguments.rounds, Run.train, ("first step", "end", "CPU seconds"))]
    if arguments.commands:
        cache = scratch / "cache"
        plan = ["plan", *model_and_batch(), *argv(devices=arguments.ranks)]
        check = [*zerolm_train(scratch, arguments.ranks)()[3:], "--check"]
        for title, words, forgets in (
            ("`zerolm plan`, first", plan, True),
            ("`zerolm plan`, again", plan, False),
            ("`zerolm train --check`", check, False),
        ):
            commands = {
                name: Run(root, lambda words=words: [sys.executable, "-m", "zerolm", *words], cache)
                for name, root in roots.items()
            }
            action = Run.after_forgetting if forgets else Run.command
            parts = (title, "CPU seconds")
            paragraphs.append(timed(commands, arguments.rounds, action, parts))
    if arguments.counts:
        rows = [
            [name, f"{run.file_calls(scratch):,}", f"{run.peak_bytes() / 1e9:.2f}"]
            for name, run in runs.items()
        ]
        head = [f"{arguments.ranks} ranks", "calls that name a file", "peak memory (PSS), GB"]
        paragraphs.append(table(head, rows))
    return paragraphs


def timed(
    runs: dict[str, "Run"],
    rounds: int,
    action: Callable[["Run"], tuple[float, ...]],
    parts: Sequence[str],
) -> str:
    """Let the contenders take turns; return a table of their medians, and ratios to ours."""
    found: dict[str, list[tuple[float, ...]]] = {name: [] for name in runs}
    for number in range(rounds + 1):  # the first one only warms the caches of files
        for name, run in runs.items():
            seconds = action(run)
            shown = ", ".join(
                f"{part} {each:.2f}" for part, each in zip(parts, seconds, strict=True)
            )
            print(f"round {number}, {name}: {shown}", flush=True)
            if number:
                found[name].append(seconds)
    rows = []
    for name, turns in found.items():
        row = [name]
        for part in range(len(parts)):
            ratios = [
                ours[part] / turn[part] for ours, turn in zip(found[OURS], turns, strict=True)
            ]
            row += [f"{median(turn[part] for turn in turns):.2f}", spread(ratios)]
        rows.append(row)
    head = ["contender", *(text for part in parts for text in (f"{part}, s", "ours / this"))]
    return table(head, rows)


# ---- Commands


def model_and_batch() -> list[str]:
    tokens = SEQ_LEN * BATCH
    return argv(
        model_config=MODEL, deepspeed_config=PROFILE, seq_len=SEQ_LEN, micro_batch_size=1,
        batch_tokens=tokens, total_tokens=STEPS * tokens,
    )  # fmt: skip


def zerolm_train(scratch: Path, ranks: int) -> Callable[[], list[str]]:
    """Return a function that returns the command for another run."""

    def command() -> list[str]:
        run_dir = tempfile.mkdtemp(dir=scratch)
        start = argv(num_gpus=ranks, master_port=free_port())
        more = argv(data=scratch / "shards", run_dir=f"{run_dir}/run", checkpoint_interval=1000)
        more += argv(log_interval=1, wandb="off", report_interval=0)
        return [sys.executable, "-m", "zerolm", "train", *start, *model_and_batch(), *more]

    return command


def trainer(scratch: Path, ranks: int) -> Callable[[], list[str]]:
    shard = scratch / "shards" / "shard-00000.bin"
    flags: dict[str, Any] = {
        "deepspeed_config": PROFILE, "model_config": MODEL, "shard": shard, "seq_len": SEQ_LEN,
        "micro_batch_size": 1, "accumulation": BATCH // ranks, "steps": STEPS,
        "log_interval": 1,
    }  # fmt: skip
    return lambda: [*launcher(ranks, free_port()), f"{LOOPS}/hf_trainer.py", *argv(**flags)]


class Run:
    """A command in a checkout, which can be run again and again."""

    def __init__(self, root: Path, words: Callable[[], list[str]], cache: Path | None = None):
        self.root, self.words, self.cache = root, words, cache

    def start(self, before: Sequence[str] = ()) -> subprocess.Popen[str]:
        environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **os.environ}
        environment |= {"PYTHONPATH": str(self.root), "PYTHONUNBUFFERED": "1"}
        if self.cache:
            environment["XDG_CACHE_HOME"] = str(self.cache)
        return subprocess.Popen(
            [*before, *self.words()], cwd=self.root, env=environment, text=True,
            start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def finish(self, process: subprocess.Popen[str], started: float) -> float | None:
        """Wait until it ends; return the seconds to its first step, None if it takes none."""
        assert process.stdout is not None
        killer = threading.Timer(SECONDS, kill_session, [process.pid])
        killer.start()
        first, lines = None, []
        for line in process.stdout:
            lines.append(line)
            if first is None and FIRST_STEP.match(line):
                first = time.monotonic() - started
        killer.cancel()
        if process.wait():
            sys.exit("".join(lines[-40:]) + f"\n{process.args} ended with {process.returncode}")
        return first

    def train(self) -> tuple[float, ...]:
        """Return the seconds to the first step and to the end, and the CPU seconds."""
        used, started = children_seconds(), time.monotonic()
        first = self.finish(self.start(), started)
        assert first is not None, "it has printed no step"
        return first, time.monotonic() - started, children_seconds() - used

    def command(self) -> tuple[float, ...]:
        """Return the seconds to the end, and the CPU seconds."""
        used, started = children_seconds(), time.monotonic()
        self.finish(self.start(), started)
        return time.monotonic() - started, children_seconds() - used

    def after_forgetting(self) -> tuple[float, ...]:
        """Do as `command`, with an empty cache."""
        assert self.cache is not None
        shutil.rmtree(self.cache, ignore_errors=True)
        return self.command()

    def file_calls(self, scratch: Path) -> int:
        """Return how many system calls of all its processes name a file."""
        log = scratch / "calls"
        trace = ["strace", "-f", "-qq", "-e", "trace=%file", "-e", "signal=none", "-o", str(log)]
        self.finish(self.start(trace), time.monotonic())
        with log.open(errors="replace") as lines:
            return sum("resumed>" not in line for line in lines)

    def peak_bytes(self) -> int:
        """Return the largest sum of its processes' proportional set sizes, in bytes."""
        process, peak = self.start(), 0
        ended = threading.Event()

        def sample() -> None:
            nonlocal peak
            while not ended.wait(SAMPLE_SECONDS):
                peak = max(peak, sum(map(pss_bytes, session_members(process.pid))))

        sampler = threading.Thread(target=sample)
        sampler.start()
        self.finish(process, time.monotonic())
        ended.set()
        sampler.join()
        return peak


def children_seconds() -> float:
    """Return the CPU seconds of all processes that this one has started and waited for."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def pss_bytes(pid: int) -> int:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0


if __name__ == "__main__":
    main()
