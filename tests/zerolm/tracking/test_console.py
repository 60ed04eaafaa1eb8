"""`Console`: a bar on a terminal that loses no line of output; no bar anywhere else."""

import os
import pty
import re
import struct
import subprocess
import sys
import termios
from fcntl import ioctl

import pytest

from tests import ROOT

PROGRAM = """
import os, sys, time
from zerolm.tracking.console import Console
console = Console(True)
console.start(0, 30)
for step in range(1, 31):
    console.step(step)
    row = {"step": step, "tokens": step * 1000, "train/loss": 3.25, "train/grad_norm": 0.5,
           "train/learning_rate": 1e-3, "throughput/tokens_per_second": 12345.0,
           "throughput/mfu": 0.41}
    if not console.figures(row, 30, 75.0):
        print(f"plain step={step}", flush=True)
    if step % 10 == 0:
        print(f"line {step}", flush=True)
        print(f"error {step}", file=sys.stderr, flush=True)
    time.sleep(0.02)
if os.fork() == 0:
    print("from a forked worker", flush=True)
    os._exit(0)
os.wait()
console.step(31)
console.close()
print("the end")
"""


def run_in_terminal(columns: int, **more: str) -> str:
    leader, follower = pty.openpty()
    ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24 if columns else 0, columns, 0, 0))
    environment = {**os.environ, "TERM": "xterm", "PYTHONPATH": str(ROOT), **more}
    environment.pop("COLUMNS", None)
    child = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdout=follower, stderr=follower, env=environment
    )
    os.close(follower)
    shown = b""
    try:
        while part := os.read(leader, 4096):
            shown += part
    except OSError:  # Linux: the other end is closed
        pass
    assert child.wait(timeout=60) == 0, shown
    return shown.decode()


def screen(text: str) -> list[str]:
    """Return what a terminal shows of text with carriage returns, line ends and erased lines."""
    lines, column = [""], 0
    for character in re.findall(r"\x1b\[[?\d;]*[a-zA-Z]|.", text.replace("\r\n", "\n"), re.DOTALL):
        if character == "\r":
            column = 0
        elif character == "\x1b[2K":
            lines[-1] = " " * column
        elif character.startswith("\x1b"):
            assert character in ("\x1b[?25l", "\x1b[?25h"), "hide and show the cursor"
        elif character == "\n":
            lines.append("")
            column = 0
        else:
            lines[-1] = lines[-1][:column].ljust(column) + character + lines[-1][column + 1 :]
            column += 1
    return [line.rstrip() for line in lines]


@pytest.mark.parametrize("columns", [0, 60, 120])
def test_the_bar_stays_below_and_loses_no_line(columns) -> None:
    text = run_in_terminal(columns)
    assert "\x1b[?25l\x1b[?25h" in text, "rich hides the cursor, and a killed run needs it"
    found = [line for line in screen(text) if line]
    assert found[:6] == [f"{word} {step}" for step in (10, 20, 30) for word in ("line", "error")]
    assert len(found) == 9 and found[6].endswith("from a forked worker"), "as it comes"
    assert found[-2].startswith("step 31/31 100% █") and "1m15s to go" in found[-2]
    assert "loss 3.2500" in found[-2] and len(found[-2]) <= (columns or 80)
    assert ("lr 1.00e-03" in found[-2]) == (columns > 100)
    assert found[-1] == "the end"


def test_a_terminal_that_cannot_show_the_bar_gets_plain_lines_and_loses_none() -> None:
    shown = screen(run_in_terminal(80, PYTHONIOENCODING="ascii", PYTHONUTF8="0"))
    lines = [line for line in shown if line.startswith(("line", "error", "the end"))]
    assert lines == [
        *(f"{word} {step}" for step in (10, 20, 30) for word in ("line", "error")), "the end"
    ]  # fmt: skip
    assert sum(line.startswith("plain step=") for line in shown) >= 28


def test_a_pipe_gets_plain_lines_and_nothing_else() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, cwd=ROOT
    )
    assert done.returncode == 0 and "\x1b" not in done.stdout and "\r" not in done.stdout
    assert done.stdout.count("plain step=") == 30 and done.stderr.count("error") == 3
