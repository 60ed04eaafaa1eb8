"""The clock of steps beside a device that computes behind the host; memory and power."""

import time
from functools import partial
from types import SimpleNamespace
from unittest.mock import MagicMock

import psutil
import pytest
import torch

from zerolm.train.run import Run
from zerolm.train.throughput import PowerMeter, Stopwatch, memory

TAIL_SECONDS = 0.05


@pytest.mark.parametrize(
    ("step", "more", "waits"),
    [
        (7, {}, False),
        (10, {}, True),  # reported
        (8, {"checkpoint_interval": 8}, True),
        (7, {"total_tokens": 64}, True),  # the last
    ],
)
def test_a_step_is_timed_to_the_end_of_its_update_where_something_reads_the_device(
    monkeypatch, step, more, waits
) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: time.sleep(TAIL_SECONDS))
    settings = {
        "seq_len": 8, "total_tokens": 1000, "log_interval": 10, "checkpoint_interval": 100,
        "eval_interval": 0, "downstream_interval": 0,
    }  # fmt: skip
    run = MagicMock(settings=SimpleNamespace(**settings | more))
    run.progress.step, run.progress.position, run.progress.tokens = step - 1, 0, 32
    run.plan.batch_schedule.return_value = 4
    run.stepper.take.return_value = MagicMock(flags=[0.0])
    run.features = []
    run.next_step = partial(Run.next_step, run)
    run.waits_for_device = partial(Run.waits_for_device, run)
    run.journal.stopwatch = Stopwatch(torch.device("cuda"))
    Run.step(run, None)
    assert (run.journal.stopwatch.seconds >= TAIL_SECONDS) == waits


def test_power_is_read_until_the_driver_does_not_tell(monkeypatch) -> None:
    assert PowerMeter(torch.device("cpu")).row() == {}
    meter, answers = PowerMeter(torch.device("cuda", 0)), iter([312_500, 95_000])
    monkeypatch.setattr(torch.cuda, "power_draw", lambda device: next(answers))
    assert [meter.row(), meter.row()] == [{"power/watts": 312.5}, {"power/watts": 95.0}]
    assert meter.row() == {} and not meter.works


def test_memory_of_the_host_is_less_than_it_has() -> None:
    found = memory(torch.device("cpu"))
    assert found["memory/allocated_bytes"] > 0 and found["memory/peak_bytes"] > 0
    assert 0 < found["memory/host_bytes"] < psutil.virtual_memory().total
