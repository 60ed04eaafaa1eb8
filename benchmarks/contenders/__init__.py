"""Training loops to compare with pretrain.py, each a separate script without zerolm."""

import sys
from typing import Any

LOOPS = "benchmarks/contenders"  # where the scripts are, in the repository


def argv(**flags: Any) -> list[str]:
    """Return flags and their values as arguments of a command."""
    return [part for name, value in flags.items() for part in (f"--{name}", str(value))]


def launcher(num_gpus: int, master_port: int) -> list[str]:
    """Return the beginning of a command that `deepspeed` starts."""
    flags = argv(num_gpus=num_gpus, master_port=master_port)
    return [sys.executable, "-m", "deepspeed.launcher.runner", *flags]


def pretrain(tokens: int, steps: int, run_dir: Any, data: Any, **flags: Any) -> list[str]:
    """Return pretrain.py with flags for some steps of `tokens`, without trackers and report."""
    run = argv(run_dir=run_dir, data=data, batch_tokens=tokens, total_tokens=steps * tokens)
    return ["pretrain.py", *run, *argv(wandb="off", report_interval=0, **flags)]
