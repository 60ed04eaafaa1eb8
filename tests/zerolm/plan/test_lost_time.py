"""The lost shares of a run's time, against a simulation and against its events."""

import random

import pytest

from launch.estimate.reliability import interruptions
from zerolm.plan.lost_time import HOUR, Lost, expected, measured


def test_expected_losses_are_those_of_a_simulated_run_to_first_order() -> None:
    generator, mean, interval, stall, restart = random.Random(0), HOUR, 120.0, 1.5, 12.0
    useful = saves = repeated = restarts = 0.0
    for _ in range(20_000):  # faults
        left = generator.expovariate(1 / mean)
        cycles, rest = divmod(left, interval + stall)
        useful, saves = useful + cycles * interval, saves + cycles * stall
        repeated, restarts = repeated + min(rest, interval), restarts + restart
    total = useful + saves + repeated + restarts
    found = expected(mean, interval, stall, 0.0, restart)
    assert found.saves == pytest.approx(saves / total, rel=0.06)
    assert found.repeated == pytest.approx(repeated / total, rel=0.06)
    assert found.restarts == pytest.approx(restarts / total, rel=0.06)


def test_a_shorter_restart_is_time_won_in_the_plan() -> None:
    slow, fast = (
        interruptions(54 * 86400, 16_384, 2.2e-5, 10.0, 60.0, seconds) for seconds in (600.0, 60.0)
    )
    won = slow.lost.total - fast.lost.total
    assert won == pytest.approx(540.0 / slow.mean_seconds)
    assert slow.hourly.total - fast.hourly.total == pytest.approx(540.0 / HOUR)
    assert interruptions(86400, 8, 0.0, 1.0, 1.0, 1.0).lost == Lost(0, 0, 0)


def test_losses_are_those_in_the_events_of_a_run() -> None:
    parts = {"noticed": 1.0, "ended": 2.0, "imports": 5.0, "repeated steps": 4.0}
    events = [
        {"event": "checkpoint", "step": 10, "copy_seconds": 0.5, "seconds": 2.0},
        {"event": "checkpoint", "step": 20, "copy_seconds": 0.5, "seconds": 2.0},
        {"event": "recovered", "step": 28, "parts": parts},
        {"event": "checkpoint", "step": 30, "copy_seconds": 0.5, "seconds": 2.0},
        {"event": "checkpoint", "step": 40, "copy_seconds": "odd"},
        {"event": "recovered", "step": 41, "parts": [1]},
    ]
    found = measured(events)
    assert (found.faults, found.restart_seconds, found.repeated_seconds) == (1, [8.0], 4.0)
    lost = found.lost(86.5)  # 100 seconds with 8 + 4 + 1.5
    assert (lost.saves, lost.repeated, lost.restarts) == pytest.approx((0.015, 0.04, 0.08))
    assert "86.5% effective" in str(lost)
    hourly = found.lost_hourly(step_seconds=2.0)
    assert hourly == expected(HOUR, 20.0, 0.5, 2.0, 8.0)
    assert measured([]).lost_hourly(2.0) is None and measured([]).lost(10.0).total == 0
