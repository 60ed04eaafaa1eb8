"""Forked ranks behave as ranks that a launcher starts, and none outlives its test."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import ROOT
from tests.launching import environment, run_workers, session_members

RANK = """
import json, os, sys, time
print(json.dumps({
    "argv": sys.argv, "name": __name__, "directory": os.getcwd(), "path": sys.path[0],
    "world": [os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")],
    "ours": [name for name in sys.modules if name.partition(".")[0] in ("zerolm", "tests")],
    "session": os.getsid(0), "torch": "torch" in sys.modules,
}))
if "fail" in sys.argv:
    sys.exit(3 if os.environ["RANK"] == "1" else 0)
if "hang" in sys.argv:
    time.sleep(600)
"""


@pytest.fixture
def script(tmp_path) -> Path:
    path = tmp_path / "rank.py"
    path.write_text(RANK)
    return path


def wait_until(condition, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert condition()


def ranks_of(output: str) -> dict:
    return json.loads(output.splitlines()[0])


def test_a_rank_has_its_own_arguments_directory_and_numbers_and_nothing_of_this_project(script):
    found = ranks_of(run_workers(2, script, "a", "{rank}"))
    assert found["argv"] == [str(script), "a", "0"] and found["name"] == "__main__"
    assert found["directory"] == str(Path.cwd()) and found["path"] == str(script.parent)
    assert found["world"] == ["0", "0", "2"] and found["torch"]
    assert found["ours"] == [] and found["session"] not in (os.getsid(0), os.getpid())


@pytest.mark.soak
def test_a_variable_that_libraries_read_when_they_are_imported_is_set_before(script):
    script.write_text("from huggingface_hub import constants; print(constants.HF_HOME)")
    home = str(script.parent / "home")
    assert run_workers(1, script, HF_HOME=home).split() == [home]


def test_the_exit_code_and_the_output_of_a_rank_that_fails_are_reported(script):
    with pytest.raises(AssertionError, match=r"exit codes by rank: \{1: 3") as failure:
        run_workers(2, script, "fail")
    assert "rank 0: {" in str(failure.value) and "rank 1: {" in str(failure.value)


def test_ranks_that_do_not_end_in_time_are_killed(script):
    with pytest.raises(AssertionError, match="not finished after 1 s") as failure:
        run_workers(2, script, "hang", timeout=1)
    session = json.loads(re.search(r"rank 0: (\{.*\})", str(failure.value))[1])["session"]
    wait_until(lambda: not session_members(session))


@pytest.mark.soak
def test_no_process_is_left_when_the_pytest_process_is_killed(script, tmp_path):
    mark = tmp_path / "mark"
    script.write_text(f"""
import os, pathlib, time
server = pathlib.Path(f"/proc/{{os.getsid(0)}}/stat").read_text().split()[3]
pathlib.Path({str(mark)!r}).write_text(f"{{server}} {{os.getsid(0)}}")
time.sleep(600)
""")
    code = f"from tests.launching import *; run_workers(1, Path({str(script)!r}))"
    caller = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=environment())
    wait_until(lambda: mark.exists() and mark.read_text().count(" ") == 1, 120)
    server, session = map(int, mark.read_text().split())
    assert len(session_members(session)) == 2 and session_members(server)
    caller.kill()
    caller.wait(30)
    wait_until(lambda: not session_members(session) and not session_members(server))
