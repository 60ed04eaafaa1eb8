"""`KeepAlive` signals while rank 0 works alone, but not forever."""

import time

import pytest

from zerolm.evaluate import keepalive
from zerolm.evaluate.keepalive import STILL_WORKING, KeepAlive, receive


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(keepalive, "TICK_SECONDS", 0.01)
    monkeypatch.setattr(keepalive, "MESSAGE_SECONDS", 0.05)


def reaches(signals: list, count: int) -> bool:
    deadline = time.monotonic() + 300
    while len(signals) < count and time.monotonic() < deadline:
        time.sleep(0.01)
    return len(signals) >= count


def test_ticks_and_messages_pause_during_forward_passes(quick) -> None:
    ticks: list = []
    sent: list = []
    with KeepAlive(lambda: ticks.append(1), has_peers=True, send=sent.append) as alive:
        assert reaches(ticks, 10) and reaches(sent, 2)
        with alive.paused():
            before = len(ticks), len(sent)
            time.sleep(0.2)
            assert (len(ticks), len(sent)) == before
        assert reaches(ticks, before[0] + 5) and reaches(sent, before[1] + 1)
    before = len(ticks), len(sent)
    time.sleep(0.1)
    assert (len(ticks), len(sent)) == before and set(sent) == {STILL_WORKING}


def test_nothing_is_sent_after_a_forward_pass_that_failed(quick) -> None:
    sent: list = []
    with KeepAlive(lambda: None, has_peers=True, send=sent.append) as alive:
        with pytest.raises(RuntimeError, match="memory"), alive.paused():
            raise RuntimeError("out of memory")
        time.sleep(0.2)
    assert not sent


def test_ticks_stop_after_the_time_limit(quick, monkeypatch) -> None:
    monkeypatch.setattr(keepalive, "MAX_SECONDS", 0.2)
    ticks: list = []
    with KeepAlive(lambda: ticks.append(1), has_peers=False):
        time.sleep(0.5)
        before = len(ticks)
        time.sleep(0.2)
        assert 0 < before == len(ticks)


def test_peers_receive_the_result_after_the_messages() -> None:
    ticks: list = []
    for result in (None, ("score", []), [("a", [1])]):
        messages = iter([STILL_WORKING, STILL_WORKING, result])
        assert receive(lambda: ticks.append(1), lambda _, m=messages: next(m)) == result
    assert len(ticks) == 6
