"""`rank0.log`: what rank 0 prints, also above a bar, with times, bounded, without secrets."""

import os
import re
import subprocess
import sys

from tests import ROOT
from tests.launching import environment
from zerolm.tracking import console_log

PROGRAM = """
import logging, sys
from pathlib import Path
handler = logging.StreamHandler(sys.stdout)
logging.getLogger("early").addHandler(handler)
from zerolm.tracking import console_log
console_log.keep(Path(sys.argv[1]))
print("step=1", "loss=2.5")
print("\\r 10%\\r 50%\\r100%", file=sys.stderr)
print("hf_" + "a" * 20, "\\x1b[31mred")
logging.getLogger("early").warning("of a logger")
console_log.write("only here")
sys.stdout.write("half a line")
1 / 0
"""


def test_the_log_has_every_line_with_its_time(tmp_path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, tmp_path], env=environment(PYTHONPATH=str(ROOT)),
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert "step=1 loss=2.5" in done.stdout and "only here" not in done.stdout
    lines = (tmp_path / "rank0.log").read_text().splitlines()
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ", line) for line in lines)
    head, *shown = [line[20:] for line in lines]
    assert re.fullmatch(r"== \S+, pid \d+, UTC[+-]\d{4}: -c .*", head)
    assert shown[:3] == ["step=1 loss=2.5", "100%", "(hidden) \\u001b[31mred"]
    assert shown[3:5] == ["of a logger", "only here"]
    traceback = done.stderr[done.stderr.index("Traceback") :].splitlines()
    assert shown[5:] == traceback and "ZeroDivisionError" in shown[-1]


def test_the_log_is_bounded_and_a_pipe_in_its_place_is_named(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(console_log, "MAX_BYTES", 300)
    log = console_log.ConsoleLog(tmp_path)
    for number in range(100):
        log.write(f"line {number}")
        assert not log.path.exists() or log.path.stat().st_size <= 300
    log.write("line 100")
    kept = [(tmp_path / name).read_text() for name in ("rank0-earlier.log", "rank0.log")]
    assert max(map(len, kept)) < 400 and kept[-1].endswith("line 100\n")
    log.path.unlink()
    os.mkfifo(log.path)
    log.write("lost")
    log.write("lost")
    assert capsys.readouterr().out.count("lines are missing") == 1
