"""A restart is forked from the imports of the first launch, as long as nothing has changed."""

import os
import socket
import subprocess
import sys
import time
import uuid

import pytest

from launch.supervise.imports import Imports
from tests import ROOT
from zerolm.common import processes
from zerolm.common.forked import IMPORTS
from zerolm.common.process_tree import RUNNER
from zerolm.common.shipped import module_command

# Stands in for a node launcher that has imported, and for the runner that a restart becomes.
PROGRAM = """import os
from zerolm.common.forked import Become
from zerolm.train import held_imports
import imported
try:
    held_imports.fork_holder(os.environ)
except held_imports.Held as holder:
    try:
        held_imports.hold(holder.descriptor)
    except Become as process:
        print(process.argv[-1], process.environment["WORD"], flush=True)
        os._exit(7)
"""
SECONDS = 20


def wait_for(condition):
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def held(tmp_path):
    """Return imports that a process holds, the mark of the processes, and a file they imported."""
    file, mark = tmp_path / "imported.py", f"ZEROLM_TEST={uuid.uuid4().hex}"
    file.write_text("VALUE = 1\n")
    imports = Imports()
    imports._channel, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    paths = f"{ROOT}{os.pathsep}{tmp_path}"
    own = {**os.environ, "PYTHONPATH": paths, IMPORTS: str(other.fileno())}
    with other:
        subprocess.run(
            [sys.executable, "-c", PROGRAM], env=own | dict([mark.split("=")]), check=True,
            pass_fds=[other.fileno()], timeout=SECONDS,
        )  # fmt: skip
    yield imports, mark, file
    imports.close()
    wait_for(lambda: not processes.marked_pids(mark))


def start(imports, word):
    return imports._forked([*module_command(RUNNER), "argument"], {"WORD": word})


def test_launches_are_forked_with_their_arguments_environment_and_exit_code(held):
    imports, mark, _ = held
    for word in ("first", "second"):
        wait_for(lambda: processes.marked_pids(mark))
        launch = start(imports, word)
        assert launch is not None
        with launch.stdout:
            assert launch.stdout.read() == f"argument {word}\n".encode()
        assert launch.wait(SECONDS) == launch.poll() == 7
    assert len(processes.marked_pids(mark)) == 1  # which keeps the imports


def test_a_launch_imports_again_once_code_has_changed(held):
    imports, mark, file = held
    file.write_text("VALUE = 12\n")
    assert start(imports, "word") is None
    wait_for(lambda: not processes.marked_pids(mark))
    assert start(imports, "word") is None


def test_the_imports_end_with_the_supervisor(held):
    imports, mark, _ = held
    imports._channel.close()  # as the kernel does when a process is killed
    imports._channel = None
    wait_for(lambda: not processes.marked_pids(mark))
