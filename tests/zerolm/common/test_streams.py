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


HOSTILE = """\
import pathlib, sys
from zerolm.common.errors import ConfigError
def add_flags(parser): pass
def run(arguments):
    text = pathlib.Path("text").read_bytes().decode()
    print(text), print(text, file=sys.stderr)
    raise ConfigError(f"file: {text} must be printable. Correct it.")
"""


def test_text_of_a_file_does_not_control_the_terminal(tmp_path):
    """Whatever a command prints, also as a refusal; joiners of scripts are kept."""
    control = "\x1b]0;own\x07\x1b[2J\r\x9b31m\b\u202e\u2066\U000e0041\u00ad\u2028"
    (tmp_path / "text").write_bytes(f"{control} \tna\u200cme \u0645\n".encode())
    (tmp_path / "command.py").write_text(HOSTILE)
    path = os.pathsep.join((str(ROOT), str(tmp_path)))
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=tmp_path, env=environment(PYTHONPATH=path), timeout=60,
        capture_output=True,
    )  # fmt: skip
    escaped = r"\u001b]0;own\u0007\u001b[2J\r\u009b31m\b\u202e\u2066\udb40\udc41\u00ad\u2028"
    shown = f"{escaped} \tna\u200cme \u0645\n"
    assert done.returncode == 2 and done.stdout.decode().startswith(shown)
    errors = done.stderr.decode()
    assert errors.startswith(shown.replace(r"\r", "\r")) and f"file: {shown} must be" in errors


FORBIDDEN = """\
def add_flags(parser): pass
def run(arguments): raise PermissionError(13, "Permission denied", "runs/first/run.json")
"""


def test_a_file_without_permission_is_refused_in_a_sentence(tmp_path):
    (tmp_path / "command.py").write_text(FORBIDDEN)
    path = os.pathsep.join((str(ROOT), str(tmp_path)))
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=tmp_path, env=environment(PYTHONPATH=path), timeout=60,
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 2
    assert "refused\nruns/first/run.json: Permission denied. Change its" in done.stderr


def test_closed_streams_change_no_exit_code_and_no_file_takes_their_place(tmp_path):
    (tmp_path / "command.py").write_text(COMMAND)
    path = os.pathsep.join((str(ROOT), str(tmp_path)))
    line = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-c", SCRIPT]
    done = subprocess.run(line, cwd=tmp_path, env=environment(PYTHONPATH=path), timeout=60)
    assert done.returncode == 7
    assert int((tmp_path / "output").read_text()) > 2, "libraries in C write to descriptors 1 and 2"
