"""Training commands that take turns: all but one are paused (SIGSTOP) at any time."""

import argparse
import contextlib
import os
import queue
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks import ROOT
from tests.launching import free_port

STEP_LINE = re.compile(r"^step=(\d+)\b.*\bloss=")
LITGPT_LINE = re.compile(r"^Epoch \d+ \| iter \d+ step (\d+) \| loss train: ")


class Contender:
    """A `deepspeed` command that prints `step=N ... loss=L`, running or paused.

    Attributes:
        counted: the steps of the lines that counted in its turns.
    """

    pattern = STEP_LINE

    def __init__(self, name: str, script: Sequence[str], arguments: argparse.Namespace):
        self.name, self.arguments, self.port = name, arguments, free_port()
        environment = {**os.environ, "OMP_NUM_THREADS": str(self.threads())}
        environment |= {"PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
        self.process = subprocess.Popen(
            self.command(script), cwd=ROOT, env=environment, text=True, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        self.lines: list[str] = []
        self.counted: set[int] = set()
        self.steps: queue.Queue[tuple[int, float]] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def command(self, script: Sequence[str]) -> list[str]:
        """Return the argv that runs a script with its arguments."""
        ranks = ["--num_gpus", str(self.arguments.num_processes), "--master_port", str(self.port)]
        return [str(Path(sys.executable).with_name("deepspeed")), *ranks, *script]

    def threads(self) -> int:
        """Return the number of threads per process, from the cores and the number of processes."""
        cores = max(1, (os.cpu_count() or 1) // self.arguments.num_processes)
        return int(os.environ.get("OMP_NUM_THREADS", cores))

    def _read(self) -> None:
        for line in self.process.stdout or ():
            now = time.perf_counter()
            self.lines.append(line)
            if match := self.pattern.match(line):
                self.steps.put((int(match[1]), now))
        self.steps.put((-1, 0.0))

    def next_line(self) -> tuple[int, float]:
        """Wait for the next line; return its step, and the time it was printed, in seconds."""
        try:
            step, when = self.steps.get(timeout=self.arguments.timeout)
        except queue.Empty:
            step, when = -1, 0.0
        if step < 0:
            how = f"exit code {self.process.poll()}; None: it hangs"
            sys.exit("".join(self.lines[-40:]) + f"\n{self.name} prints no more steps ({how})")
        return step, when

    def warm_up(self) -> None:
        while self.next_line()[0] < self.arguments.warmup_steps:
            pass
        self.stop()

    def take_turn(self) -> float:
        """Run for some lines; return the mean seconds of a step."""
        os.killpg(self.process.pid, signal.SIGCONT)
        first_step, start = self.next_line()  # do not count the step that the pause interrupted
        lines = [self.next_line() for _ in range(self.arguments.turn_lines)]
        self.stop()
        last_step, end = lines[-1]
        self.counted.update(step for step, _ in lines)
        return (end - start) / (last_step - first_step)

    def stop(self) -> None:
        os.killpg(self.process.pid, signal.SIGSTOP)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for buffer in Path("/dev/shm").glob(
            f"deepspeed_*_{self.port}_*"
        ):  # DeepSpeed does not remove them
            buffer.unlink(missing_ok=True)


class Litgpt(Contender):
    """litgpt's pretraining, with its own log lines: one process with all threads."""

    pattern = LITGPT_LINE

    def command(self, script: Sequence[str]) -> list[str]:
        return [self.arguments.litgpt, *script]

    def threads(self) -> int:
        return super().threads() * self.arguments.num_processes


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a command whose contenders take turns: their run, the turns, its table."""
    parser.add_argument("--model_config", default="model_configs/tiny.json")
    parser.add_argument("--deepspeed_config", default="ds_configs/zero2.json")
    parser.add_argument("--num_processes", type=int, default=2)
    parser.add_argument("--seq_len", type=int, default=256)
    parser.add_argument("--micro_batch_size", type=int, default=8)
    parser.add_argument("--accumulation", type=int, default=2)
    parser.add_argument("--warmup_steps", type=int, default=10, help="before the first round")
    parser.add_argument("--log_interval", type=int, default=4, help="steps per line")
    parser.add_argument("--turn_lines", type=int, default=2, help="lines that count in a turn")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--timeout", type=int, default=300, help="seconds to wait for a line")
    parser.add_argument("--output", type=Path, help="also write the table to this Markdown file")


def take_turns(
    contenders: Sequence[Contender], rounds: int, back_and_forth: bool = False
) -> dict[str, list[float]]:
    """Let paused contenders run in turn; return {name: mean seconds of a step in each turn}.

    Args:
        back_and_forth: reverse the order in every other round.
    """
    seconds: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    for number in range(rounds):
        for contender in contenders[:: -1 if back_and_forth and number % 2 else 1]:
            seconds[contender.name].append(contender.take_turn())
        shown = ", ".join(f"{name} {times[-1]:.4f}" for name, times in seconds.items())
        print(f"round {number + 1}, seconds per step: {shown}", flush=True)
    return seconds


def with_quartiles(ratios: Sequence[float], digits: int = 3) -> str:
    """Return the median of the ratios of all rounds as text, with its quartiles."""
    low, middle, high = (f"{each:.{digits}f}" for each in statistics.quantiles(ratios, n=4))
    return f"{middle} (quartiles {low} to {high})"
