"""Processes of ours in a directory with Python files that have the names of modules."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT
from tests.launching import free_port
from zerolm.common import shipped
from zerolm.common.shipped import code_command, module_command

NAMES = ("json", "queue", "random", "signal", "threading", "multiprocessing", "runpy", "deepspeed")
SPAWN = """
import multiprocessing, os, sys
from zerolm.common.shipped import shield
if __name__ == "__main__":
    shield(os.environ)
    child = multiprocessing.get_context("spawn").Process(target=print, args=("spawned",))
    child.start()
    child.join()
    sys.exit(child.exitcode)
"""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A working directory whose modules leave a mark when they are imported, and cannot be."""
    (tmp_path / "work").mkdir()
    for name in NAMES:
        mark = tmp_path / f"imported-{name}"
        (tmp_path / "work" / f"{name}.py").write_text(f"open({str(mark)!r}, 'w')\nraise OSError\n")
    (tmp_path / "spawn.py").write_text(SPAWN)
    return tmp_path / "work"


def run(command: list[str], directory: Path, path: str = "") -> str:
    done = subprocess.run(
        command, cwd=directory, env={"PATH": "/usr/bin:/bin", "PYTHONPATH": path, "HOME": "/tmp"},
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert not list(directory.parent.glob("imported-*"))
    return done.stdout


def test_a_module_and_code_import_nothing_of_the_working_directory(directory, tmp_path):
    assert "multiprocessing" in (subprocess.run(
        [sys.executable, "-c", "import multiprocessing"], cwd=directory, capture_output=True,
        text=True,
    ).stderr)  # fmt: skip
    (tmp_path / "imported-multiprocessing").unlink()
    (tmp_path / "value").write_text("[1]")
    assert run(module_command("json.tool", tmp_path / "value"), directory).split() == [*"[1]"]
    assert run(code_command("import json, queue; print(json.dumps(1))"), directory) == "1\n"
    show = "import os; print(os.environ['PYTHONPATH'], os.environ['PYTHONSAFEPATH'])"
    (tmp_path / "show_path.py").write_text(show)
    found = run(module_command("show_path"), directory, path=f":{tmp_path}:")
    assert found == f"{ROOT}:{tmp_path} 1\n"  # an empty entry is the working directory


def test_processes_of_multiprocessing_import_nothing_of_it(directory, tmp_path):
    command = [sys.executable, str(tmp_path / "spawn.py")]
    assert run(command, directory, path=str(ROOT)) == "spawned\n"


def test_before_python_3_11_multiprocessing_is_told_so_too(monkeypatch):
    from multiprocessing import util

    started: list[list[str]] = []
    monkeypatch.setattr(util, "spawnv_passfds", lambda path, argv, fds: started.append(argv))
    shipped._shield_multiprocessing()
    util.spawnv_passfds(b"python", ["python", "-c", "from x import y", "--flag"], [])
    code = shipped.WITHOUT_DIRECTORY + "from x import y"
    assert started == [["python", "-c", code, "--flag"]]


@pytest.mark.soak  # always: tests/launch/command/test_launcher.py
def test_deepspeeds_launchers_import_nothing_of_it(directory, tmp_path):
    """Neither the launcher, nor that of the node which it starts, nor the ranks."""
    (tmp_path / "rank.py").write_text("import json, random; print('trained')")
    launcher = ["--num_gpus", 1, "--master_port", free_port(), tmp_path / "rank.py"]
    assert "trained" in run(module_command("zerolm.engine.launcher", *launcher), directory)
