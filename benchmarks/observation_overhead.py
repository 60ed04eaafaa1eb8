"""The cost of observing a run: health metrics, W&B, TensorBoard and the HTML report.

    python benchmarks/observation_overhead.py

First pretrain.py runs alone with everything on, at the default intervals, with a timer around each
part that only observes; the first table has its share of the time of a step. This does not include
the work of other processes (W&B, TensorBoard, report). So then three contenders take turns, as in
training_speed.py: everything on; the same with a line every million steps, no tracker and no
report; and a bare DeepSpeed loop; with `--rounds 0` there are no turns. Evaluations and samples are
off: they run outside of steps, and cost what the user asks for.
"""

import argparse
import json
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import ROOT
from benchmarks.contenders import LOOPS
from benchmarks.contenders.turns import Contender, add_flags, take_turns, with_quartiles
from benchmarks.machine import hardware
from benchmarks.random_shard import write_random_shard
from benchmarks.training_speed import STEPS, resolved_profile, step_tokens
from tests.launching import free_port

EVERYTHING, NOTHING, BARE = "everything on", "nothing on", "bare DeepSpeed loop"
MARK_STEPS = 5  # as in contenders/observed_pretrain.py
HEALTH = ("noise scale", "every step: what", "update ratio", "weight norms")


class Observed(Contender):
    """A contender that prints `mark=N`, or only `step=N loss=L` (the bare loop)."""

    pattern = re.compile(r"^(?:mark|step)=(\d+) loss=\S*$")


def main() -> None:
    arguments = parse_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # its contenders end, too
    with tempfile.TemporaryDirectory() as scratch_name:
        scratch = Path(scratch_name)
        write_random_shard(scratch / "shards", arguments.model_config)
        costs = run_alone(arguments, scratch)
        report = shares(costs, arguments.log_interval)
        print(report, flush=True)
        if arguments.rounds:
            report += "\n\n" + table(run_in_turns(arguments, scratch))
    command = f"`python {shlex.join(sys.argv)}`, {time.strftime('%Y-%m-%d')}, {hardware()}"
    report = f"{command}\n\n{report}"
    if arguments.output:
        arguments.output.write_text(report + "\n")
    print("\n" + report)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_flags(parser)
    parser.add_argument("--steps", type=int, default=120, help="steps of the run alone")
    parser.set_defaults(log_interval=10, warmup_steps=20, turn_lines=4, rounds=16, timeout=600)
    return parser.parse_args()


def command_of(name: str, arguments: argparse.Namespace, scratch: Path, steps: int) -> list[str]:
    """Return the arguments of `deepspeed` that run one contender for `steps` steps."""
    common = ["--model_config", arguments.model_config, "--seq_len", str(arguments.seq_len)]
    if name == BARE:
        resolved = scratch / "resolved.json"
        resolved.write_text(json.dumps(resolved_profile(arguments, scratch / EVERYTHING)))
        return [
            f"{LOOPS}/bare_deepspeed.py", *common, "--deepspeed_config", str(resolved),
            "--steps", str(steps), "--shard", str(scratch / "shards/shard-00000.bin"),
            "--log_interval", str(MARK_STEPS),
        ]  # fmt: skip
    tokens = step_tokens(arguments)
    observing = [
        "--log_interval",
        str(arguments.log_interval),
        "--wandb",
        "offline",
        "--tensorboard",
    ]
    if name == NOTHING:
        observing = ["--log_interval", str(STEPS), "--wandb", "off", "--report_interval", "0"]
    return [
        f"{LOOPS}/observed_pretrain.py", *common, *observing,
        "--deepspeed_config", arguments.deepspeed_config,
        "--data", str(scratch / "shards"), "--run_dir", str(scratch / name),
        "--micro_batch_size", str(arguments.micro_batch_size),
        "--batch_tokens", str(tokens), "--total_tokens", str(steps * tokens),
        "--checkpoint_interval", str(STEPS),
    ]  # fmt: skip


def run_alone(arguments: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """Run pretrain.py alone with everything on; return the times of observed_pretrain.py."""
    costs = scratch / "costs.json"
    command = command_of(EVERYTHING, arguments, scratch / "alone", arguments.steps)
    command[command.index("--data") + 1] = str(scratch / "shards")
    launcher = str(Path(sys.executable).with_name("deepspeed"))
    ranks = ["--num_gpus", str(arguments.num_processes), "--master_port", str(free_port())]
    threads = str(max(1, (os.cpu_count() or 1) // arguments.num_processes))
    environment = {"OMP_NUM_THREADS": threads, **os.environ, "OBSERVATION_COSTS": str(costs)}
    environment |= {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [launcher, *ranks, *command], cwd=ROOT, env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=3600,
    )  # fmt: skip
    if done.returncode:
        sys.exit(f"{done.stdout[-6000:]}\nthe run alone ended with {done.returncode}")
    return json.loads(costs.read_text())


def shares(costs: dict[str, Any], log_interval: int) -> str:
    """Return a Markdown table with the share of each part in the time of a step."""
    steps, seconds = costs["steps"], dict(costs["seconds"])
    step_seconds = seconds.pop("step") / steps
    lines = [
        "| part, in the training thread | mean ms per step | share of a step |",
        "|---|---|---|",
    ]
    for part, total in sorted(seconds.items(), key=lambda item: -item[1]):
        lines.append(row(part, total / steps, step_seconds))
    health = sum(total for part, total in seconds.items() if part.startswith(HEALTH))
    lines.append(row("**health metrics together** (goal: under 1%)", health / steps, step_seconds))
    lines += [
        "",
        f"{steps} steps of {step_seconds:.3f} s (mean), a line every {log_interval} steps. `the "
        f"complete report of a line` includes the norms, the slowest rank and metrics.jsonl.",
    ]
    return "\n".join(lines)


def row(part: str, part_seconds: float, step_seconds: float) -> str:
    return f"| {part} | {1e3 * part_seconds:.3f} | {part_seconds / step_seconds:.3%} |"


def run_in_turns(arguments: argparse.Namespace, scratch: Path) -> dict[str, list[float]]:
    """Return {contender: mean seconds of a step in each of its turns}."""
    contenders: list[Observed] = []
    try:
        for name in (EVERYTHING, NOTHING, BARE):
            command = command_of(name, arguments, scratch, STEPS)
            contenders.append(Observed(name, command, arguments))
            contenders[-1].warm_up()
            print(f"{name}: warm", flush=True)
        return take_turns(contenders, arguments.rounds)
    finally:
        for contender in contenders:
            contender.kill()


def table(seconds: dict[str, list[float]]) -> str:
    """Return a Markdown table of the contenders' times and their ratios within a round."""
    lines = [
        "| contender | median s per step | time with everything on / time |",
        "|---|---|---|",
    ]
    for name, times in seconds.items():
        ratios = [full / other for full, other in zip(seconds[EVERYTHING], times, strict=True)]
        ratio = "1" if name == EVERYTHING else with_quartiles(ratios)
        lines.append(f"| {name} | {statistics.median(times):.4f} | {ratio} |")
    rounds = len(seconds[EVERYTHING])
    lines += ["", f"{rounds} rounds; the last column is the median over the rounds."]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
