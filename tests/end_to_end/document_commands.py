"""Runs the commands that a document shows, made small, as a user would: in a shell, in order."""

import contextlib
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests import ROOT
from tests.launching import environment, free_port, kill_session, run_module

LINKS = ("pretrain.py", "ds_configs", "model_configs", "launch")
SHELL = frozenset("|&;<>$`")  # what only a shell understands
SECONDS = 600  # for one command, which may start nine small runs


def link_project(directory: Path) -> None:
    """Link the files of the project that commands name."""
    for name in LINKS:
        (directory / name).symlink_to(ROOT / name)


def changed(line: str, changes: Mapping[str, str], directory: Path) -> str:
    """Return a command with {pattern: replacement} applied, in the order of `changes`."""
    for pattern, replacement in changes.items():
        line = re.sub(pattern, replacement, line)
    return line.replace("{directory}", str(directory)).replace("{port}", str(free_port()))


def run(line: str, directory: Path) -> None:
    """Run a line in a session of its own, which is killed if it takes too long."""
    words = shlex.split(line)
    # Commands of the project are forked, to save their imports, but for those that launch ranks.
    launches = words[1:2] == ["sweep"] or (words[1:2] == ["train"] and "--check" not in words)
    if words[0] == "zerolm" and not launches and SHELL.isdisjoint(line):
        with working_directory(directory):
            done = run_module(*words, DS_ACCELERATOR="cpu")
        code, output = done.returncode, done.stdout + done.stderr
    else:
        code, output = _run_in_shell(line, directory)
    assert code == 0 and "Traceback" not in output, f"{line}\n{output[-6000:]}"


@contextlib.contextmanager
def working_directory(directory: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(directory)
    try:
        yield
    finally:
        os.chdir(before)


def _run_in_shell(line: str, directory: Path) -> tuple[int, str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    variables = environment(PATH=path, DS_ACCELERATOR="cpu")
    process = subprocess.Popen(
        ["bash", "-c", line], cwd=directory, env=variables, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=SECONDS)
    finally:
        kill_session(process.pid)
    return process.returncode, output
