"""The device of a rank, with a faked driver for GPUs that are not here."""

import types

import pytest
import torch

from zerolm.common.errors import ConfigError
from zerolm.distributed import device
from zerolm.distributed.device import inference_device, local_device


def faked_gpu(monkeypatch, name, capability, *, supports_bf16=True):
    accelerator = types.SimpleNamespace(
        device_name=lambda: "cuda",
        device_count=lambda: 1,
        total_memory=lambda index: 16 << 30,
        is_bf16_supported=lambda: supports_bf16,
    )
    monkeypatch.setattr("deepspeed.accelerator.get_accelerator", lambda: accelerator)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    monkeypatch.setattr(device, "bf16_ratio", lambda where: 12.0)
    problems = []
    found = local_device({}, problems)
    assert problems == []
    return found


@pytest.mark.parametrize(
    ("name", "capability", "lacks"),
    [
        ("NVIDIA H100 80GB HBM3", (9, 0), ""),
        ("NVIDIA A100-SXM4-80GB", (8, 0), ""),
        ("NVIDIA GeForce RTX 3090", (8, 6), ""),
        ("Tesla T4", (7, 5), "has no native bf16 (compute capability 7.5, 8.0 is needed)"),
        ("Tesla V100-SXM2-16GB", (7, 0), "has no native bf16 (compute capability 7.0, 8.0 is"),
    ],
)
def test_gpus_have_native_bf16_from_compute_capability_8(monkeypatch, name, capability, lacks):
    """torch and DeepSpeed report bf16 as supported on older ones, too: they emulate it."""
    found = faked_gpu(monkeypatch, name, capability)
    assert found.name == name and found.is_gpu and found.supports_bf16
    assert found.lacks_bf16.startswith(lacks) and bool(found.lacks_bf16) is bool(lacks)
    assert found.bf16_ratio == (12.0 if lacks else 1.0)


def test_an_amd_gpu_is_judged_by_what_torch_says(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert faked_gpu(monkeypatch, "AMD Instinct MI300X", (9, 4)).lacks_bf16 == ""
    old = faked_gpu(monkeypatch, "AMD Instinct MI50", (9, 0), supports_bf16=False)
    assert old.lacks_bf16 == "does not support bf16" and not old.supports_bf16


def test_a_driver_that_cannot_initialise_cuda_is_a_problem_and_no_traceback(monkeypatch):
    """DeepSpeed lets torch count devices by NVML, which does not need a driver that fits."""

    def old(*args, **kwargs):
        raise RuntimeError("The NVIDIA driver is too old (found version 12040).\nMore")

    accelerator = types.SimpleNamespace(
        device_name=lambda: "cuda", device_count=lambda: 8, total_memory=old
    )
    monkeypatch.setattr("deepspeed.accelerator.get_accelerator", lambda: accelerator)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "empty", old)
    problems = []
    assert local_device({}, problems).is_gpu
    with pytest.raises(ConfigError) as refused:
        inference_device(None)
    for text in (*problems, str(refused.value)):
        assert "too old (found version 12040). Compare" in text and "update the driver" in text
    assert len(problems) == 1 and "Or use --device cpu" in str(refused.value)


@pytest.mark.parametrize(("ratio", "lacks"), [(0.5, False), (1.1, False), (3.0, True), (57, True)])
def test_a_cpu_is_judged_by_its_products(monkeypatch, ratio, lacks):
    monkeypatch.setattr(device, "bf16_ratio", lambda where: ratio)
    found = local_device({}, [])
    assert found.kind == "cpu" and found.name and bool(found.lacks_bf16) is lacks


def test_the_versions_of_a_gpus_libraries_are_known(monkeypatch):
    assert device.gpu_library_versions() == {}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    expected = {"CUDA": "13.0", "cuDNN": "91900", "NCCL": "2.28.9"}
    assert device.gpu_library_versions() == expected


@pytest.mark.parametrize("limit", [None, "ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY"])
@pytest.mark.parametrize("flags", ["fpu avx2", "fpu avx512_bf16 avx2", "amx_bf16"])
def test_no_clock_is_asked_where_a_cpu_multiplies_bf16(monkeypatch, tmp_path, flags, limit):
    for name in device.ISA_LIMITS:
        monkeypatch.delenv(name, raising=False)
    if limit:
        monkeypatch.setenv(limit, "AVX2")
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nflags\t\t: {flags}\nbugs\t: none\n")
    monkeypatch.setattr(device, "CPU_INFO", tmp_path / "cpuinfo")
    asked = []
    monkeypatch.setattr(device.time, "perf_counter", lambda: asked.append(1) or len(asked))
    ratio = device.bf16_ratio("cpu")
    assert bool(asked) == (limit is not None or "bf16" not in flags)
    assert ratio == 1.0
