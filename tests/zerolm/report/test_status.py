"""`zerolm status` for a person, a pipe and a program."""

import io
import json
import os
import pty
import subprocess
import sys
import unicodedata

from rich.console import Console

from tests import ROOT
from tests.zerolm.report.run_directories import write_branch, write_heartbeats, write_run
from zerolm.report.run_history import read_run
from zerolm.report.status import panel, plain_lines, sparkline, status_of
from zerolm.report.summary import facts
from zerolm.run_dir.events import message

COMMAND = [sys.executable, "-m", "zerolm", "status"]


def test_a_pipe_gets_plain_lines(tmp_path) -> None:
    run = write_run(tmp_path / "run", ended=None)
    write_heartbeats(run)
    done = subprocess.run(
        [*COMMAND, run], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert "\x1b" not in done.stdout
    for words in (
        "running",
        "40 of 100",
        "loss        2.2",
        "2k tokens/s, MFU 40.0%",
        "30s to go",
        "step 40: loss 2.6",
        "spike: train/loss 21",
        "2 on node-1 (2)",
    ):
        assert words in done.stdout, words  # fmt: skip


def test_a_program_gets_json(tmp_path) -> None:
    runs = [write_run(tmp_path / "one"), write_run(tmp_path / "two", ended="gave_up")]
    done = subprocess.run(
        [*COMMAND, "--json", *runs], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [one["state"] for one in found] == ["done", "gave up"]
    assert found[0]["step"] == 40 and found[0]["evaluation"] == {"step": 40, "eval/loss": 2.6}


def test_of_many_results_the_summary_ones_are_shown(tmp_path) -> None:
    run = write_run(tmp_path / "run")
    tasks = {f"eval/core/task_{number:02}": 0.5 for number in range(22)}
    row = {"step": 40, "tokens": 40, "eval/core": 0.25, **tasks}
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    (line,) = [line for line in plain_lines(status_of(read_run(run))) if "  evaluation" in line]
    assert "step 40: core 0.25, loss 2.6, core/task_00 0.5" in line
    assert line.endswith("14 more in the report") and "task_08" not in line


def test_a_branch_shows_its_family(tmp_path) -> None:
    trunk = write_run(tmp_path / "trunk")
    run = write_branch(tmp_path / "decay", write_branch(tmp_path / "long", trunk, 10), 20)
    found = status_of(read_run(run))
    assert "  branch      of long at step 20, of trunk at step 10" in plain_lines(found)
    assert found["branch"]["step"] == 20 and found["branch"]["branch"]["run"] == str(trunk)


def test_the_weights_that_a_run_began_with_are_named(tmp_path) -> None:
    run = write_run(tmp_path / "run")
    assert not any(line.startswith("  weights") for line in plain_lines(status_of(read_run(run))))
    record = json.loads((run / "run.json").read_text())
    entry = {
        "given": "runs/trunk", "source": "runs/trunk@30", "hub_id": "", "digest": "0",
        "about": "", "vocab_size": 64,
    }  # fmt: skip
    derived = {**record["derived"], "initial weights": "from runs/trunk@30"}
    changed = {**record, "initial_weights": entry, "derived": derived}
    (run / "run.json").write_text(json.dumps(changed))
    assert "  weights     from runs/trunk@30" in plain_lines(status_of(read_run(run)))
    assert ["initial weights", "from runs/trunk@30"] in facts(read_run(run))
    started = {"event": "start", "world_size": 2, "zero_stage": 3, "init_from": "runs/trunk@30"}
    assert message(started) == "on 2 ranks, ZeRO-3, weights from runs/trunk@30"


def test_several_runs_on_one_screen_are_shown_in_short(tmp_path) -> None:
    run = status_of(read_run(write_run(tmp_path / "run")))
    for short in (False, True):
        console = Console(width=100, file=io.StringIO())
        console.print(panel(run, short))
        text = console.file.getvalue()
        assert "40 of 100" in text and "loss" in text and "done" in text
        assert ("evaluation" in text) is not short and ("finding" in text) is not short


def test_a_terminal_gets_a_panel(tmp_path) -> None:
    run = write_run(tmp_path / "[bold]run")
    leader, follower = pty.openpty()
    child = subprocess.Popen(
        [*COMMAND, str(run)], cwd=ROOT, stdout=follower, env={**os.environ, "COLUMNS": "100"}
    )
    os.close(follower)
    shown = b""
    try:
        while part := os.read(leader, 4096):
            shown += part
    except OSError:  # Linux: the other end is closed
        pass
    assert child.wait(timeout=60) == 0
    text = shown.decode()
    assert "\x1b[" in text and "[bold]run" in text, "text of a run is not markup"
    assert "40 of 100" in text and "▁" in text


def test_neither_a_pipe_nor_a_terminal_gets_control_characters_of_a_file(tmp_path) -> None:
    run = write_run(tmp_path / "run", ended=None)
    evil = "\x1b]0;owned\x07\x1b[2J\x1b[31mred \u202e\n\r\ttxet"
    event = {"event": "failed", "step": 41, "time": "2026-01-01T00:01:00+0000", "reason": evil}
    with (run / "events.jsonl").open("a") as file:
        file.write(json.dumps(event) + "\n")
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 41, "tokens": 41, f"eval/{evil}": 1.0}) + "\n")
    status = status_of(read_run(run))
    console = Console(file=io.StringIO(), width=300, force_terminal=True, color_system=None)
    console.print(panel(status))
    for text in ("\n".join(plain_lines(status)), console.file.getvalue()):
        unprintable = {letter for letter in text if unicodedata.category(letter) in ("Cc", "Cf")}
        assert unprintable == {"\n"} and r"\u001b]0;owned\u0007" in text


def test_a_sparkline_shows_the_curve() -> None:
    assert sparkline([3.0, 2.0, 1.0]) == "█▅▁"
    assert sparkline([1.0, float("nan"), 1.0]) == "▁ ▁" and sparkline([]) == ""
