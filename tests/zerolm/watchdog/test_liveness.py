"""Tests of what counts as progress."""

import subprocess
import sys
import time

import pytest

from zerolm.watchdog import liveness
from zerolm.watchdog.progress import Progress

QUIET_SECONDS = 50.0  # more than a third of a start's limit, less than the limit


@pytest.fixture
def monitor(monkeypatch):
    """Yield the monitor of a rank that starts, and has done nothing for `QUIET_SECONDS`."""
    monkeypatch.setattr(liveness, "CURRENT", Progress())
    monkeypatch.setattr(liveness, "bytes_moved", lambda: 0)
    monitor = liveness.ProgressMonitor(hang_timeout=30)
    monitor._progress_at = liveness.CURRENT.recorded_at = time.monotonic() - QUIET_SECONDS
    return monitor


@pytest.fixture
def build(tmp_path, monkeypatch):
    """Yield a running compiler of a DeepSpeed operator, as torch starts it."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    directory = tmp_path / "cpu_adam"
    directory.mkdir()
    (directory / "build.ninja").touch()
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    with subprocess.Popen(command, cwd=directory) as compiler:
        yield compiler
        compiler.kill()


def test_a_build_is_progress_at_a_start(monitor, build):
    monitor.update()
    assert monitor.quiet_seconds() < QUIET_SECONDS


def test_a_build_that_was_killed_is_none(monitor, build):
    build.kill()
    build.wait()
    monitor.update()
    assert monitor.quiet_seconds() >= QUIET_SECONDS


def test_a_build_is_none_during_training(monitor, build):
    liveness.CURRENT.longest_seconds["optimizer"] = 1.0
    liveness.CURRENT.phase = "forward"
    monitor.update()
    assert monitor.quiet_seconds() >= QUIET_SECONDS
