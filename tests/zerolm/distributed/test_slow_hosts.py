"""A host that is slower than the others for minutes is named, once."""

import pytest

from zerolm.distributed import slow_hosts
from zerolm.distributed.slow_hosts import SlowHosts, host_ratios


def test_a_host_is_as_slow_as_its_slowest_rank() -> None:
    hosts, seconds = ["a", "a", "b", "b", "c", "c"], [1.0, 1.2, 1.0, 3.0, 1.0, 1.0]
    assert host_ratios(hosts, seconds) == pytest.approx({"a": 0.6, "b": 3 / 1.1, "c": 1 / 2.1})
    assert host_ratios(["a", "a"], [1.0, 2.0]) == {}
    assert host_ratios(["a", "b"], [1.0, 0.0]) == {"b": 0.0}


def test_a_slow_host_is_told_after_three_minutes_and_again_when_it_is_fast(monkeypatch) -> None:
    found = SlowHosts()
    told = []
    for half, ratio in enumerate([1.0, 1.2, 1.05, *[1.3] * 6, *[1.0] * 8, 1.2]):
        monkeypatch.setattr(found, "_ratios", {"a": 0.9, "b": ratio})
        told += [(half, event) for event in found.events(30.0 * half)]
    slow = {"host": "b", "slow": True, "ratio": 1.3, "seconds": 180.0}
    assert told == [(6, slow), (12, slow | {"slow": False, "ratio": 1.0})]


def test_few_reports_are_not_enough(monkeypatch) -> None:
    found = SlowHosts()
    monkeypatch.setattr(found, "_ratios", {"a": 1.0, "b": 2.0})
    times = [slow_hosts.SECONDS / (slow_hosts.REPORTS - 2) * number for number in range(6)]
    assert [len(found.events(time)) for time in times] == [0, 0, 0, 0, 1, 0]
    monkeypatch.setattr(found, "_recent", {})
    assert not found.events(0.0) and not found.events(10 * slow_hosts.SECONDS)
