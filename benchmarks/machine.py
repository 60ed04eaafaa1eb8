"""Descriptions of this machine, to print above a table."""

import os
import platform
from pathlib import Path


def hardware() -> str:
    """Return the GPUs or else the cores, and the versions of Python and torch."""
    import torch

    if torch.cuda.is_available():
        count, name = torch.cuda.device_count(), torch.cuda.get_device_name()
        device = name if count == 1 else f"{count} x {name}"
    else:
        device = processor()
    return f"{device}, Python {platform.python_version()}, torch {torch.__version__}"


def storage() -> str:
    """Return the cores, their load, the disks' read-ahead, and versions. Does not import torch."""
    import numpy as np

    read_ahead = sorted(
        int(path.read_text()) for path in Path("/sys/block").glob("[!l]*/queue/read_ahead_kb")
    )
    return (
        f"{processor()}, load {os.getloadavg()[0]:.1f} at the start, read-ahead of the disks "
        f"{read_ahead} KiB; Python {platform.python_version()}, numpy {np.__version__}"
    )


def processor() -> str:
    """Return the number of cores and their model: `2 cores of AMD EPYC`."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{os.cpu_count()} cores of {models[0] if models else platform.machine()}"
