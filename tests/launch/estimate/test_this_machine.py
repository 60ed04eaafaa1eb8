"""`plan --hardware cpu`: this machine as a device, shared by the ranks."""

import json

import psutil
import pytest

from launch import __main__
from launch.estimate import this_machine
from zerolm.plan import hardware

TINY = ["--model_config", "model_configs/tiny.json", "--seq_len", "256", "--batch_tokens", "4096"]


def plan(*words):
    return __main__.main(["plan", "--hardware", "cpu", *TINY, "--total_tokens", "50k", *words])


@pytest.fixture
def machine(monkeypatch) -> hardware.Hardware:
    """A machine of known rates, measured as one rank."""
    monkeypatch.setattr(this_machine, "device_peak_flops", lambda device, precision: (4e10, ""))
    monkeypatch.setattr(this_machine, "bf16_ratio", lambda device: 40.0)
    monkeypatch.setattr(this_machine, "_copy_bandwidth", lambda: 1e10)
    return this_machine.measure(1)


def test_a_rank_has_its_share_of_what_was_measured(machine):
    half = this_machine.measure(2)
    assert (machine.fp32, machine.bf16) == (4e10, 1e9)
    assert machine.memory_bytes == psutil.virtual_memory().total
    for name in ("fp32", "bf16", "memory_bytes", "memory_bandwidth", "host_memory_bytes"):
        assert getattr(half, name) == getattr(machine, name) / 2
    assert machine.price_per_hour is None and "40 GFLOP/s in float32, 1 in bf16" in machine.source


def test_a_real_measurement_has_finite_rates():
    found = this_machine.measure(1)
    assert found.fp32 and found.bf16 and 1e8 < found.fp32 < 1e15
    assert 1e7 < found.memory_bandwidth < 1e14


def test_the_precision_of_a_plan_is_that_of_a_run_on_the_machine(machine, monkeypatch, capsys):
    assert plan("--json") == 0
    assert json.loads(capsys.readouterr().out)["precision"] == "fp32"
    monkeypatch.setattr(this_machine, "bf16_ratio", lambda device: 0.5)
    assert plan("--json") == 0
    assert json.loads(capsys.readouterr().out)["precision"] == "bf16"


def test_ranks_share_the_rate_of_the_machine(machine, capsys):
    found = {}
    for ranks in ("1", "2"):
        assert plan("--json", "--devices", ranks) == 0
        found[ranks] = json.loads(capsys.readouterr().out)
    assert found["2"]["devices"] == 2
    assert found["2"]["step_seconds"]["compute"] == pytest.approx(
        found["1"]["step_seconds"]["compute"]
    )
    assert found["1"]["price"] is None and found["1"]["mfu"] < this_machine.ATTAINED


def test_the_text_names_the_rates_and_what_they_were_compared_with(machine, capsys):
    assert plan("--price_per_hour", "0.1") == 0
    text = capsys.readouterr().out
    assert "measured here with " in text and "on one type of CPU" in text
    assert "1 x " in text and "published runs" not in text and "$" in text


def test_a_budget_and_a_search_take_this_machine(machine, capsys):
    words = ["plan", "--hardware", "CPU", "--budget", "10h", "--json"]
    assert __main__.main(words) == 0
    flops = json.loads(capsys.readouterr().out)["flops"]
    assert flops == pytest.approx(36_000 * 4e10 * this_machine.ATTAINED)
    assert plan("--search", "--json") == 0
    best, *_ = json.loads(capsys.readouterr().out)
    assert best["figures"]["precision"] == "fp32"
