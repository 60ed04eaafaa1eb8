"""The first rank may take its time, for as long as it is at work and not for ever."""

import time

import pytest

from zerolm.evaluate import keepalive
from zerolm.evaluate.keepalive import AT_WORK, Patience, hear


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(keepalive, "BEAT_SECONDS", 0.01)
    monkeypatch.setattr(keepalive, "MESSAGE_SECONDS", 0.05)


def come(found: list, count: int) -> bool:
    deadline = time.monotonic() + 20
    while len(found) < count and time.monotonic() < deadline:
        time.sleep(0.01)
    return len(found) >= count


def test_there_are_beats_and_messages_but_in_forward_passes(quick) -> None:
    beats: list = []
    sent: list = []
    with Patience(lambda: beats.append(1), others=True, send=sent.append) as patient:
        assert come(beats, 10) and come(sent, 2)
        with patient.paused():
            before = len(beats), len(sent)
            time.sleep(0.2)
            assert (len(beats), len(sent)) == before
        assert come(beats, before[0] + 5) and come(sent, before[1] + 1)
    before = len(beats), len(sent)
    time.sleep(0.1)
    assert (len(beats), len(sent)) == before and set(sent) == {AT_WORK}


def test_nothing_is_sent_after_a_forward_pass_that_failed(quick) -> None:
    sent: list = []
    with Patience(lambda: None, others=True, send=sent.append) as patient:
        with pytest.raises(RuntimeError, match="memory"), patient.paused():
            raise RuntimeError("out of memory")
        time.sleep(0.2)
    assert not sent


def test_beats_end_after_the_longest_time(quick, monkeypatch) -> None:
    monkeypatch.setattr(keepalive, "LONGEST_SECONDS", 0.2)
    beats: list = []
    with Patience(lambda: beats.append(1), others=False):
        time.sleep(0.5)
        before = len(beats)
        time.sleep(0.2)
        assert 0 < before == len(beats)


def test_the_others_hear_what_they_wait_for() -> None:
    beats: list = []
    for said in (None, ("score", []), [("a", [1])]):
        messages = iter([AT_WORK, AT_WORK, said])
        assert hear(lambda: beats.append(1), lambda _, m=messages: next(m)) == said
    assert len(beats) == 6
