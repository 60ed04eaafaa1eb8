import json
import os
import signal
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest

from data_prep.tasks.phases import LocalExecutor, Phase, fingerprint, run_phase, valid_records
from zerolm.common.errors import ConfigError, ZerolmError


@dataclass(frozen=True)
class Squares:
    """Writes the square of its number, unless a file `order-N` tells task N to fail."""

    directory: Path

    def __call__(self, task: int) -> dict:
        orders = self.directory / f"order-{task}"
        order = orders.read_text() if orders.exists() else ""
        if order == "refuse":
            raise ConfigError(f"input {task}: is bad.")
        if order == "crash":
            raise AssertionError("a bug")
        if order == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        with open(self.directory / "log", "a") as log:
            log.write(f"{task}\n")
        path = self.directory / f"{task}.txt"
        path.write_text(str(task * task))
        return {"square": task * task, "files": {path.name: path.stat().st_size}}


def phase(directory: Path, num_tasks: int = 5) -> Phase:
    return Phase("squares", directory, num_tasks, Squares(directory), fingerprint({"a": 1}))


def ran(directory: Path) -> list[int]:
    log = directory / "log"
    tasks = [int(line) for line in log.read_text().split()] if log.exists() else []
    log.unlink(missing_ok=True)
    return sorted(tasks)


@pytest.mark.parametrize("num_workers", [1, 2])
def test_only_tasks_without_a_valid_record_are_run_again(tmp_path, num_workers):
    executor = LocalExecutor(num_workers)
    records = run_phase(phase(tmp_path), executor)
    assert [record["square"] for record in records] == [0, 1, 4, 9, 16]
    assert [record["task"] for record in records] == [0, 1, 2, 3, 4]
    assert all(record["seconds"] >= 0 for record in records)
    assert ran(tmp_path) == [0, 1, 2, 3, 4]

    assert run_phase(phase(tmp_path), executor) == records
    assert ran(tmp_path) == []

    phase(tmp_path).path(0).unlink()  # never run
    phase(tmp_path).path(1).write_text("{")  # torn by a power cut
    (tmp_path / "2.txt").write_text("too long")  # a damaged output
    (tmp_path / "3.txt").unlink()  # a missing output
    assert [record is None for record in valid_records(phase(tmp_path))] == [True] * 4 + [False]
    again = run_phase(phase(tmp_path), executor)
    assert ran(tmp_path) == [0, 1, 2, 3]
    assert [record["square"] for record in again] == [0, 1, 4, 9, 16]

    run_phase(replace(phase(tmp_path), inputs=fingerprint({"a": 2})), executor)
    assert ran(tmp_path) == [0, 1, 2, 3, 4]


def test_records_of_other_inputs_are_removed_before_the_executor_runs(tmp_path):
    run_phase(phase(tmp_path), LocalExecutor(1))
    other = replace(phase(tmp_path), inputs=fingerprint({"a": 2}))
    (stale := other.path(4, ".running")).write_text("{}")  # left by a killed task
    found = []

    class Executor(LocalExecutor):
        def run(self, phase, tasks):
            found.extend(task for task in tasks if phase.path(task).exists() or stale.exists())
            super().run(phase, tasks)

    run_phase(other, Executor(1))
    assert found == []


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_refusal_names_its_problem_and_keeps_finished_tasks(tmp_path, num_workers):
    (tmp_path / "order-3").write_text("refuse")
    with pytest.raises(ConfigError, match="input 3: is bad"):
        run_phase(phase(tmp_path), LocalExecutor(num_workers))
    note = json.loads(phase(tmp_path).path(3, ".failed").read_text())
    assert note["refused"] == ["input 3: is bad."]
    done = {
        task for task, record in enumerate(valid_records(phase(tmp_path))) if record is not None
    }
    assert done
    ran(tmp_path)
    (tmp_path / "order-3").unlink()
    run_phase(phase(tmp_path), LocalExecutor(num_workers))
    assert set(ran(tmp_path)) == set(range(5)) - done
    assert not list(phase(tmp_path).records.glob("*.failed"))


def test_a_killed_worker_ends_the_phase_and_a_second_run_resumes(tmp_path):
    (tmp_path / "order-4").write_text("die")
    with pytest.raises(ZerolmError, match="SIGKILL"):
        run_phase(phase(tmp_path), LocalExecutor(2))
    assert phase(tmp_path).path(4, ".running").exists()
    missing = [task for task, record in enumerate(valid_records(phase(tmp_path))) if record is None]
    ran(tmp_path)
    (tmp_path / "order-4").unlink()
    run_phase(phase(tmp_path), LocalExecutor(2))
    assert ran(tmp_path) == missing


def test_tasks_lost_on_another_machine_are_named(tmp_path):
    class Lossy:
        def run(self, phase, tasks):
            for task in set(tasks) - {2}:
                LocalExecutor(1).run(phase, [task])

    labelled = replace(phase(tmp_path), labels=[f"part {n}" for n in range(5)])
    with pytest.raises(ZerolmError, match=r"1 of 5 tasks did not finish: squares 2 \(part 2\)"):
        run_phase(labelled, Lossy())


def test_records_are_reported_in_the_order_of_the_tasks(tmp_path):
    shown: list[int] = []
    run_phase(phase(tmp_path, 12), LocalExecutor(2, partial(_append, shown)))
    assert shown == list(range(12))


def _append(shown, phase, record):
    shown.append(record["task"])


def test_fingerprints_depend_on_values_and_not_on_the_order_of_keys():
    assert fingerprint({"a": 1, "b": Path("x")}) == fingerprint({"b": "x", "a": 1})
    assert fingerprint({"a": 1}) != fingerprint({"a": 2})
