"""The shell scripts parse, and name what is missing instead of continuing."""

import os
import shutil
import subprocess

import pytest

from tests import ROOT, tracked

SCRIPTS = tracked("launch/*.sh", "tests/*.sh", ".ci/run")


def bash(*arguments, **environment):
    return subprocess.run(
        ["bash", *map(str, arguments)],
        capture_output=True, text=True, timeout=60, env={**os.environ, **environment},
    )  # fmt: skip


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_script_parses(script):
    result = bash("-n", script)
    assert (result.returncode, result.stderr) == (0, "")


def test_scripts_pass_shellcheck():
    shellcheck = shutil.which("shellcheck")
    if shellcheck is None:
        pytest.skip("shellcheck is not installed")
    result = subprocess.run([shellcheck, *SCRIPTS], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stdout


@pytest.fixture
def fresh_clone(tmp_path):
    """The files that setup.sh needs, without a .venv."""
    (tmp_path / "launch").mkdir()
    of_launch = ("launch/setup.sh", "launch/install.py")
    for name in ("setup.cfg", "pyproject.toml", "constraints.txt", *of_launch):
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def test_setup_names_a_python_that_does_not_run(fresh_clone):
    result = bash(fresh_clone / "launch/setup.sh", PYTHON="no-such-python")
    assert result.returncode == 1
    assert result.stderr == "setup: PYTHON=no-such-python does not run.\n"
    assert not (fresh_clone / ".venv").exists()


@pytest.mark.parametrize(
    ("compiler", "problem", "detail"),
    [
        (None, "needs a C++ compiler", "apt-get install g++"),
        ("true", "needs Python 3.10 or newer", "no python3 was found"),
    ],
)
def test_setup_names_a_missing_program(fresh_clone, tmp_path, compiler, problem, detail):
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in ("bash", "cat", "cut", "dirname", "flock", "grep", "mkdir", "sha256sum"):
        (programs / name).symlink_to(shutil.which(name))
    if compiler:
        (programs / "c++").symlink_to(shutil.which(compiler))
    result = bash(fresh_clone / "launch/setup.sh", PATH=str(programs), CXX="")
    assert result.returncode == 1 and problem in result.stderr and detail in result.stderr


def test_multinode_reports_every_problem(tmp_path):
    hostfile = tmp_path / "hosts"
    hostfile.write_text(
        "# two valid lines\nnode1 slots=8 max_slots=8\r\nnode2 slots=8 # here\nnode3\nnode1 slots=2"
    )
    (tmp_path / ".deepspeed_env").write_text("NCCL_DEBUG=INFO\n\nWANDB_API_KEY=secret-value\n")
    result = bash(
        ROOT / "launch/multinode.sh", hostfile, 5, "--wandb_tags", "a&b", HOME=str(tmp_path)
    )
    assert result.returncode == 2 and "secret-value" not in result.stderr
    assert f"{hostfile}: line 4: 'node3' is not `name slots=N`" in result.stderr
    assert f"{hostfile}: line 5: 'node1 slots=2' lists node1 again" in result.stderr
    assert "line 1" not in result.stderr and "line 3: 'node2" not in result.stderr
    assert f"{tmp_path}/.deepspeed_env: line 2: not NAME=VALUE" in result.stderr
    assert "command line: a&b: would be changed by the shell" in result.stderr
    result = bash(ROOT / "launch/multinode.sh", hostfile, "two", HOME=str(tmp_path))
    assert result.returncode == 2
    assert "--num_nodes: two is not a positive number of hosts" in result.stderr
