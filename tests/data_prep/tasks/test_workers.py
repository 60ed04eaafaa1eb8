"""Results of workers are in order, memory is bounded, and the death of a worker causes no hang."""

import fcntl
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial

import psutil
import pytest

from data_prep.tasks import workers
from data_prep.tasks.workers import MAX_AHEAD_PER_WORKER, ordered_map
from tests import ROOT
from zerolm.common.errors import ConfigError, ZerolmError


@pytest.fixture(params=["fork", "spawn"])
def started(request, monkeypatch):
    """Forked workers, and spawned ones."""
    monkeypatch.setattr(workers, "_has_one_thread", lambda: request.param == "fork")


def squarer(delay=0.0):
    def square(number):
        time.sleep(delay * (number % 3))
        return number * number

    return square


def big_answers_and_death():
    def answer(number):
        threading.Timer(1, os.kill, (os.getpid(), signal.SIGKILL)).start()
        return bytes(number)

    return answer


def failing(kind):
    def fail(number):
        if number == 5:
            if kind == "refused":
                raise ConfigError(["one", "two"])
            if kind == "bug":
                raise KeyError("lost")
            os.kill(os.getpid(), signal.SIGKILL)
        return number

    return fail


def alone(others):
    """Make the workers' function; `others` are children of this process that are not workers."""

    def is_alone(number):
        """Whether the other worker exits while this item is worked on; at once for the others."""
        end = time.monotonic() + 60
        while number == 0 and time.monotonic() < end:
            siblings = psutil.Process(os.getppid()).children()
            siblings = [each for each in siblings if each.pid not in others]
            running = [each for each in siblings if each.status() != psutil.STATUS_ZOMBIE]
            trackers = [each for each in running if "resource_tracker" in " ".join(each.cmdline())]
            if len(running) - len(trackers) == 1:
                return True
            time.sleep(0.01)
        return False

    return is_alone


def unable():
    raise ConfigError("no tokenizer")


def children_left() -> list:
    return [child for child in multiprocessing.active_children() if child.name.startswith("worker")]


def test_results_are_in_the_order_of_the_items(started):
    """Also if some items take longer."""
    results = ordered_map(partial(squarer, 0.01), range(50), 3)
    assert list(results) == [number * number for number in range(50)]
    assert children_left() == []


def test_a_worker_without_items_exits_while_another_one_works():
    others = [child.pid for child in psutil.Process().children()]
    results = ordered_map(partial(alone, others), range(2), 2)
    assert list(results) == [True, False]


def test_the_number_of_items_in_flight_is_bounded():
    """A slow consumer, or one slow item, does not let results pile up."""
    read = 0

    def items():
        nonlocal read
        for number in range(200):
            read += 1
            yield number

    results = ordered_map(squarer, items(), 2)
    for done, _ in enumerate(results):
        assert read - done <= 2 * MAX_AHEAD_PER_WORKER


@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        ("refused", ConfigError, "one\ntwo"),
        ("bug", RuntimeError, "KeyError: 'lost'"),
        ("killed", ZerolmError, "was killed by SIGKILL"),
    ],
)
def test_a_failure_in_a_worker_ends_the_map(started, kind, error, message):
    with pytest.raises(error, match=message):
        list(ordered_map(partial(failing, kind), range(50), 2))
    assert children_left() == []


def test_a_worker_that_cannot_start_ends_the_map():
    with pytest.raises(ConfigError, match="no tokenizer"):
        list(ordered_map(unable, range(50), 2))


def test_a_worker_killed_in_the_middle_of_a_message_is_detected(started):
    """The others must not wait for its pipe, nor the parent for the rest of the message."""

    def items():
        yield 30_000_000
        first, _ = sorted(children_left(), key=lambda child: child.name)
        first.join(60)  # meanwhile its answer, which is not read, fills the pipe
        yield 1

    with pytest.raises(ZerolmError, match=r"worker-0 .* was killed by SIGKILL"):
        list(ordered_map(big_answers_and_death, items(), 2))
    assert children_left() == []


def test_an_abandoned_map_ends_its_workers():
    results = ordered_map(squarer, range(1000), 2)
    next(results)
    results.close()
    assert children_left() == []


def test_a_failing_source_of_items_ends_the_workers():
    def items():
        yield from range(5)
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        list(ordered_map(squarer, items(), 2))
    assert children_left() == []


ORPHANS = """
import fcntl, os, sys, time
from data_prep.tasks.workers import ordered_map

def sleeper():
    # One write, since print writes the end of the line apart from it.
    return lambda item: os.write(1, b"%d\\n" % os.getpid()) and time.sleep(60)

if __name__ == "__main__":
    if sys.argv[2] == "spawn":
        from data_prep.tasks import workers
        workers._has_one_thread = lambda: False
    lock = open(sys.argv[1], "w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    list(ordered_map(sleeper, range(2), 2))
"""


@pytest.mark.parametrize("kind", ["fork", "spawn"])
def test_workers_of_a_killed_process_end_at_once_and_hold_no_lock(tmp_path, kind):
    """Also in the middle of an item."""
    (tmp_path / "orphans.py").write_text(ORPHANS)
    process = subprocess.Popen(
        [sys.executable, str(tmp_path / "orphans.py"), str(tmp_path / "lock"), kind],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    pids = [int(process.stdout.readline()) for _ in range(2)]
    process.kill()
    process.wait(30)
    with open(tmp_path / "lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    deadline = time.monotonic() + 30
    while any(psutil.pid_exists(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.stdout.close()
