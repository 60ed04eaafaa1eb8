"""Checks that this host has the NVMe directories, libaio and compilers that a profile needs.

DeepSpeed compiles its operators on first use, after the model is built, and fails with a traceback
if they cannot be compiled. Preflight runs these checks before `deepspeed.initialize`. Versions:
DeepSpeed 0.19.8.
"""

import copy
import os
import subprocess
from typing import Any

from zerolm.common.machine import compile_problem, write_problem
from zerolm.common.values import shown
from zerolm.config.settings import Settings
from zerolm.ds_config.optimizers import ADAM, uses_torch_adam
from zerolm.ds_config.profile import AUTO, Profile, block
from zerolm.ds_config.rules import QUANTIZED_KEYS
from zerolm.engine import operators

# -------------------------------------------------------------------------------------------------
# NVMe


def with_nvme_path(profile: Profile, settings: Settings, problems: list[str]) -> Profile:
    """Return the profile with `--nvme_path` filled in where an `nvme_path` is "auto" or missing.

    ds_configs/zero3_nvme.json contains "auto", because the path differs between machines.

    Args:
        problems: problems are appended to this list.
    """
    resolved: dict[str, Any] = copy.deepcopy(profile.json)
    path, used = settings.nvme_path, False
    for name, device in profile.offloads.items():
        if device != "nvme":
            continue
        used = True
        offload: Any = block(resolved, "zero_optimization", name)
        written = offload.get("nvme_path", AUTO)
        key = f"{profile.name}: zero_optimization.{name}.nvme_path"
        if written == AUTO and path is None:
            problems.append(
                f'{key}: "auto" needs --nvme_path. Name a directory on a local NVMe disk of each '
                f"host: --nvme_path PATH."
            )
        elif written == AUTO:
            offload["nvme_path"] = path
        elif path not in (None, written):
            problems.append(
                f"{key}: {shown(written)} contradicts {settings.where('nvme_path')} {path}. "
                f'Set it to "auto", or remove the flag.'
            )
    if path is not None and not used and resolved:
        problems.append(
            f"{settings.where('nvme_path')}: {path}, but {profile.name} offloads nothing to NVMe. "
            f"Use ds_configs/zero3_nvme.json, or remove the flag."
        )
    return Profile.parse(resolved, profile.name)


def nvme_problems(profile: Profile) -> list[str]:
    """Check that this host can write to the profile's NVMe directories and has libaio."""
    paths = {
        name: block(profile.zero, name).get("nvme_path")
        for name, device in profile.offloads.items()
        if device == "nvme"
    }
    problems = [
        f"{profile.name}: zero_optimization.{name}.nvme_path: {path}: {why}"
        for name, path in paths.items()
        if isinstance(path, str) and path != AUTO and (why := write_problem(path))
    ]
    if paths and not operators.has_asynchronous_io():
        problems.append(
            f"{profile.name}: offload to NVMe needs DeepSpeed's async_io operator, which cannot be "
            f"built on this host. Install the libaio headers (Debian: libaio-dev), or use "
            f"ds_configs/zero3_offload.json."
        )
    return problems


# -------------------------------------------------------------------------------------------------
# Operators that are compiled on first use


def kernel_problems(profile: Profile, device_kind: str) -> list[str]:
    """Find needed operators that are neither installed nor buildable on this host.

    This includes Muon's update, which is not an operator but is compiled with torch.compile.
    """
    found = []
    if profile.uses_muon and (why := compile_problem(device_kind)):
        found.append(
            f"{profile.name}: optimizer.type: {profile.optimizer.name} compiles its update with "
            f"torch.compile, but {why}. Install it, or use AdamW."
        )
    needed = needed_kernels(profile)
    if not needed or not (why := toolkit_problem()):
        return found
    return found + [
        f"{profile.name}: {key} needs DeepSpeed's {operator} operator, built with the CUDA "
        f"toolkit, but {why}. {fix}"
        for operator, key, fix in needed
        if operator not in operators.installed()
    ]


def needed_kernels(profile: Profile) -> list[tuple[str, str, str]]:
    """Return (operator, JSON key, fix) for each needed operator that requires the CUDA toolkit.

    Optimizers for offloaded states need only a C++ compiler.
    """
    kind, toolkit = profile.optimizer.kind, "Install the CUDA toolkit that matches torch, or"
    found = []
    if profile.optimizer_offload == "none":
        if kind in (*ADAM, "muon") and not uses_torch_adam(profile):
            fix = "Remove the key: torch's Adam needs no compiler."
            found.append(("fused_adam", "optimizer.params.torch_adam: false", fix))
        elif kind == "lion":
            key = f"optimizer.type: {profile.optimizer.name}"
            found.append(("fused_lion", key, f"{toolkit} offload the optimizer."))
    found += [
        ("async_io", f"zero_optimization.{name}.device: nvme", f"{toolkit} offload to the CPU.")
        for name, device in profile.offloads.items()
        if device == "nvme"
    ]
    return found + [
        ("quantizer", f"zero_optimization.{name}: true", "Remove the key.")
        for name in QUANTIZED_KEYS
        if profile.zero.get(name) is True
    ]


def toolkit_problem() -> str | None:
    """Return why CUDA code cannot be compiled on this host, or None if it can.

    Hosts without a GPU, and hosts with ROCm, which has its own compiler, are not checked.
    """
    import torch
    from torch.utils import cpp_extension

    if torch.version.hip or not torch.version.cuda or not torch.cuda.is_available():
        return None
    if not cpp_extension.is_ninja_available():
        return "ninja is not on the PATH"
    home = cpp_extension.CUDA_HOME
    if home is None:
        return "nvcc was not found through CUDA_HOME or the PATH"
    nvcc = f"{home}/bin/nvcc"
    try:
        output = subprocess.run(
            [nvcc, "--version"], capture_output=True, text=True, timeout=60, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return f"{nvcc} does not run"
    release = output.partition("release ")[2].partition(",")[0]
    # CUDA's compiler and libraries are compatible within a major version.
    if release.partition(".")[0] == torch.version.cuda.partition(".")[0]:
        return None
    if os.environ.get("DS_SKIP_CUDA_CHECK") == "1":  # DeepSpeed's own override
        return None
    return f"{nvcc} is from CUDA {release}, but torch was built with CUDA {torch.version.cuda}"
