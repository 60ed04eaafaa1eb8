"""Locks among real processes: one holder, which the kernel ends with the process."""

import errno
import fcntl
import signal
import subprocess
import sys
from typing import Any

import pytest

from tests import ROOT
from zerolm.common import locks
from zerolm.common.locks import FileLock, LockTaken, wait_for_lock

HOLDER = """
import os, sys, time
from zerolm.common.locks import FileLock
lock = FileLock(sys.argv[1], owner="pid 7\\n")
child = os.fork()
if child == 0:
    lock.release()
    print("forked", lock.held, flush=True)
    time.sleep(60)
os.read(int(sys.argv[2]), 1)
"""


@pytest.fixture
def holder(tmp_path):
    """A process that holds a lock, with a forked child that outlives it."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path / "lock"), "0"],
        cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None and process.stdout.readline() == "forked False\n"
    yield process
    subprocess.run(["kill", "-KILL", "--", f"-{process.pid}"], check=True)
    process.communicate()


def test_a_lock_names_its_owner_and_ends_with_it_whatever_its_children_do(tmp_path, holder):
    path = tmp_path / "lock"
    with pytest.raises(LockTaken) as taken:
        FileLock(path)
    assert taken.value.owner == "pid 7" and path.read_text() == "pid 7\n"
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    with FileLock(path) as lock:
        assert lock.held and path.read_text() == "pid 7\n"  # what a dead one left may be read
    assert not lock.held and path.exists()


def test_waiting_ends_with_the_holder_or_when_it_is_given_up(tmp_path, holder):
    polls: list[int] = []
    with pytest.raises(LockTaken):
        wait_for_lock(tmp_path / "lock", lambda: polls.append(1) or len(polls) > 3, 0.001)
    assert len(polls) == 4
    holder.kill()
    wait_for_lock(tmp_path / "lock", lambda: False, 0.01).release()


def test_shared_locks_exclude_only_an_exclusive_one(tmp_path):
    path = tmp_path / "lock"
    with pytest.raises(FileNotFoundError):
        FileLock(path, create=False)
    with FileLock(path, shared=True), FileLock(path, shared=True), pytest.raises(LockTaken):
        FileLock(path, create=False)
    FileLock(path, create=False).release()


def test_a_file_system_without_locks_is_no_error_but_is_known(tmp_path, monkeypatch):
    def without_locks(file: Any, operation: int) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(fcntl, "flock", without_locks)
    assert locks.fcntl is fcntl
    with FileLock(tmp_path / "lock") as lock:
        assert lock.unsupported is not None and lock.unsupported.errno == errno.ENOLCK
