"""zerolm/console.py: a bar on a terminal, which loses no line; nothing of it anywhere else."""

import os
import pty
import struct
import subprocess
import sys
import termios
from fcntl import ioctl
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PROGRAM = """
import sys, time
from zerolm.console import Console
console = Console(True)
console.begin(0, 30)
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
console.step(31)
console.close()
print("the end")
"""


def run_in_terminal(columns: int) -> str:
    leader, follower = pty.openpty()
    ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24 if columns else 0, columns, 0, 0))
    environment = {**os.environ, "TERM": "xterm", "PYTHONPATH": str(ROOT)}
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
    """Return what a terminal shows of text that moves by carriage returns and ends of line."""
    lines, column = [""], 0
    for character in text.replace("\r\n", "\n"):
        if character == "\r":
            column = 0
        elif character == "\n":
            lines.append("")
            column = 0
        else:
            lines[-1] = lines[-1][:column].ljust(column) + character + lines[-1][column + 1 :]
            column += 1
    return [line.rstrip() for line in lines]


@pytest.mark.parametrize("columns", [0, 60, 120])
def test_the_bar_stays_below_and_loses_no_line(columns) -> None:
    shown = screen(run_in_terminal(columns))
    found = [line for line in shown if line]
    assert found[:-2] == [f"{word} {step}" for step in (10, 20, 30) for word in ("line", "error")]
    assert found[-2].startswith("step 31/31 100% █") and "1m15s to go" in found[-2]
    assert "loss 3.2500" in found[-2] and len(found[-2]) <= (columns or 80)
    assert ("lr 1.00e-03" in found[-2]) == (columns > 100)
    assert found[-1] == "the end"


def test_a_pipe_gets_plain_lines_and_nothing_else() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, cwd=ROOT
    )
    assert done.returncode == 0 and "\x1b" not in done.stdout and "\r" not in done.stdout
    assert done.stdout.count("plain step=") == 30 and done.stderr.count("error") == 3
