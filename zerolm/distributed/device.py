"""The device of a rank: its kind, name and memory, and whether it multiplies bf16 natively.

torch and DeepSpeed are imported only where they are needed.
"""

import contextlib
import logging
import os
import platform
import re
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from zerolm.common.errors import ConfigError
from zerolm.common.remembered import recall
from zerolm.engine.deepspeed_launcher import accelerator_kind

CPU = "cpu"  # kind of a rank's device if it has no accelerator; also a value of --hardware
ABSENT = "absent"  # kind of a device that was requested but is not in this machine
# A CPU emulates bf16 if its bf16 products take longer than this, relative to float32. Measured
# ratios are 20 to 200 with AVX2, about 3 with only AVX-512, 0.5 to 2.5 with AVX512-BF16 or AMX.
EMULATED_RATIO = 1.7
CPU_INFO = Path("/proc/cpuinfo")
BF16_FLAGS = {"amx_bf16", "avx512_bf16"}
ISA_LIMITS = {"ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY"}
NATIVE_CAPABILITY = (8, 0)  # compute capability of NVIDIA GPUs; on older ones, torch emulates bf16


class Device(NamedTuple):
    """This rank's accelerator.

    Attributes:
        kind: DeepSpeed's name for the kind of device (`cpu`, `cuda`, ...); `absent` if this machine
            does not have the requested device.
        memory_bytes: total memory; None on a CPU. Free memory is not used, since it differs between
            ranks and all ranks must make the same plan.
        supports_bf16: whether the device can compute in bf16, natively or by emulation.
        name: the model name that the driver or the kernel reports.
        lacks_bf16: why the device has no native bf16 support; empty if it does.
        bf16_ratio: time of a bf16 matrix product relative to float32; 1 if bf16 is native.
    """

    kind: str
    memory_bytes: int | None
    supports_bf16: bool
    name: str = ""
    lacks_bf16: str = ""
    bf16_ratio: float = 1.0

    @property
    def is_gpu(self) -> bool:
        return self.kind != CPU


NO_DEVICE = Device(CPU, None, True)  # used after a problem that prevented detection


def local_device(environment: Mapping[str, str], problems: list[str]) -> Device:
    """Return this rank's device.

    Args:
        environment: the launcher's variables.
        problems: a line is appended if the requested device is missing.
    """
    if environment.get("DS_ACCELERATOR") == "cuda":
        import torch

        if not torch.cuda.is_available():
            problems.append(
                "environment: DS_ACCELERATOR: cuda, but torch finds no CUDA device. Unset it, or "
                "install a CUDA driver and a CUDA build of torch."
            )
            return NO_DEVICE
    if "deepspeed" not in sys.modules and accelerator_kind(environment) == CPU:
        return this_cpu()
    logging.disable(logging.WARNING)  # DeepSpeed warns about a CPU, but the plan states it anyway
    try:
        from deepspeed.accelerator import get_accelerator

        accelerator = get_accelerator()
    finally:
        logging.disable(logging.NOTSET)
    kind = accelerator.device_name()
    if kind == CPU:
        return this_cpu()
    count, local_rank = accelerator.device_count(), int(environment.get("LOCAL_RANK", 0))
    if local_rank >= count:
        problems.append(
            f"environment: LOCAL_RANK: {local_rank}, but this host has {count} {kind} device(s). "
            f"Start at most {count} rank(s) on it: deepspeed --num_gpus {count}, or correct the "
            f"slots in the hostfile. With srun give the devices to the nodes: --gpus-per-node, not "
            f"--gpus-per-task."
        )
        return Device(kind, None, True)
    try:
        memory = accelerator.total_memory(local_rank)
        supported = bool(accelerator.is_bf16_supported())
        if kind == "cuda":
            return _cuda(local_rank, memory, supported)
    except RuntimeError as error:  # the driver's library also counts devices that CUDA cannot use
        problems.append(f"environment: {kind}: {_unusable(error)}")
        return Device(kind, None, True)
    lacks = "" if supported else "does not support bf16"
    return Device(kind, memory, supported, f"{kind} device", lacks)


def this_cpu() -> Device:
    """Return this machine's CPU as a device; this may time bf16 products."""
    ratio = bf16_ratio(CPU)
    lacks = f"multiplies bf16 {ratio:.3g} times slower than float32"
    return Device(CPU, None, True, cpu_name(), lacks if ratio > EMULATED_RATIO else "", ratio)


def _cuda(index: int, memory_bytes: int, supported: bool) -> Device:
    import torch

    name = torch.cuda.get_device_name(index)
    capability = torch.cuda.get_device_capability(index)
    if torch.version.hip or capability >= NATIVE_CAPABILITY:
        lacks = "" if supported else "does not support bf16"
        return Device("cuda", memory_bytes, supported, name, lacks)
    lacks = "has no native bf16 (compute capability {}.{}, 8.0 is needed)".format(*capability)
    ratio = bf16_ratio(f"cuda:{index}") if supported else 1.0
    return Device("cuda", memory_bytes, supported, name, lacks, ratio)


def gpu_library_versions() -> dict[str, str]:
    """Return {name: version} for the CUDA libraries that torch uses; empty without a GPU.

    These libraries choose kernels, as cuDNN does for scaled dot-product attention, and so affect
    results.
    """
    import torch

    if not torch.cuda.is_available():
        return {}
    cudnn = torch.backends.cudnn.version()
    return {"CUDA": str(torch.version.cuda or torch.version.hip), "cuDNN": str(cudnn)} | (
        {"NCCL": ".".join(map(str, torch.cuda.nccl.version()))}
        if torch.distributed.is_nccl_available()
        else {}
    )


def driver_version() -> dict[str, str]:
    """Return {"NVIDIA driver": version}; empty if there is no driver."""
    with contextlib.suppress(OSError):
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
        if found := re.search(r"Kernel Module\D* (\d[\d.]+)", text):
            return {"NVIDIA driver": found[1]}
    return {}


def _unusable(error: Exception) -> str:
    """Return why a device cannot be initialised, and what to do about it."""
    import torch

    reason = str(error).partition("\n")[0].rstrip(".")
    return (
        f"cannot be used: {reason}. Compare nvidia-smi with torch, built for CUDA "
        f"{torch.version.cuda}: update the driver or install another build, and check that every "
        "device is healthy."
    )


def _multiplies_bf16() -> bool:
    """Return whether this CPU has bf16 instructions that no environment variable disables."""
    if ISA_LIMITS & os.environ.keys():
        return False
    try:
        flags = CPU_INFO.read_text(encoding="utf-8").partition("\nflags")[2]
    except OSError:
        return False
    return bool(BF16_FLAGS & set(flags.partition("\n")[0].split()))


def cpu_name() -> str:
    """Return this CPU's model name, or its architecture if the kernel does not report a name."""
    try:
        lines = CPU_INFO.read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(filter(None, names), platform.machine() or "CPU")


def bf16_ratio(device: str) -> float:
    """Return the time of a bf16 matrix product on a torch device, relative to float32.

    The ratio is 1 on a CPU with bf16 instructions that oneDNN may use. Otherwise it is measured
    within milliseconds, with products of width 128, or 2,048 on a GPU. On a CPU, the measurement
    uses a single thread: with two threads, which must wait for each other if other programs are
    running, 10 of 20 measured ratios were below 1 on a CPU that emulates bf16.
    """
    if device != CPU:
        return _timed_bf16_ratio(device)
    limits = {name: os.environ.get(name) for name in sorted(ISA_LIMITS)}
    inputs = [cpu_name(), _multiplies_bf16(), limits]
    return recall("bf16-ratio", inputs, lambda: _timed_bf16_ratio(device))


def _timed_bf16_ratio(device: str) -> float:
    import torch

    if device == CPU and torch.backends.mkldnn.is_available() and _multiplies_bf16():
        return 1.0
    width = 128 if device == CPU else 2048
    operands = {
        dtype: torch.ones(width, width, device=device, dtype=dtype)
        for dtype in (torch.float32, torch.bfloat16)
    }
    seconds = dict.fromkeys(operands, float("inf"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for _ in range(6):  # the first product in each precision is a warm-up
        for dtype, operand in operands.items():
            start = time.perf_counter()
            (operand @ operand)[0, 0].item()  # item() waits for the device
            seconds[dtype] = min(seconds[dtype], time.perf_counter() - start)
    torch.set_num_threads(threads)
    return seconds[torch.bfloat16] / seconds[torch.float32]


def inference_device(requested: str | None) -> str:
    """Select the torch device for a command that runs a model in a single process, and check it.

    Args:
        requested: device name; None selects a GPU if there is one.
    """
    import torch

    device = requested or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        why = _unusable(error) if device.startswith("cuda") else f"cannot be used: {error}"
        raise ConfigError(f"--device: {device!r} {why} Or use --device cpu.") from None
    return device
