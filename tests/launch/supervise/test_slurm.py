"""Which jobs return to the queue, by what squeue of Slurm 22.05 printed when they ended."""

import pytest

from launch.supervise import slurm
from tests.launch.supervise.fake_run import fake_slurm

ANSWERS = {  # (of squeue, number of restarts before): is requeued, what is logged
    ("RUNNING 0 None", 0): (True, "job 4711 is requeued"),  # a signal, or too few hosts
    ("RUNNING 2 None", 2): (True, "job 4711 is requeued"),
    ("COMPLETING 0 TimeLimit", 0): (True, "job 4711 is requeued"),
    ("COMPLETING 0 None", 0): (False, "job 4711 is not requeued: it was cancelled (COMPLETING)"),
    ("COMPLETING 2 None", 2): (False, "job 4711 is not requeued: it was cancelled (COMPLETING)"),
    # of Slurm itself: preemption, `scontrol requeue`, a node that is down
    ("COMPLETING 1 None", 0): (False, "Slurm itself has requeued job 4711"),
    ("PENDING 3 BeginTime", 2): (False, "Slurm itself has requeued job 4711"),
    ("RUNNING none", 0): (False, "job 4711 is not requeued: squeue: 'RUNNING none"),
}


@pytest.mark.parametrize(("answer", "before"), ANSWERS)
def test_a_job_is_requeued_that_slurm_has_neither_cancelled_nor_requeued(
    answer, before, tmp_path, monkeypatch
):
    requeued, message = ANSWERS[answer, before]
    environment, called = fake_slurm(tmp_path, f"echo {answer}")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if before:
        monkeypatch.setenv("SLURM_RESTART_COUNT", str(before))
    lines: list[str] = []
    runs_again = slurm.requeue(lines.append)
    assert called.exists() == requeued
    assert runs_again == (requeued or "itself" in message)
    assert lines[0].startswith(message)


def test_a_task_of_an_array_requeues_itself_alone(tmp_path, monkeypatch):
    """The last task has the number of the array."""
    environment, called = fake_slurm(tmp_path, "echo RUNNING 0 None")
    array = {"SLURM_ARRAY_JOB_ID": "4711", "SLURM_ARRAY_TASK_ID": "3"}
    for name, value in (environment | array).items():
        monkeypatch.setenv(name, value)
    assert slurm.requeue(print)
    assert called.read_text() == "requeue 4711_3\n"
    assert "--jobs=4711_3" in (tmp_path / "tools" / "asked").read_text()


def test_without_an_answer_the_command_is_named(tmp_path, monkeypatch):
    environment, called = fake_slurm(
        tmp_path, "echo 'Unable to contact slurm controller' >&2; false"
    )
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    lines: list[str] = []
    assert not slurm.requeue(lines.append) and not called.exists()
    (line,) = lines
    assert "Unable to contact slurm controller" in line
    assert line.endswith("To run it again: scontrol requeue 4711")
    monkeypatch.delenv("SLURM_JOB_ID")
    assert not slurm.requeue(lines.append) and len(lines) == 1, "not in a job"
