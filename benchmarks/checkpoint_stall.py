"""How long training stands still for a checkpoint: ours against DeepSpeed's own, the same state.

    python benchmarks/checkpoint_stall.py [--parameters 60e6] [--rounds 5] [--output results.md]

Two ranks train a Llama under ZeRO-2 and under ZeRO-3. In turn, in the same process, they save with
`engine.save_checkpoint` as DeepSpeed has it (it does not sync to disk, hash or read back) and with
zerolm's CheckpointWriter (which does). Reported: the stall of each and their ratio; the time of a
step while a checkpoint is being written over that of one when none is; the host memory that a save
adds, over the size of a rank's state.
"""

import argparse
import json
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median, quantiles
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
GOALS = {
    "stall, asynchronous / DeepSpeed's": "under 0.25 on a CPU, under 0.1 on a GPU",
    "step while writing / step": "under 1.1",
    "peak host memory added / state of a rank": "under 1.2",
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parameters", type=float, default=60e6, help="about so many")
    parser.add_argument("--rounds", type=int, default=5, help="saves of each kind")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--directory", type=Path, help="where to save (default: a temporary one)")
    parser.add_argument("--output", type=Path, help="write the table there too")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--local_rank", type=int, default=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(arguments, json.loads(arguments.worker))
        return
    lines = [
        "| | " + " | ".join(["goal", "ZeRO-2", "ZeRO-3"]) + " |",
        "|---|---|---|---|",
    ]
    results = {stage: launch(arguments, stage) for stage in (2, 3)}
    for name in results[2]:
        figures = [results[stage][name] for stage in (2, 3)]
        lines.append(f"| {name} | {GOALS.get(name, '')} | {figures[0]} | {figures[1]} |")
    command = "python benchmarks/checkpoint_stall.py " + " ".join(sys.argv[1:])
    table = "\n".join(
        [
            "# Stall of a checkpoint",
            "",
            f"`{command.strip()}`, {time.strftime('%Y-%m-%d')}, {hardware()}. Medians of "
            f"{arguments.rounds} saves; quartiles in brackets.",
            "",
            *lines,
            "",
        ]
    )
    print(table)
    if arguments.output:
        arguments.output.write_text(table)


def hardware() -> str:
    import os

    import torch

    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    model = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    return f"{os.cpu_count()} cores of {model}, torch {torch.__version__}"


def launch(arguments: argparse.Namespace, stage: int) -> dict[str, str]:
    """Run the workers under the deepspeed launcher and return rank 0's figures."""
    directory = Path(tempfile.mkdtemp(dir=arguments.directory))
    what = json.dumps({"stage": stage, "directory": str(directory)})
    try:
        subprocess.run(
            [
                sys.executable, "-m", "deepspeed.launcher.runner",
                "--num_gpus", str(arguments.ranks), str(Path(__file__).resolve()),
                "--worker", what, "--parameters", str(arguments.parameters),
                "--rounds", str(arguments.rounds),
            ],
            cwd=REPOSITORY, check=True, timeout=1800, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        return json.loads((directory / "figures.json").read_text())
    finally:
        shutil.rmtree(directory)


# -------------------------------------------------------------------------------------------------
# On each rank


def work(arguments: argparse.Namespace, what: dict[str, Any]) -> None:
    sys.path.insert(0, str(REPOSITORY))
    import torch

    from zerolm import distributed
    from zerolm.checkpoint_directory import Progress, Retention
    from zerolm.checkpoint_writer import CheckpointWriter

    rank, _, device = distributed.start()
    engine = build(arguments.parameters, what["stage"])
    directory = Path(what["directory"])
    (directory / "checkpoints").mkdir(exist_ok=True)
    batch = torch.zeros((1, 64), dtype=torch.long, device=device)

    def step() -> float:
        began = time.perf_counter()
        engine.backward(engine(input_ids=batch, labels=batch, use_cache=False).loss)
        engine.step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    def deepspeeds(number: int) -> float:
        distributed.barrier()
        began = time.perf_counter()
        engine.save_checkpoint(str(directory / "theirs"), tag=f"step-{number}")
        seconds = time.perf_counter() - began
        if rank == 0:
            shutil.rmtree(directory / "theirs" / f"step-{number}")
        return seconds

    for _ in range(3):
        step()
    original = engine.checkpoint_engine
    deepspeeds(0)
    writer = CheckpointWriter(engine, directory, Retention(last=1))
    taker = engine.checkpoint_engine
    before = resident_bytes(reset=True)
    writer.save(Progress(step=1), optimizer="AdamW")
    writer.finish()
    added = resident_bytes(peak=True) - before
    size = writer.size_bytes
    theirs, ours, alone, beside, seconds = [], [], [], [], []
    for number in range(2, arguments.rounds + 2):
        engine.checkpoint_engine = original
        theirs.append(deepspeeds(number))
        alone += [step() for _ in range(5)]
        engine.checkpoint_engine = taker
        distributed.barrier()
        ours.append(writer.save(Progress(step=number), optimizer="AdamW"))
        outcome = None
        while outcome is None:
            sums = torch.tensor(writer.flags())
            beside.append(step())
            outcome = writer.advance(distributed.sum_over_ranks(sums).tolist())
        beside.pop()  # in which it ended
        seconds.append(outcome.seconds)
        assert outcome.error is None, outcome.error
    distributed.barrier()
    if rank == 0:
        ratios = [ours[k] / theirs[k] for k in range(len(ours))]
        figures = {
            "parameters": f"{sum(map(whole_size, engine.module.parameters())):,}",
            "state of a rank": f"{size / 1e6:.0f} MB",
            "DeepSpeed's save_checkpoint, seconds": spread(theirs),
            "ours, stall in seconds": spread(ours),
            "stall, asynchronous / DeepSpeed's": spread(ratios),
            "ours, seconds until it is published": spread(seconds),
            "step, seconds": spread(alone),
            "step while writing / step": f"{median(beside) / median(alone):.3f} "
            f"({len(beside)} and {len(alone)} steps)",
            "peak host memory added / state of a rank": f"{added / size:.3f}",
        }
        (directory / "figures.json").write_text(json.dumps(figures))
    distributed.stop(engine)


def build(parameters: float, stage: int) -> Any:
    """Return a DeepSpeed engine of a Llama with about so many parameters."""
    import deepspeed
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    hidden = max(64, round((parameters / 112) ** 0.5 / 64) * 64)  # 8 layers of 14 hidden^2 in all
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
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=list(model.parameters()), config=ds_config
    )
    return engine


def whole_size(parameter: Any) -> int:
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


def spread(values: list[float]) -> str:
    """Write a median with its quartiles."""
    if len(values) < 2:
        return f"{values[0]:.3f}"
    low, middle, high = quantiles(values, n=4, method="inclusive")
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"


if __name__ == "__main__":
    main()
