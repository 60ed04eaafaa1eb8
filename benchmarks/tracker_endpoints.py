"""The cost per step of a W&B server that refuses, hangs or answers 500.

    python benchmarks/tracker_endpoints.py [--rounds 20] [--output benchmarks/results/...md]

The same run is started five times: without W&B, with W&B offline, and with `--wandb online` and
three kinds of broken servers in this process. The runs take turns of a few seconds, forwards and
backwards; the others are paused with all their children (SIGSTOP), as in training_speed.py, whose
flags this has. The time between two lines of a turn counts, and ratios are taken within a round.
"""

import argparse
import contextlib
import os
import shlex
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.contenders.turns import Contender, take_turns, with_quartiles
from benchmarks.machine import hardware
from benchmarks.random_shard import write_random_shard
from benchmarks.training_speed import OURS, command_of, parse_arguments
from tests.endpoints import WandbServer
from tests.launching import free_port

OFF, OFFLINE = "--wandb off", "--wandb offline"
BROKEN = {"refuses": None, "hangs": "hang", "answers 500": "500"}
WARM_SECONDS = 20.0  # of training, past the imports and first attempts of each tracker
MAX_CHANGE = 0.02


class Run(Contender):
    """A run whose processes are paused and resumed together, W&B's in another session included."""

    def __init__(
        self, name: str, script: Sequence[str], arguments: argparse.Namespace, **more: str
    ):
        before = dict(os.environ)
        os.environ.update(more)
        try:
            super().__init__(name, script, arguments)
        finally:
            os.environ.clear()
            os.environ.update(before)

    def warm_up(self) -> None:
        start = time.perf_counter()
        while self.next_line()[0] < self.arguments.warmup_steps or (
            time.perf_counter() - start < WARM_SECONDS
        ):
            pass
        self.stop()

    def take_turn(self) -> float:
        self._signal(signal.SIGCONT)
        return super().take_turn()

    def stop(self) -> None:
        super().stop()
        self._signal(signal.SIGSTOP)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)
        super().kill()

    def _signal(self, number: int) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in psutil.Process(self.process.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(number)


def main() -> None:
    arguments = parse_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # its runs end, too
    with tempfile.TemporaryDirectory() as scratch_name, contextlib.ExitStack() as stack:
        scratch = Path(scratch_name)
        write_random_shard(scratch / "shards", arguments.model_config)
        runs: list[Run] = []
        try:
            for name in (OFF, OFFLINE, *BROKEN):
                script = command_of(OURS, arguments, scratch)
                script[script.index("--run_dir") + 1] = str(scratch / f"run-{len(runs)}")
                script[script.index("--wandb") + 1] = {OFF: "off", OFFLINE: "offline"}.get(
                    name, "online"
                )
                more = {}
                if name in BROKEN:
                    more = stack.enter_context(WandbServer(BROKEN[name] or "ok")).environment()
                    if BROKEN[name] is None:
                        more["WANDB_BASE_URL"] = f"http://127.0.0.1:{free_port()}"
                runs.append(Run(name, script, arguments, **more))
                runs[-1].warm_up()
                print(f"{name}: warm", flush=True)
            seconds = take_turns(runs, arguments.rounds, back_and_forth=True)
            failed = [(scratch / f"run-{number}" / "events.jsonl").read_text().count(
                "tracker_failed") for number in range(len(runs))]  # fmt: skip
        finally:
            for run in runs:
                run.kill()
    report = table(seconds, failed)
    if arguments.output:
        arguments.output.write_text(report + "\n")
    print("\n" + report)


def table(seconds: dict[str, list[float]], failed: Sequence[int]) -> str:
    """Return the Markdown table: seconds per step, and their ratio to those without W&B."""
    lines = [
        "# A W&B server that does not work",
        "",
        f"`python {shlex.join(sys.argv)}`, {time.strftime('%Y-%m-%d')}, {hardware()}. Goal: a step "
        f"changes by less than {MAX_CHANGE:.0%}.",
        "",
        "| W&B | median s per step | time / time without W&B | logged failures |",
        "|---|---|---|---|",
    ]
    for (name, times), failures in zip(seconds.items(), failed, strict=True):
        ratios = [time_ / without for time_, without in zip(times, seconds[OFF], strict=True)]
        ratio = "1" if name == OFF else with_quartiles(ratios, digits=4)
        lines.append(f"| {name} | {statistics.median(times):.4f} | {ratio} | {failures} |")
    lines += ["", f"{len(seconds[OFF])} rounds; ratios are medians over the rounds."]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
