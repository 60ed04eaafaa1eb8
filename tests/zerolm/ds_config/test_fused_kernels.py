"""Profiles whose kernels nvcc cannot build on this host are refused."""

import sys

import pytest
import torch
from torch.utils import cpp_extension

from tests import tracked
from zerolm.common import machine
from zerolm.ds_config import host
from zerolm.ds_config.profile import Profile

ADAM = {"optimizer": {"type": "AdamW", "params": {"torch_adam": False}}}
OFFLOADED = {**ADAM, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
QUANTIZED = {"zero_optimization": {"stage": 3, "zero_quantized_weights": True}}
NVME = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}}
MUON = {"optimizer": {"type": "Muon", "params": {}}}


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


def problems(config):
    return host.kernel_problems(Profile.parse(config, "ds.json"), "cuda")


def test_without_nvcc_only_profiles_that_need_it_are_refused(toolkit, monkeypatch):
    monkeypatch.setattr(host, "compile_problem", lambda kind: None)
    for path in tracked("ds_configs/*.json"):
        found = host.kernel_problems(Profile.read(path), "cuda")
        assert bool(found) == (path.stem in ("zeropp", "zero3_nvme")), (path, found)
    assert all("async_io operator" in line for line in problems(NVME)) and problems(NVME)
    assert problems(OFFLOADED) == []
    (problem,) = problems(ADAM)
    for part in ("ds.json: optimizer.params.torch_adam: false", "nvcc was not", "Remove the key"):
        assert part in problem
    (problem,) = problems(QUANTIZED)
    assert "zero_quantized_weights" in problem and "quantizer" in problem


def test_muon_and_compile_need_a_c_compiler_and_pythons_headers_on_a_gpu(toolkit, monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", machine)  # installed or not
    monkeypatch.setattr(machine.shutil, "which", lambda name: name if name == "gcc" else None)
    assert problems(MUON) == []
    monkeypatch.setattr(machine.sysconfig, "get_path", lambda name: "/nowhere")
    monkeypatch.setattr(machine.shutil, "which", lambda name: None)
    (problem,) = problems(MUON)
    assert "optimizer.type: Muon compiles" in problem and "Python.h" in problem
    assert problem.count("a C compiler (Debian: gcc)") == 1 and "C++" not in problem


def test_nvcc_of_another_major_version_is_refused(toolkit, monkeypatch):
    toolkit("13.1")
    assert problems(ADAM) == []
    toolkit("12.8")
    (problem,) = problems(ADAM)
    assert "is from CUDA 12.8, but torch was built with CUDA 13.0" in problem
    monkeypatch.setenv("DS_SKIP_CUDA_CHECK", "1")
    assert problems(ADAM) == []


def test_a_host_without_gpus_needs_no_nvcc(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert problems(ADAM) == []
