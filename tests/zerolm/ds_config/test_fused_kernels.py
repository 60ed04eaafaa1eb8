"""Profiles whose kernels nvcc cannot build on this host are refused."""

import pytest
import torch
from torch.utils import cpp_extension

from zerolm.ds_config import host
from zerolm.ds_config.profile import Profile

ADAM = {"optimizer": {"type": "AdamW", "params": {}}, "zero_optimization": {"stage": 2}}
TORCH_ADAM = {"optimizer": {"type": "AdamW", "params": {"torch_adam": True, "fused": True}}}
OFFLOADED = {**ADAM, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
QUANTIZED = {**TORCH_ADAM, "zero_optimization": {"stage": 3, "zero_quantized_weights": True}}


@pytest.fixture
def toolkit(tmp_path, monkeypatch):
    """Return a function that writes an nvcc; the host has a GPU, and torch has CUDA 13.0."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(cpp_extension, "is_ninja_available", lambda: True)
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", None)
    monkeypatch.delenv("DS_SKIP_CUDA_CHECK", raising=False)

    def make(release):
        nvcc = tmp_path / "bin" / "nvcc"
        nvcc.parent.mkdir(exist_ok=True)
        nvcc.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V1'\n")
        nvcc.chmod(0o755)
        monkeypatch.setattr(cpp_extension, "CUDA_HOME", str(tmp_path))

    return make


def test_without_nvcc_deepspeeds_adam_is_refused_with_the_fix(toolkit):
    (problem,) = host.kernel_problems(Profile.parse(ADAM, "ds.json"))
    for part in ("ds.json: optimizer.type: AdamW", "nvcc was not found", "torch_adam and fused"):
        assert part in problem
    for config in (TORCH_ADAM, OFFLOADED):
        assert host.kernel_problems(Profile.parse(config, "ds.json")) == []
    (problem,) = host.kernel_problems(Profile.parse(QUANTIZED, "ds.json"))
    assert "zero_quantized_weights" in problem and "quantizer" in problem


def test_nvcc_of_another_major_version_is_refused(toolkit, monkeypatch):
    toolkit("13.1")
    assert host.kernel_problems(Profile.parse(ADAM, "ds.json")) == []
    toolkit("12.8")
    (problem,) = host.kernel_problems(Profile.parse(ADAM, "ds.json"))
    assert "is from CUDA 12.8, and torch was built with CUDA 13.0" in problem
    monkeypatch.setenv("DS_SKIP_CUDA_CHECK", "1")
    assert host.kernel_problems(Profile.parse(ADAM, "ds.json")) == []


def test_a_host_without_gpus_needs_no_nvcc(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert host.kernel_problems(Profile.parse(ADAM, "ds.json")) == []
