"""Which of DeepSpeed's CUDA kernels a config needs, and whether nvcc can build them on this host.

DeepSpeed compiles them on first use, after the model is there, and ends with a traceback where it
cannot. Before `deepspeed.initialize`; knows nothing of sizes. Versions: DeepSpeed 0.19.8.
"""

import os
import subprocess
from collections.abc import Mapping
from typing import Any

from zerolm.ds_config import block, optimizer_offload, optimizer_type

QUANTIZED = ("zero_quantized_weights", "zero_quantized_gradients")


def host_problems(ds_config: Mapping[str, Any], name: str) -> list[str]:
    """Say which kernels this host cannot build; nothing where they were built with DeepSpeed.

    Args:
        ds_config: as the user wrote it.
        name: of its file, for the messages.
    """
    wanted = needed(ds_config)
    if not wanted or not (why := toolkit_problem()):
        return []
    from deepspeed.git_version_info import installed_ops

    return [
        f"{name}: {key}, needs DeepSpeed's {operator}, which nvcc builds first, but {why}. {fix}"
        for operator, key, fix in wanted
        if not installed_ops.get(operator)
    ]


def needed(ds_config: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return (operator, key that asks for it, what to do instead) of each kernel a GPU needs."""
    written, params = optimizer_type(ds_config), block(ds_config, "optimizer", "params")
    kind = written.lower()
    found = []
    if optimizer_offload(ds_config) == "none":  # on the host a C++ compiler does
        if kind in ("adam", "adamw") and not params.get("torch_adam"):
            fix = "Set torch_adam and fused in optimizer.params to true: torch's own fused kernel."
            found.append(("fused_adam", f"optimizer.type: {written}", fix))
        elif kind == "muon":
            fix = "Install the CUDA toolkit of torch's version, or use AdamW with torch_adam."
            found.append(("fused_adam", f"optimizer.type: {written}", fix))
        elif kind == "lion":
            fix = "Install the CUDA toolkit of torch's version, or offload the optimizer."
            found.append(("fused_lion", f"optimizer.type: {written}", fix))
    zero = block(ds_config, "zero_optimization")
    found += [
        ("quantizer", f"zero_optimization.{key}: true", "Remove the key.")
        for key in QUANTIZED
        if zero.get(key) is True
    ]
    return found


def toolkit_problem() -> str | None:
    """Say why nothing can be compiled for the GPUs of this host, None if nothing speaks against it.

    ROCm has a compiler of its own and is not looked at.
    """
    import torch
    from torch.utils import cpp_extension

    if torch.version.hip or not torch.version.cuda or not torch.cuda.is_available():
        return None
    if not cpp_extension.is_ninja_available():
        return "ninja is not on the PATH"
    home = cpp_extension.CUDA_HOME
    if home is None:
        return "there is no nvcc: neither CUDA_HOME nor the PATH names one"
    nvcc = f"{home}/bin/nvcc"
    try:
        said = subprocess.run(
            [nvcc, "--version"], capture_output=True, text=True, timeout=60, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return f"{nvcc} does not run"
    release = said.partition("release ")[2].partition(",")[0]
    # Within a major version CUDA's compiler and libraries go together.
    if release.partition(".")[0] == torch.version.cuda.partition(".")[0]:
        return None
    if os.environ.get("DS_SKIP_CUDA_CHECK") == "1":  # DeepSpeed's own word for: go on
        return None
    return f"{nvcc} is of CUDA {release}, torch of {torch.version.cuda}"
