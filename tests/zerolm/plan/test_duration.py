"""The expected duration of a run: its arithmetic, its basis, and the notice about years."""

import os
import re
from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig

from tests.launching import run_module
from tests.model_families.toy_configs import toy_config
from tests.zerolm.preflight.preflight_inputs import PROFILES, command
from zerolm.model.model import Model
from zerolm.plan import duration
from zerolm.preflight import check


@pytest.fixture(scope="module")
def plan(inputs):
    return check.check(command(inputs, "--deepspeed_config fp32.json"), {"WORLD_SIZE": "2"})


def test_the_duration_is_the_flops_of_the_run_over_the_rate_of_its_devices(plan):
    gpus = replace(plan, device="cuda", device_name="NVIDIA H100", flops_per_token=2e9)
    tokens = plan.settings.total_tokens
    # Two devices at 40% of their peak, in 3 h 20 m = 12,000 s.
    peak = 2e9 * tokens / (2 * 0.4) / 12_000
    assert duration.expected(gpus, peak) == ("about 3h20m at 40% MFU of 2 x NVIDIA H100", [])
    cpus = replace(gpus, device="cpu", device_name="EPYC")
    line, _ = duration.expected(cpus, peak * 0.4 / duration.CPU_MFU)
    assert line == f"about 3h20m at {duration.CPU_MFU:.0%} MFU of 2 x EPYC"


def test_a_branch_takes_the_time_of_its_own_tokens(plan):
    tokens = plan.settings.total_tokens
    branch = replace(plan, branch={"run": "trunk", "step": 1, "tokens": tokens // 4})
    peak = plan.flops_per_token * tokens / (2 * duration.CPU_MFU) / 400
    assert duration.expected(plan, peak)[0].startswith("about 6m40s ")
    assert duration.expected(branch, peak)[0].startswith("about 5m00s ")


def test_years_are_a_notice_with_the_fix(plan):
    peak = plan.flops_per_token * plan.settings.total_tokens / (2 * duration.CPU_MFU)
    assert not duration.expected(plan, peak / (364 * 86400))[1]
    line, [notice] = duration.expected(plan, peak / (107 * 365 * 86400))
    assert line.startswith("about 107 years at ") and "would take 107 years. Choose" in notice
    assert "--total_tokens" in notice and "zerolm plan --hardware" in notice


def test_emulated_bf16_takes_as_many_times_longer(plan, monkeypatch):
    peak = plan.flops_per_token * plan.settings.total_tokens / (2 * duration.CPU_MFU)
    bf16 = replace(plan, ds=replace(plan.ds, compute_precision="bf16"))
    for ratio, shown in ((57.0, "about 57s "), (1.2, "about 1s ")):
        monkeypatch.setattr(duration, "bf16_ratio", lambda device, ratio=ratio: ratio)
        line, _ = duration.expected(bf16, peak)
        assert line.startswith(shown)
        assert ("multiplies bf16 57 times slower than float32" in line) == (ratio == 57)
        assert duration.expected(plan, peak)[0].startswith("about 1s ")


def test_devices_that_are_not_here_have_the_rate_of_their_datasheet(inputs):
    words = "--check --world_size 8 --total_tokens 5e14 --max_epochs 1e12 --hardware "
    for name, flops in (("h100", 989.4e12), ("A10G", 70e12)):
        plan = check.check(command(inputs, words + name), {})
        line = duration.with_duration(plan).derived["duration"]
        assert line.startswith(duration.expected(plan, flops)[0])
        assert f"40% MFU of 8 x {plan.device_name}; `zerolm plan --hardware {name} --" in line
    auto = f" --deepspeed_config {PROFILES / 'zero1.json'}"
    tf32 = check.check(command(inputs, f"{words}H100 --deepspeed_config fp32.json "
        "--float32_matmul high"), {})  # fmt: skip
    half = duration.expected(tf32, 989.4e12 / 2)[0]
    assert duration.with_duration(tf32).derived["duration"] == half
    laptop = check.check(command(inputs, f"{words}laptop{auto}"), {})
    assert laptop.ds.precision == "fp32", "it emulates bf16"
    assert " at 60% MFU of 8 x laptop" in duration.with_duration(laptop).derived["duration"]


def test_ranks_that_would_share_this_cpu_share_its_rate(inputs, monkeypatch):
    threads = [4]
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(4))
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads[-1])
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    monkeypatch.setattr(duration, "_timed_mfu", lambda plan, peak: 0.5)
    monkeypatch.setattr(duration, "device_peak_flops", lambda *_: (1e9 * threads[-1], ""))
    words = "--deepspeed_config fp32.json --check --world_size "
    for ranks, flops in ((1, 4e9), (2, 2e9), (8, 0.5e9)):
        plan = check.check(command(inputs, f"{words}{ranks}"), {})
        assert f"{ranks} x cpu" in plan.summary() and "--hardware H100" in plan.notices[0]
        line = duration.with_duration(plan).derived["duration"]
        assert line == duration.expected(plan, flops, 0.5)[0] and threads[-1] == 4


def test_check_prints_the_duration_on_this_device(inputs):
    words = command(inputs, "--deepspeed_config fp32.json --check --wandb off --total_tokens 5e14 "
        "--max_epochs 1e12")  # fmt: skip
    done = run_module("pretrain", *words)
    assert done.returncode == 0, done.stderr
    measured = r" years at \d+% MFU of 1 x .*, measured here on one block of the model\n"
    assert re.search(measured, done.stdout) and "note: this run would" in done.stdout


def test_a_block_of_the_model_is_timed_on_a_cpu(plan, monkeypatch):
    monkeypatch.setattr(duration, "_seconds", lambda work: 1.0 if work() is None else 0.5)
    rate = 1e9  # FLOP/s, so that the MFU is that of no device
    mfu = duration._timed_mfu(plan, rate)
    assert mfu and mfu == pytest.approx(10 * duration._timed_mfu(plan, 10 * rate))
    line, _ = duration.expected(plan, rate, mfu)
    assert line.endswith(", measured here on one block of the model")
    monkeypatch.setattr(duration, "TIMED_PARAMETERS", 10)
    assert duration._timed_mfu(plan, rate) is None, "a large model"
    monkeypatch.undo()
    monkeypatch.setattr(duration, "bf16_ratio", lambda device: 57.0)
    bf16 = replace(plan, ds=replace(plan.ds, compute_precision="bf16"))
    assert duration._timed_mfu(bf16, rate) is None, "which would take a minute"


def test_a_family_whose_kinds_of_layers_cannot_be_set_is_timed(plan, monkeypatch):
    """Mamba's config derives them from the number of layers."""
    monkeypatch.setattr(duration, "_seconds", lambda work: 1.0 if work() is None else 0.5)
    mamba = Model.from_config(AutoConfig.for_model(**toy_config("mamba")))
    assert duration._timed_mfu(replace(plan, model=mamba), 1e9)
