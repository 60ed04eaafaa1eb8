"""Checks of DeepSpeed configs in two ranks: the launch in a test, and the frame of its worker."""

import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.launching import run_workers, write_json


def check_in_ranks(worker: Path, directory: Path, configs: Mapping[str, dict]) -> dict[str, Any]:
    """Return {name of the config: what the worker's check returns on rank 0}."""
    files = [write_json(directory / f"{name}.json", config) for name, config in configs.items()]
    report = directory / "report.json"
    run_workers(2, worker, report, *files, timeout=550)
    return {Path(path).stem: found for path, found in json.loads(report.read_text()).items()}


def run_checks(check: Callable[[dict], Any]) -> None:
    """Run the check in this rank: `RANK=0 WORLD_SIZE=2 ... WORKER REPORT.json CONFIG.json ...`."""
    import deepspeed
    import torch
    from deepspeed.accelerator import get_accelerator

    from zerolm.engine import shared_memory

    report, *paths = sys.argv[1:]
    deepspeed.init_distributed("gloo" if get_accelerator().device_name() == "cpu" else "nccl")
    torch.distributed.barrier()
    shared_memory.release()
    found = {path: check(json.loads(Path(path).read_text())) for path in paths}
    if os.environ["RANK"] == "0":
        write_json(Path(report), found)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
