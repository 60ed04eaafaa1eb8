"""Shared by the tests of the supervisor: a fake run, whose processes are killed in the end."""

import signal

import pytest

from tests.launch.supervise.fake_run import FakeRun
from zerolm.common import processes


@pytest.fixture
def fake_run(tmp_path):
    run = FakeRun(tmp_path)
    yield run
    for pid in run.processes():
        processes.signal_marked(pid, signal.SIGKILL, run.mark)
