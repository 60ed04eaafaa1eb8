"""Reading a run directory, complete or damaged: problems are listed."""

import json
import os
import time

import pytest

from tests.zerolm.report.run_directories import (
    loss_of,
    metrics,
    write_heartbeats,
    write_lines,
    write_run,
)
from zerolm.common import processes
from zerolm.common.errors import ConfigError
from zerolm.report import run_history
from zerolm.run_dir.files import RunFiles


def test_a_written_run_is_read_back(tmp_path) -> None:
    run = run_history.read_run(write_run(tmp_path / "run"))
    lines, values = run.curves.columns["train/loss"]
    assert [run.curves.steps[line] for line in lines] == list(range(1, 41))
    assert list(values) == [loss_of(step) * (10 if step == 30 else 1) for step in range(1, 41)]
    assert run.curves.rows(1000) == metrics(40, spike=30)
    thinned = run.curves.rows(11)
    assert [row for row in thinned if "eval/loss" in row] == metrics(40, spike=30)[10::11]
    assert len(thinned) <= 11 + 4
    assert run.curves.seconds[-1] == pytest.approx(20.0), "40 steps of half a second"
    assert run.curves.place(25) == (25_000, 12.5)
    assert (run.step, run.total_steps, run.total_tokens) == (40, 100, 100_000)
    assert run.state() == ("done", "") and run.problems == []


def test_damaged_lines_are_skipped_and_listed(tmp_path) -> None:
    directory = write_run(tmp_path / "run", ended=None)
    path = directory / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    lines[4] = b'{"step": 5, "tokens": \xff\xfe}\n'
    lines[6] = b"[1, 2]\n"
    lines[8] = b'{"step": "nine", "tokens": 9000}\n'
    path.write_bytes(b"".join(lines) + b'{"step": 41, "tok')
    (directory / "run.json").write_text('{"settings": ')
    (directory / "events.jsonl").write_text('{"event": "start", "step": 0}\n{"event": "sp')
    (directory / "metrics-rolled-back-0001.jsonl").write_text("\n\nnonsense\n")
    run = run_history.read_run(directory)
    assert run.step == 40, "half a last line is no damage"
    assert run.curves.rows(1000)[4]["step"] == 6
    assert [problem.partition(": ")[0] for problem in run.problems] == [
        "run.json", "metrics.jsonl", "metrics-rolled-back-0001.jsonl"
    ]  # fmt: skip
    assert "3 lines cannot be read: 5, 7, 9" in run.problems[1]
    assert run.total_tokens is None and run.seconds_left() is None


def test_of_repeated_steps_the_last_line_counts(tmp_path) -> None:
    directory = write_run(tmp_path / "run")
    again = [{"step": 31, "tokens": 31_000, "train/loss": 1.5, "throughput/step_seconds": 0.5}]
    rows = metrics(40, spike=30)
    write_lines(directory / "metrics.jsonl", rows + again)
    run = run_history.read_run(directory)
    assert run.step == 31 and run.curves.last("train/loss") == 1.5
    assert run.curves.seconds[-1] == pytest.approx(15.5)


@pytest.mark.parametrize(
    ("ended", "age", "state"),
    [
        ("done", None, "done"),
        ("gave_up", 1, "gave up"),
        ("rank_lost", 1, "failed"),
        (None, 1, "running"),
        (None, 500, "silent"),
        (None, None, "silent"),
    ],
)
def test_the_state_is_taken_from_the_last_start(tmp_path, ended, age, state) -> None:
    directory = write_run(tmp_path / "run", ended=ended)
    if age is not None:
        write_heartbeats(directory, age=age)
    assert run_history.read_run(directory).state()[0] == state


@pytest.mark.parametrize(("age", "state"), [(2, "running"), (500, "silent")])
def test_a_clock_that_was_set_back_does_not_hide_that_a_run_is_silent(tmp_path, age, state) -> None:
    directory = write_run(tmp_path / "run", ended=None)
    write_heartbeats(directory, age=-3600)
    for path in RunFiles(directory).heartbeats():
        beat = json.loads(path.read_text())
        beat |= {"machine": processes.machine_id(), "monotonic": time.monotonic() - age}
        path.write_text(json.dumps(beat))
        os.utime(path, (time.time() + 3600,) * 2)
    assert run_history.read_run(directory).state()[0] == state


def test_a_value_that_is_not_finite_is_a_gap(tmp_path) -> None:
    rows = [{"step": 1, "tokens": 1, "train/loss": None}, {"step": 2, "tokens": 2}]
    write_lines(tmp_path / "metrics.jsonl", rows, after='{"step":3,"tokens":3,"train/loss":NaN}\n')
    run = run_history.read_run(tmp_path)
    assert len(run.curves.columns["train/loss"][1]) == 2 and run.curves.last("train/loss") is None
    assert json.loads(json.dumps(run.curves.rows(9)))[2]["train/loss"] is None


def test_every_directory_that_is_not_a_run_is_named(tmp_path) -> None:
    with pytest.raises(ConfigError) as refusal:
        run_history.read_runs([tmp_path / "a", write_run(tmp_path / "run"), tmp_path / "b"])
    assert len(refusal.value.problems) == 2
    (tmp_path / "sweep.json").write_text("{}")  # of `runs/*`
    (run,) = run_history.read_runs([tmp_path / "sweep.json", tmp_path / "run"])
    assert run.run_dir == tmp_path / "run"
    with pytest.raises(ConfigError, match=r"run\.json"):
        run_history.read_runs([tmp_path / "run", tmp_path / "run" / "run.json"])


def test_a_start_that_has_written_heartbeats_only_is_running(tmp_path):
    """So it is while DeepSpeed compiles an operator, for minutes."""
    with pytest.raises(ConfigError, match=r"has no run\.json"):
        run_history.read_run(tmp_path)
    write_heartbeats(tmp_path)
    run = run_history.read_run(tmp_path)
    assert run.state()[0] == "running" and not run.problems
