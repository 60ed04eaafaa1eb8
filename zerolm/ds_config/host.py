"""What a profile needs of this host besides devices: NVMe directories, and nvcc for kernels.

DeepSpeed compiles its operators on first use, after the model is built, and ends with a traceback
where it cannot. Checked before `deepspeed.initialize`. Versions: DeepSpeed 0.19.8.
"""

import copy
import os
import subprocess
from typing import Any

from zerolm.common.machine import write_problem
from zerolm.common.values import shown
from zerolm.config.settings import Settings
from zerolm.ds_config.profile import AUTO, Profile, block
from zerolm.ds_config.rules import QUANTIZED_KEYS

# -------------------------------------------------------------------------------------------------
# NVMe


def with_nvme_path(profile: Profile, settings: Settings, problems: list[str]) -> Profile:
    """Return the profile with `--nvme_path` wherever it leaves the path to the run.

    A directory of one machine does not belong in a shared profile, so ds_configs/zero3_nvme.json
    has "auto" there.

    Args:
        problems: is added to.
    """
    value: dict[str, Any] = copy.deepcopy(profile.json)
    path, used = settings.nvme_path, False
    for name, device in profile.offloads.items():
        if device != "nvme":
            continue
        used = True
        offload: Any = block(value, "zero_optimization", name)
        written = offload.get("nvme_path", AUTO)
        key = f"{profile.name}: zero_optimization.{name}.nvme_path"
        if written == AUTO and path is None:
            problems.append(
                f"{key}: auto, is set by --nvme_path. Name a directory on a local NVMe disk of "
                f"each host: --nvme_path PATH."
            )
        elif written == AUTO:
            offload["nvme_path"] = path
        elif path not in (None, written):
            problems.append(
                f"{key}: {shown(written)}, contradicts {settings.where('nvme_path')} {path}. "
                f'Set it to "auto", or remove the flag.'
            )
    if path is not None and not used and value:
        problems.append(
            f"{settings.where('nvme_path')}: {path}, but {profile.name} offloads nothing to NVMe. "
            f"Use ds_configs/zero3_nvme.json, or remove the flag."
        )
    return Profile.parse(value, profile.name)


def nvme_problems(profile: Profile) -> list[str]:
    """Find why this host cannot read and write its NVMe disk as DeepSpeed does."""
    paths = {
        name: block(profile.zero, name).get("nvme_path")
        for name, device in profile.offloads.items()
        if device == "nvme"
    }
    problems = [
        f"{profile.name}: zero_optimization.{name}.nvme_path: {path}, {why}"
        for name, path in paths.items()
        if isinstance(path, str) and path != AUTO and (why := write_problem(path))
    ]
    if paths and not has_asynchronous_io():
        problems.append(
            f"{profile.name}: offload to NVMe needs DeepSpeed's async_io, which cannot be built on "
            f"this host. Install libaio's headers (Debian: libaio-dev), or use "
            f"ds_configs/zero3_offload.json."
        )
    return problems


def has_asynchronous_io() -> bool:
    """Tell whether DeepSpeed's operator for asynchronous file access exists or can be built."""
    from deepspeed.accelerator import get_accelerator

    builder = get_accelerator().create_op_builder("AsyncIOBuilder")
    return builder is not None and builder.is_compatible(verbose=False)


# -------------------------------------------------------------------------------------------------
# CUDA kernels


def kernel_problems(profile: Profile) -> list[str]:
    """Find kernels that this host cannot build, unless DeepSpeed was installed with them."""
    wanted = needed_kernels(profile)
    if not wanted or not (why := toolkit_problem()):
        return []
    from deepspeed.git_version_info import installed_ops

    return [
        f"{profile.name}: {key}, needs DeepSpeed's {operator}, which nvcc builds first, but {why}. "
        f"{fix}"
        for operator, key, fix in wanted
        if not installed_ops.get(operator)
    ]


def needed_kernels(profile: Profile) -> list[tuple[str, str, str]]:
    """Return (operator, key that needs it, what to do instead) of each kernel that a GPU needs."""
    kind, key = profile.optimizer.kind, f"optimizer.type: {profile.optimizer.name}"
    found = []
    if profile.optimizer_offload == "none":  # with offload a C++ compiler is enough
        if kind in ("adam", "adamw") and not profile.optimizer.params.get("torch_adam"):
            fix = "Set torch_adam and fused in optimizer.params to true: torch's own fused kernel."
            found.append(("fused_adam", key, fix))
        elif kind == "muon":
            fix = "Install the CUDA toolkit of torch's version, or use AdamW with torch_adam."
            found.append(("fused_adam", key, fix))
        elif kind == "lion":
            fix = "Install the CUDA toolkit of torch's version, or offload the optimizer."
            found.append(("fused_lion", key, fix))
    return found + [
        ("quantizer", f"zero_optimization.{name}: true", "Remove the key.")
        for name in QUANTIZED_KEYS
        if profile.zero.get(name) is True
    ]


def toolkit_problem() -> str | None:
    """Say why nothing can be compiled for the GPUs of this host, None when it can.

    ROCm has its own compiler and is not checked.
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
        output = subprocess.run(
            [nvcc, "--version"], capture_output=True, text=True, timeout=60, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return f"{nvcc} does not run"
    release = output.partition("release ")[2].partition(",")[0]
    # Within a major version CUDA's compiler and libraries are compatible.
    if release.partition(".")[0] == torch.version.cuda.partition(".")[0]:
        return None
    if os.environ.get("DS_SKIP_CUDA_CHECK") == "1":  # DeepSpeed's own override
        return None
    return f"{nvcc} is of CUDA {release}, torch of {torch.version.cuda}"
