"""`Child`: restarts with pauses, bounded waits, and the environment of the process."""

import math
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from zerolm.common.child import MAX_PAUSE_SECONDS, Child
from zerolm.common.processes import SUPERVISOR

MINUTE = 60.0


def child(script: str, **options: Any) -> Child:
    one = Child("report", **options)
    one.command = [sys.executable, "-c", script]
    return one


def run(one: Child) -> int | None:
    """Start it and wait for its end."""
    one.start()
    return one.wait(time.monotonic() + MINUTE)


def test_pauses_grow_with_each_failure_and_end_with_a_success(monkeypatch) -> None:
    one = child("raise SystemExit(3)", first_pause_seconds=100.0)
    now = time.monotonic()
    for pause in (100.0, 200.0, 400.0, MAX_PAUSE_SECONDS):
        assert one.due() and run(one) == 3 and not one.due()
        monkeypatch.setattr(time, "monotonic", lambda start=now + pause - 1: start)
        assert not one.due(), "not before the pause is over"
        now += pause + MINUTE
        monkeypatch.setattr(time, "monotonic", lambda start=now: start)
    one.command = [sys.executable, "-c", ""]
    assert run(one) == 0 and one.due() and one.failures == 0


def test_after_the_last_failure_it_is_never_due_again() -> None:
    one = child("raise SystemExit(3)", max_failures=2)
    assert [run(one) for _ in range(2)] == [3, 3]
    assert not one.due() and one.failures == 2


def test_an_endless_child_fails_even_with_exit_code_0() -> None:
    one = child("", endless=True, max_failures=1)
    assert run(one) == 0 and not one.due()


def test_waiting_is_bounded_and_calls_back() -> None:
    one = child("import time; time.sleep(600)")
    one.start()
    calls: list[float] = []
    start = time.monotonic()
    assert one.wait(start + 0.3, waiting=lambda: calls.append(0.0)) is None and one.running
    assert calls
    assert one.wait(math.inf, cancelled=lambda: True) is None
    process = one.process
    one.kill()
    assert process is not None and process.returncode == -9 and not one.running
    one.kill()  # does nothing


def test_a_process_that_cannot_be_started_is_retried_later(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    one = child("", log=tmp_path / "file" / "log")
    with pytest.raises(OSError, match="file"):
        one.start()
    assert not one.running and not one.due() and one.failures == 0


def test_files_in_the_current_directory_never_take_the_place_of_modules(tmp_path, monkeypatch):
    (tmp_path / "zerolm").mkdir()
    for name in ("zerolm/__init__.py", "zerolm/__main__.py", "json.py", "logging.py"):
        (tmp_path / name).write_text("raise SystemExit('a file of the user')")
    monkeypatch.chdir(tmp_path)
    one = Child("report", "--help", log=tmp_path / "log")
    assert run(one) == 0 and "of_process" not in (log := (tmp_path / "log").read_text())
    assert "usage: python -m zerolm report" in log


@pytest.mark.parametrize("supervised", [True, False])
def test_only_a_supervised_child_has_the_mark_of_the_supervisor(
    tmp_path: Path, monkeypatch, supervised
) -> None:
    monkeypatch.setenv(SUPERVISOR, "somebody-1")
    log = tmp_path / "log"
    script = f"import os, zerolm; print(os.environ.get({SUPERVISOR!r}))"
    assert run(child(script, log=log, supervised=supervised)) == 0
    assert log.read_text() == ("somebody-1\n" if supervised else "None\n")


def test_a_signal_during_its_start_does_not_end_it(tmp_path) -> None:
    """A launcher that ends a rank signals its children too, which are perhaps importing still."""
    script = (
        "import signal, time; time.sleep(0.5); from zerolm.common.child import serve; "
        f"serve({os.getpid()}); print(signal.pthread_sigmask(signal.SIG_BLOCK, []))"
    )
    one = child(script, log=tmp_path / "log" / "child.log")
    one.start()
    assert one.process is not None
    one.process.terminate()
    assert one.wait(time.monotonic() + MINUTE) == 0
    assert (tmp_path / "log" / "child.log").read_text() == "set()\n"
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()
