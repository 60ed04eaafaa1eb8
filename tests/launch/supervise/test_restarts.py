"""When a run is restarted, when it is not, and what is named as the cause."""

import json
import os

import pytest

from launch.supervise.outcome import Outcome
from launch.supervise.restarts import Policy, Restarts
from tests.launching import write_json, write_shards
from zerolm.checkpoint import memory


@pytest.mark.parametrize(
    ("plan", "code", "num_starts", "message"),
    [
        ("crash crash advance done", 0, 4, "rank 3 on node7 (pid 9) ended: SIGKILL, in step 7"),
        ("silent done", 0, 2, "the run logged no `done` event"),
        ("stopped", 75, 1, "stopped on request"),
        ("gave_up", 76, 1, "gave up"),
        ("refuse", 2, 1, "refused"),
        ("crash refuse refuse refuse done", 0, 5, "refused, nothing was written. data: gone"),
        ("crash changed changed changed done", 2, 4, "refused 3 times because values differ"),
        ("crash changed changed early changed done", 0, 6, "settings.seed: 1 -> 2"),
        ("early early early done", 1, 3, "the run has failed 3 times before its first step"),
        ("crash early early early done", 0, 5, "failed before its first step"),
        ("early advance early advance early crash done", 0, 7, "attempt 6 failed"),
    ],
)
def test_the_exit_code_is_that_of_the_run(fake_run, plan, code, num_starts, message) -> None:
    actual, output = fake_run.supervise(plan)
    assert actual == code and fake_run.num_starts() == num_starts and message in output, output


def test_three_failures_of_one_step_end_in_a_diagnosis(fake_run) -> None:
    fake_run.run_dir.mkdir()
    copies = memory.create_directory(fake_run.run_dir, memory.create_token(fake_run.run_dir))
    code, output = fake_run.supervise("advance crash")
    assert code == 1 and fake_run.num_starts() == 4
    assert not copies.exists(), "of the states in memory, for a run that will not resume"
    for expected in (
        "the run has failed 3 times in step 7", "rank 3 on node7",
        "sequences of that step: 48 to 55",
        "RuntimeError: out of something", "the newest checkpoint is from step 10", "try:",
    ):  # fmt: skip
        assert expected in output, output
    events = [json.loads(line) for line in (fake_run.run_dir / "events.jsonl").open()]
    names = [event["event"] for event in events if "attempt" in event]
    assert names == [*["attempt_failed"] * 3, "supervisor_stopped"]


def test_restarts_are_counted_since_the_newest_checkpoint(fake_run) -> None:
    flags = ["--max_restarts", "2", "--same_step_limit", "99"]
    code, output = fake_run.supervise("crash crash advance crash crash crash done", *flags)
    assert code == 1 and fake_run.num_starts() == 5
    assert "2 restarts without a newer checkpoint" in output


def test_a_newer_copy_in_memory_is_progress(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(memory, "SHARED_MEMORY", tmp_path / "shm")
    restarts = Restarts(Policy(max_restarts=1, same_step_limit=99), tmp_path)
    copies = memory.create_directory(tmp_path, memory.create_token(tmp_path))
    for step in (3, 6, 9):
        directory = copies / f"step-{step:08d}"
        directory.mkdir()
        (directory / "MANIFEST-00000.json").write_text("{}")
        assert restarts.add_failure(Outcome(1, step=step + 1)) is None
        assert restarts.pause_seconds() == 0.0
        restarts.count += 1
    assert restarts.shown_checkpoint() == "there is no checkpoint"
    (copies / "step-00000012").mkdir()  # of which no rank has its part
    diagnosis = restarts.add_failure(Outcome(1, step=10))
    assert diagnosis is not None and "1 restarts without a newer checkpoint" in diagnosis


def test_a_run_whose_files_were_changed_ends_with_the_refusal_as_the_reason(tmp_path) -> None:
    restarts = Restarts(Policy(max_restarts=1), tmp_path)
    assert restarts.add_failure(Outcome(1, step=3)) is None
    restarts.count += 1
    assert "refused: correct the problems above" in restarts.add_failure(Outcome(2))


def test_a_restart_reads_the_files_of_the_first_start(fake_run) -> None:
    settings, model = fake_run.directory / "settings.json", fake_run.directory / "model.json"
    settings.write_text('{"seed": 1}')
    model.write_text('{"model_type": "llama"}')
    given = ["--settings", str(settings), "--model_config", str(model)]
    code, output = fake_run.supervise("edit done", launcher=given)
    copies = fake_run.run_dir / "configs"
    added = f"--model_config {copies}/model_config.json --settings {copies}/settings.json"
    assert code == 0 and f"start 1: done {' '.join(given)}" in output, output
    assert added in output and output.count("has changed or cannot be read") == 2
    assert (copies / "settings.json").read_text() == '{"seed": 1}'
    assert model.name not in [path.name for path in fake_run.directory.iterdir()]


def test_a_shard_whose_truncation_killed_a_rank_is_named(fake_run) -> None:
    shards = write_shards(fake_run.directory / "shards", 20)
    fake_run.run_dir.mkdir()
    record = {"settings": {"data": [f"{shards}=1.0"], "val_data": []}}
    write_json(fake_run.run_dir / "run.json", record)
    os.truncate(shards / "shard-00000.bin", 100)
    code, output = fake_run.supervise("sigbus done")
    assert code == 0 and "a rank ended with SIGBUS" in output
    assert f"{shards / 'shard-00000.bin'}: 100 bytes, but the manifest says " in output
    assert "/dev/shm" not in output


def test_a_sigbus_without_a_truncated_shard_names_shared_memory(fake_run) -> None:
    code, output = fake_run.supervise("sigbus done")
    assert code == 0 and "no shard is shorter than its manifest states; /dev/shm" in output
