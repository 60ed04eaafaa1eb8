"""What a rank sees above it, and what a process above the ranks sees below it.

tests/cluster/test_process_tree.py compares the same with each real launcher.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time

import pytest

from tests import ROOT
from tests.launching import kill_session
from zerolm.common import process_tree, processes

# A process with a name, which starts the rest of its arguments and waits for it.
LINK = (
    "import subprocess, sys; open('/proc/self/comm', 'w').write(sys.argv[1]); "
    "sys.exit(subprocess.run(sys.argv[2:]).returncode)"
)
RANK = (
    "import sys; from zerolm.common.process_tree import Launch; launch = Launch.of_this_rank(); "
    "print(*(each is not None for each in launch), launch.is_orphaned(), flush=True); "
    "sys.stdin.read(); print(launch.is_orphaned())"
)


def start(*names: str, rank: str | None = "0") -> subprocess.Popen:
    """Start a rank below processes of these names, the first of which starts the second."""
    above = [word for name in names for word in (sys.executable, "-Sc", LINK, name)]
    variables = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [*above, sys.executable, "-c", RANK], text=True, start_new_session=True,
        env=variables | ({} if rank is None else {"RANK": rank}),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip


@pytest.fixture
def started():
    with contextlib.ExitStack() as stack:

        def begin(*names: str, **options: str | None) -> subprocess.Popen:
            process = stack.enter_context(start(*names, **options))
            stack.callback(kill_session, process.pid)
            return process

        yield begin


@pytest.mark.parametrize(
    ("names", "rank", "expected"),
    [
        (["deepspeed", "launch"], "0", [True, True, False]),
        (["sshd: root@notty", "launch"], "0", [True, False, True]),
        (["sshd", "bash", "launch"], "0", [True, False, False]),
        (["slurmstepd"], "0", [True, False, False]),
        (["bash", "launch", "-x deepspeed"], "0", [True, False, False]),
        (["deepspeed", "bash"], None, [False, False, False]),
    ],
    ids=["deepspeed", "pdsh", "ssh by hand", "srun", "torchrun", "python"],
)
def test_a_rank_knows_what_has_started_it(started, names, rank, expected):
    process = started(*names, rank=rank)
    *seen, orphaned = process.stdout.readline().split()
    assert seen == list(map(str, expected)) and orphaned == "False"


def test_a_runner_knows_its_ranks_and_a_rank_that_its_node_launcher_has_ended(started):
    runner = started("deepspeed", "launch")
    assert runner.stdout.readline().split()[:2] == ["True", "True"]
    (launcher,), (rank,) = process_tree.below(runner.pid)
    assert processes.inspect_process(rank).parent == launcher
    os.kill(launcher, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while processes.inspect_process(rank).parent == launcher:
        assert time.monotonic() < deadline
    runner.stdin.close()
    assert runner.stdout.read().split() == ["True"]


def test_the_processes_of_a_start_are_in_order_and_one_that_has_ended_is_left_out():
    own = processes.inspect_process(os.getpid())
    first = process_tree.Process(1, "S", 0, 0, 0)
    assert list(process_tree.starts(None)) == ["rank"]
    assert list(process_tree.starts(own)) == ["node launcher", "rank"]
    begun = process_tree.starts(first)
    assert list(begun) == ["deepspeed", "node launcher", "rank"]
    assert list(begun.values()) == sorted(begun.values())
