"""Commands whose standard streams are closed, as those of daemons may be."""

import os
import subprocess
import sys

from tests import ROOT
from tests.launching import environment

SCRIPT = """\
import sys
from zerolm.common.command_line import Command, Group, run_program
sys.exit(run_program(Group("", {"go": Command("go", "command")}), ["go"], "program"))
"""
COMMAND = """\
import pathlib, subprocess, sys
def add_flags(parser): pass
def run(arguments):
    print("to stdout"), print("to stderr", file=sys.stderr)
    with open("output", "w") as file:
        subprocess.run(["sh", "-c", "echo stdout; echo stderr >&2; read line"])
        file.write(str(file.fileno()))
    return 7
"""


def test_closed_streams_change_no_exit_code_and_no_file_takes_their_place(tmp_path):
    (tmp_path / "command.py").write_text(COMMAND)
    path = os.pathsep.join((str(ROOT), str(tmp_path)))
    line = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-c", SCRIPT]
    done = subprocess.run(line, cwd=tmp_path, env=environment(PYTHONPATH=path), timeout=60)
    assert done.returncode == 7
    assert int((tmp_path / "output").read_text()) > 2, "libraries in C write to descriptors 1 and 2"
