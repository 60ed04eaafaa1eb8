"""Chosen steps are recorded in a trace that Perfetto opens; no failure ends the run."""

import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import torch

from zerolm.train.profiling import StepProfiler

Events = list[tuple[str, int, dict[str, Any]]]


def profiled(run_dir: Path, steps: tuple[int, int], numbers: range) -> tuple[Events, list[str]]:
    """Run steps of one matrix product each; return the events and the printed lines."""
    events, printed = Events(), list[str]()
    log = SimpleNamespace(event=lambda name, step, **fields: events.append((name, step, fields)))
    journal: Any = SimpleNamespace(log=log, print_rank0=printed.append)
    profiler = StepProfiler(steps, run_dir, torch.device("cpu"), journal)
    for number in numbers:
        with profiler.step(number):
            torch.ones(8, 8) @ torch.ones(8, 8)
        torch.ones(8) + torch.ones(8)  # an evaluation
    return events, printed


def test_each_chosen_step_has_a_trace_with_its_operators(tmp_path) -> None:
    log, printed = profiled(tmp_path, (2, 3), range(1, 6))
    directory = tmp_path / "profile"
    assert [(name, step) for name, step, _ in log] == [("profile", 2), ("profile", 3)]
    for (_, step, fields), line in zip(log, printed, strict=True):
        content = json.loads(gzip.decompress((directory / fields["trace"]).read_bytes()))
        names = [event.get("name", "") for event in content["traceEvents"]]
        assert f"step {step}" in names and names.count("aten::mm") == 1
        assert "aten::add" not in names
        assert line == f"step={step} profile={directory / fields['trace']}"
    tables = sorted(directory.glob("*.operators.txt"))
    assert len(tables) == 2 and "aten::mm" in tables[0].read_text()
    assert len(list(directory.iterdir())) == 4


def test_a_run_past_the_steps_says_so_and_records_nothing(tmp_path) -> None:
    log, printed = profiled(tmp_path, (2, 3), range(7, 9))
    assert not log and printed == [
        "note: --profile 2:3: the run is past these steps; none is profiled"
    ]
    assert not (tmp_path / "profile").exists()


def test_a_profile_that_cannot_be_written_is_logged(tmp_path, capsys) -> None:
    (tmp_path / "profile").write_text("in the way")
    [(name, _, fields)], _ = profiled(tmp_path, (1, 1), range(1, 4))
    assert name == "profile_failed" and "File exists" in fields["error"]
    assert "rank 0: cannot write the profile" in capsys.readouterr().err


def test_memory_is_recorded_with_the_stacks_of_python_only(tmp_path, monkeypatch) -> None:
    calls = []
    memory = torch.cuda.memory
    monkeypatch.setattr(memory, "_record_memory_history", lambda **given: calls.append(given))
    monkeypatch.setattr(memory, "_dump_snapshot", lambda path: None)
    journal: Any = SimpleNamespace(log=SimpleNamespace(event=Mock()), print_rank0=Mock())
    with StepProfiler((1, 1), tmp_path, torch.device("cuda"), journal).step(1):
        pass
    assert calls[0]["stacks"] == "python"
