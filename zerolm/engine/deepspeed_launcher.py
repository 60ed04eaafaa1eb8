"""The modules of DeepSpeed's launcher (0.19.8), imported without torch, which takes seconds.

They parse flags and hostfiles, build commands and wait for processes. Of DeepSpeed they need a
logger, and the names and number of devices: `Accelerator` knows these where the files of this host
decide, and asks DeepSpeed otherwise. Standard library and psutil only.
"""

import importlib
import importlib.util
import itertools
import logging
import os
import runpy
import sys
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

CPU, CUDA = "cpu", "cuda"
# Device files of CUDA, WSL, Jetson and ROCm; without one, torch counts no CUDA device.
CUDA_FILES = ("nvidiactl", "nvidia0", "dxg", "nvmap", "nvhost-ctrl", "kfd")
# Packages whose presence makes DeepSpeed choose another accelerator (accelerator/real_accelerator).
OTHER_PACKAGES = (
    "torch_npu", "torch_sdaa", "habana_frameworks", "torch_mlu", "torch_supa", "torch_xmlir",
)  # fmt: skip
# deepspeed/utils/logging.py
FORMAT = "[%(asctime)s] [%(levelname)s] [%(filename)s:%(lineno)d:%(funcName)s] %(message)s"


def load(name: str) -> Any:
    """Return the module `deepspeed.launcher.NAME`; only its imports from DeepSpeed are replaced.

    A version of DeepSpeed whose modules import more than that is imported with torch.
    """
    name = f"deepspeed.launcher.{name}"
    try:
        with _stand_ins():
            return importlib.import_module(name)
    except ImportError:
        return importlib.import_module(name)


def accelerator_kind(environment: Mapping[str, str] = os.environ) -> str | None:
    """Return which accelerator DeepSpeed chooses, `cpu` or `cuda`, or None if only it can tell."""
    if named := environment.get("DS_ACCELERATOR"):
        return named if named in (CPU, CUDA) else None
    if sys.platform != "linux" or any(map(importlib.util.find_spec, OTHER_PACKAGES)):
        return None
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    build = runpy.run_path(str(Path(spec.origin).with_name("version.py")))
    if build.get("xpu"):
        return None
    has_device = any(Path("/dev", name).exists() for name in CUDA_FILES)
    return CUDA if has_device and (build.get("cuda") or build.get("hip")) else CPU


class Accelerator:
    """What DeepSpeed's launchers ask of its accelerators for CPUs and for CUDA.

    Attributes:
        known_count: number of devices, if it need not be counted.
    """

    known_count = 0

    def __init__(self, kind: str):
        self.kind = kind

    def device_name(self) -> str:
        return self.kind

    def visible_devices_envs(self) -> list[str]:
        return ["CUDA_VISIBLE_DEVICES"]

    def set_visible_devices_envs(
        self, environment: MutableMapping[str, str], devices: Sequence[int]
    ) -> None:
        environment.update(dict.fromkeys(self.visible_devices_envs(), ",".join(map(str, devices))))

    def export_envs(self) -> list[str]:
        return ["NCCL"] if self.kind == CUDA else []

    def device_count(self) -> int:
        if self.known_count:
            return self.known_count
        if self.kind == CUDA:
            from deepspeed.accelerator import get_accelerator

            return int(get_accelerator().device_count())
        if (size := int(os.environ.get("LOCAL_SIZE", 0))) > 0:
            return size
        with _stand_ins():
            cores = importlib.import_module("deepspeed.utils.numa").get_numa_cores()
        # A node without cores is memory, and nodes in a row with the same cores are one.
        nodes = [each for each in cores if each]
        same = sum(one == other for one, other in itertools.pairwise(nodes))
        return len(nodes) - same if cores else 1


def get_accelerator() -> Any:
    """Return what DeepSpeed's function of this name does, without torch where that is possible."""
    if (kind := accelerator_kind()) is not None:
        return Accelerator(kind)
    from deepspeed.accelerator import get_accelerator as get

    return get()


# ---- Stand-ins for what the launcher's modules import from DeepSpeed


@contextmanager
def _stand_ins() -> Iterator[None]:
    """Let modules of DeepSpeed be imported without its `__init__`, inside this context."""
    kept = {name: module for name, module in sys.modules.items() if _is_deepspeed(name)}
    for name in kept:
        del sys.modules[name]
    spec = importlib.util.find_spec("deepspeed")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("No module named 'deepspeed'")
    root = Path(spec.submodule_search_locations[0])
    logger = _logger()
    try:
        _module("deepspeed", root, __version__="")
        _module("deepspeed.autotuning", root / "autotuning", Autotuner=None)
        _module("deepspeed.accelerator", root / "accelerator", get_accelerator=get_accelerator)
        utils = _module(
            "deepspeed.utils", root / "utils", logger=logger,
            set_log_level_from_string=lambda level: _set_level(logger, level),
        )  # fmt: skip
        numa = importlib.import_module("deepspeed.utils.numa")
        vars(utils)["get_numactl_cmd"] = numa.get_numactl_cmd
        yield
    finally:
        for name in [name for name in sys.modules if _is_deepspeed(name)]:
            del sys.modules[name]
        sys.modules.update(kept)


def _is_deepspeed(name: str) -> bool:
    return name.partition(".")[0] == "deepspeed"


def _module(name: str, directory: Path, **content: Any) -> ModuleType:
    module = sys.modules[name] = ModuleType(name)
    vars(module).update(content, __path__=[str(directory)])
    return module


def _logger() -> logging.Logger:
    """Return a logger like DeepSpeed's, which is not the one that its import would create."""
    logger, handler = logging.Logger("DeepSpeed"), logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter(FORMAT))
    logger.addHandler(handler)
    _set_level(logger, "warning")
    return logger


def _set_level(logger: logging.Logger, level: str) -> None:
    logger.setLevel(level.upper())
    for handler in logger.handlers:
        handler.setLevel(level.upper())
