"""Measures how long a checkpoint stalls training, with zerolm's writer and with DeepSpeed's own.

    python -m benchmarks.checkpoint_stall [--parameters 60e6] [--rounds 5] [--output results.md]

Two ranks train a Llama with ZeRO-2 and with ZeRO-3. The same process saves the same state in turn
with DeepSpeed's `engine.save_checkpoint` (which neither syncs nor hashes) and with zerolm's
`CheckpointWriter` (which does both). The table lists both stalls and their ratio; the step time
while a checkpoint is written, divided by the step time otherwise; and the host memory that a save
adds, divided by the size of a rank's state.
"""

import argparse
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import ROOT
from benchmarks.contenders import argv, launcher
from benchmarks.machine import hardware
from benchmarks.tables import parser, show, spread, table
from tests.launching import free_port

GOALS = {
    "stall, asynchronous / DeepSpeed's": "under 0.25 on a CPU, under 0.1 on a GPU",
    "step while writing / step": "under 1.05",
    "ours, seconds until it is published": "under 3 with 424 MB a rank",
    "peak host memory added / state of a rank": "under 1.2",
}


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--parameters", type=float, default=60e6, help="of the model, about")
    flags.add_argument("--rounds", type=int, default=5, help="saves of each kind")
    flags.add_argument("--stages", type=int, nargs="+", default=[2, 3], help="of ZeRO")
    flags.add_argument("--ranks", type=int, default=2)
    flags.add_argument("--directory", type=Path, help="directory to save in (default: temporary)")
    flags.add_argument("--worker", help=argparse.SUPPRESS)
    flags.add_argument("--local_rank", type=int, default=0, help=argparse.SUPPRESS)
    arguments = flags.parse_args()
    if arguments.worker:
        work(arguments, json.loads(arguments.worker))
        return
    results = [launch(arguments, stage) for stage in arguments.stages]
    head = ["", "goal", *(f"ZeRO-{stage}" for stage in arguments.stages)]
    rows = [[name, GOALS.get(name, ""), *(each[name] for each in results)] for name in results[0]]
    note = f"Medians of {arguments.rounds} saves; quartiles in brackets."
    show([note, table(head, rows)], hardware(), arguments.output)


def launch(arguments: argparse.Namespace, stage: int) -> dict[str, str]:
    """Run the workers under the deepspeed launcher and return rank 0's figures."""
    directory = Path(tempfile.mkdtemp(dir=arguments.directory))
    job = json.dumps({"stage": stage, "directory": str(directory)})
    try:
        subprocess.run(
            [
                *launcher(arguments.ranks, free_port()), str(Path(__file__).resolve()),
                *argv(worker=job, parameters=arguments.parameters, rounds=arguments.rounds),
            ],
            cwd=ROOT, check=True, timeout=1800, stdout=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        return json.loads((directory / "figures.json").read_text())
    finally:
        shutil.rmtree(directory)


# -------------------------------------------------------------------------------------------------
# On each rank


def work(arguments: argparse.Namespace, job: dict[str, Any]) -> None:
    import torch

    from zerolm.checkpoint.manifest import Progress
    from zerolm.checkpoint.rotation import Retention
    from zerolm.checkpoint.writer import CheckpointWriter
    from zerolm.distributed import collectives, process_group

    rank, _, device = process_group.init()
    engine = build(arguments.parameters, job["stage"])
    directory = Path(job["directory"])
    (directory / "checkpoints").mkdir(exist_ok=True)
    batch = torch.zeros((1, 64), dtype=torch.long, device=device)

    def step() -> float:
        start = time.perf_counter()
        engine.backward(engine(input_ids=batch, labels=batch, use_cache=False).loss)
        engine.step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    def save_with_deepspeed(number: int) -> float:
        collectives.barrier()
        start = time.perf_counter()
        engine.save_checkpoint(str(directory / "theirs"), tag=f"step-{number}")
        seconds = time.perf_counter() - start
        if rank == 0:
            shutil.rmtree(directory / "theirs" / f"step-{number}")
        return seconds

    for _ in range(3):
        step()
    original = engine.checkpoint_engine
    save_with_deepspeed(0)
    writer = CheckpointWriter(engine, directory, Retention(last=1))
    taker = engine.checkpoint_engine
    before = resident_bytes(reset=True)
    writer.save(Progress(step=1), optimizer="AdamW")
    writer.finish()
    added, size = resident_bytes(peak=True) - before, writer.size_bytes
    times: dict[str, list[float]] = defaultdict(list)
    for number in range(2, arguments.rounds + 2):
        engine.checkpoint_engine = original
        times["theirs"].append(save_with_deepspeed(number))
        times["idle"] += [step() for _ in range(5)]
        engine.checkpoint_engine = taker
        save_with_ours(writer, number, step, times)
    collectives.barrier()
    if rank == 0:
        num_parameters = sum(map(unsharded_size, engine.module.parameters()))
        figures = {"parameters": f"{num_parameters:,}", "state of a rank": f"{size / 1e6:.0f} MB"}
        figures |= figures_of(times)
        figures["peak host memory added / state of a rank"] = f"{added / size:.3f}"
        (directory / "figures.json").write_text(json.dumps(figures))
    process_group.destroy(engine.destroy)


def save_with_ours(
    writer: Any, number: int, step: Callable[[], float], times: dict[str, list[float]]
) -> None:
    """Save in the background while steps run, and add the seconds of each phase to `times`."""
    import torch

    from zerolm.checkpoint.manifest import Progress
    from zerolm.distributed import collectives

    collectives.barrier()
    times["ours"].append(writer.save(Progress(step=number), optimizer="AdamW"))
    outcome = None
    while outcome is None:
        flags = torch.tensor(writer.flags())
        times["writing"].append(step())
        outcome = writer.advance(collectives.sum_over_ranks(flags).tolist())
    times["writing"].pop()  # the writer finished during this step
    times["published"].append(outcome.seconds)
    assert outcome.error is None, outcome.error


def figures_of(times: dict[str, list[float]]) -> dict[str, str]:
    """Return {name: value} for the figures computed from measured seconds."""
    ratios = [ours / theirs for ours, theirs in zip(times["ours"], times["theirs"], strict=True)]
    writing, idle = times["writing"], times["idle"]
    return {
        "DeepSpeed's save_checkpoint, seconds": spread(times["theirs"]),
        "ours, stall in seconds": spread(times["ours"]),
        "stall, asynchronous / DeepSpeed's": spread(ratios),
        "ours, seconds until it is published": spread(times["published"]),
        "step, seconds": spread(idle),
        "step while writing / step": f"{median(writing) / median(idle):.3f} "
        f"({len(writing)} and {len(idle)} steps)",
    }


def build(parameters: float, stage: int) -> Any:
    """Return a DeepSpeed engine for a Llama with about `parameters` parameters."""
    import deepspeed
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    hidden = max(64, round((parameters / 112) ** 0.5 / 64) * 64)  # 8 layers of 14 hidden^2
    config = AutoConfig.for_model(
        "llama", hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=8,
        num_attention_heads=hidden // 64, num_key_value_heads=hidden // 64, vocab_size=1024,
    )  # fmt: skip
    ds_config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
    }
    with deepspeed.zero.Init(config_dict_or_path=ds_config, enabled=stage == 3):
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, trust_remote_code=False
        )
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=list(model.parameters()), config=ds_config
    )
    return engine


def unsharded_size(parameter: Any) -> int:
    return getattr(parameter, "ds_numel", parameter.numel())


def resident_bytes(peak: bool = False, reset: bool = False) -> int:
    """Return this process's resident memory, or its peak since the last reset (Linux)."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    name = "VmHWM:" if peak else "VmRSS:"
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    raise AssertionError("not Linux")


if __name__ == "__main__":
    main()
