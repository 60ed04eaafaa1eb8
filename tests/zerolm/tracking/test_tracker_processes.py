"""Trackers that follow a run directory, with real processes and real offline files."""

import fcntl
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.endpoints import WandbServer
from tests.launching import environment
from tests.wandb_reader import of_kind, own_rows, wandb_rows, wandb_runs
from tests.zerolm.tracking.tracked_runs import (
    begin,
    end,
    kill,
    offline_runs,
    publish,
    sample,
    unused_run,
    wait_for,
    wait_for_start,
    write_steps,
)
from zerolm.run_dir import events
from zerolm.tracking import run_log, tensorboard, wandb
from zerolm.tracking.wandb_sync import wandb_sync


@pytest.fixture
def run_dir(tmp_path, monkeypatch) -> Path:
    return unused_run(tmp_path / "first", monkeypatch)


def test_wandb_and_tensorboard_have_each_row_once_after_kills_and_a_resume(run_dir, capsys) -> None:
    """Rows, checkpoints, samples and alerts equal the run's files, whichever process was killed."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = begin(run_dir, 0, tensorboard=True)
    write_steps(log, 1, 2)
    publish(run_dir, log, 2)
    sample(run_dir, 2)
    write_steps(log, 3, 4)
    log.event("spike", 4, reason="too high", loss=9.0, grad_norm=1.0)
    kill(log, run_dir, "wandb/offline-run-*/*.wandb")
    earlier = offline_runs(run_dir)
    log = begin(run_dir, 2, tensorboard=True)
    log.event("resume", 2, checkpoint="step-00000002")
    write_steps(log, 3, 4, 5)
    log.metrics({"step": 5, "tokens": 50, "eval/loss": 2.5})
    sample(run_dir, 5)
    wait_for_start(run_dir, earlier)
    end(log, "stopped")
    earlier = offline_runs(run_dir)
    log = begin(run_dir, 5, tensorboard=True)
    write_steps(log, 6)
    wait_for_start(run_dir, earlier)
    end(log)
    left = offline_runs(run_dir)
    assert len(earlier) == 2 and left & earlier == {max(earlier)} and len(left) == 2
    rows = own_rows(run_dir)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 5, 6]
    ((run_id, records),) = wandb_runs(run_dir).items()
    assert run_id == json.loads((run_dir / "wandb" / "run.json").read_text())["id"]
    assert wandb_rows(records) == rows

    (text,) = {alert.text for alert in of_kind(records, "alert") if "restarted" in alert.title}
    assert "step-00000002" in text
    assert [alert.level for alert in of_kind(records, "alert") if "spike" in alert.title] == [
        "WARN"
    ]
    checkpoints = [one for one in of_kind(records, "artifact") if one.type == "checkpoint"]
    (checkpoint,) = checkpoints[-1:]
    assert json.loads(checkpoint.metadata)["tokens"] == 20
    assert all(one.ref.startswith("file://") and not one.local_path
               for one in checkpoint.manifest.contents)  # fmt: skip
    tables = list(run_dir.glob("wandb/offline-run-*/files/media/table/samples*.json"))
    texts = [json.loads(path.read_text())["data"] for path in sorted(tables)]
    assert [[row[0] for row in each] for each in texts[-2:]] == [[2], [5]], "growing"

    run = of_kind(records, "run")[0]
    assert (run.project, run.run_group, list(run.tags)) == ("mine", "first", ["tiny", "fast"])
    assert "git_commit" in {item.key for item in run.config.update}
    metric = of_kind(records, "metric")
    assert any(one.glob_name == "*" and one.step_metric == "tokens" for one in metric)

    accumulator = EventAccumulator(str(run_dir / "tensorboard"), {"scalars": 0})
    accumulator.Reload()
    for key in ("train/loss", "seconds", "eval/loss"):
        drawn = [(event.step, event.value) for event in accumulator.Scalars(key)]
        expected = [(row["tokens"], pytest.approx(row[key])) for row in rows if key in row]
        assert drawn == expected, key
    output = capsys.readouterr().out
    assert "wandb: offline in" in output and "tensorboard --logdir" in output


def test_the_tracker_of_a_killed_run_sends_why_it_ended(run_dir) -> None:
    """Events that others log after the kill are sent, and no row is missing."""
    script = (
        "import sys, time; from pathlib import Path; from zerolm.config.settings import Settings\n"
        "from zerolm.tracking.run_log import RunLog\n"
        "log = RunLog(Path(sys.argv[1]), 0, writes=True)\n"
        "log.track(Settings(wandb='offline'))\n"
        "log.metrics({'step': 1, 'tokens': 10}); print('ready', flush=True); time.sleep(600)"
    )
    rank = subprocess.Popen(
        [sys.executable, "-c", script, str(run_dir)], env=environment(), stdout=subprocess.PIPE
    )
    assert rank.stdout is not None and rank.stdout.readline()
    wait_for(lambda: list(run_dir.glob("wandb/offline-run-*/*.wandb")))
    rank.kill()
    rank.wait()
    events.append_event(run_dir, "rank_lost", 1, ended="signal 9")
    with open(run_dir / "wandb" / "lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until it has ended
    ((_, records),) = wandb_runs(run_dir).items()
    (alert,) = of_kind(records, "alert")
    assert (alert.level, "signal 9" in alert.text) == ("ERROR", True)
    assert of_kind(records, "exit")[0].exit_code == 1 and wandb_rows(records) == own_rows(run_dir)


@pytest.mark.soak
def test_a_rollback_starts_another_wandb_run_with_the_complete_curve(run_dir) -> None:
    """The earlier W&B run keeps the rolled-back rows; a restart resumes the new one."""
    log = begin(run_dir, 0, tensorboard=True)
    write_steps(log, 1, 2, 3)
    entry = {"number": 1, "from_step": 3, "to_step": 1, "reason": "too high"}
    log.event("rollback", 3, **entry)
    wait_for_start(run_dir, set())
    log.close("rollback")
    applied = {**entry, "skipped_windows": [[8, 24]], "skipped_steps": 0, "spikes": 1}
    (run_dir / "rollbacks.json").write_text(json.dumps({"rollbacks": [applied]}))
    run_log.archive(run_dir, 1, 1)
    for steps in ((2, 3), (4,)):
        earlier = offline_runs(run_dir)
        log = begin(run_dir, steps[0] - 1, tensorboard=True)
        log.event("resume", steps[0] - 1, checkpoint="step-00000001")
        write_steps(log, *steps)
        wait_for_start(run_dir, earlier)
        end(log)
    first, second = wandb_runs(run_dir).values()
    assert wandb_rows(second) == own_rows(run_dir)
    aside = own_rows(run_dir, "metrics-rolled-back-0001.jsonl")
    assert wandb_rows(first) == own_rows(run_dir)[:1] + aside
    names = [of_kind(records, "run")[0].display_name for records in (first, second)]
    assert names == ["first", "first-rollback-1"]
    assert {of_kind(records, "run")[0].run_group for records in (first, second)} == {"first"}
    (alert,) = [one for one in of_kind(second, "alert") if "rolled back" in one.title]
    assert "too high" in alert.text and not of_kind(first, "alert")
    assert list((run_dir / "tensorboard" / "rolled-back-0001").glob("events.*"))

    before = set(wandb_runs(run_dir))
    ids = wandb_sync(run_dir, mode="offline", project="other", entity="team", log=lambda line: None)
    made = wandb_runs(run_dir)
    assert set(made) - before == set(ids) and len(ids) == 2
    assert wandb_rows(made[ids[0]]) == own_rows(run_dir)
    assert wandb_rows(made[ids[1]]) == aside
    run = of_kind(made[ids[0]], "run")[0]
    assert (run.project, run.entity) == ("other", "team")


@pytest.mark.soak
def test_wandb_online_has_each_row_once_although_some_were_lost(run_dir, monkeypatch) -> None:
    """Killed before its server has received all rows; then resumed; then on another machine."""
    with WandbServer() as server:
        for key, value in server.environment().items():
            monkeypatch.setenv(key, value)
        monkeypatch.setenv("WANDB__FILE_STREAM_TRANSMIT_INTERVAL", "0.2")  # else it takes its time
        log = begin(run_dir, 0, mode="online")
        write_steps(log, 1, 2, 3)
        wait_for(lambda: len(server.history) == 3)
        server.mode = "500"
        write_steps(log, 4, 5)
        kill(log, run_dir, "wandb/run-*/*.wandb")
        server.mode = "ok"
        log = begin(run_dir, 2, mode="online")
        write_steps(log, 3, 4, 5, 6)
        end(log)
        assert [row["step"] for row in server.history] == [1, 2, 3, 4, 5, 6]
        for path in run_dir.glob("wandb/run-*"):
            shutil.rmtree(path)
        log = begin(run_dir, 4, mode="online")
        write_steps(log, 5, 6, 7)
        end(log)
        assert [row["step"] for row in server.history] == [1, 2, 3, 4, 5, 6, 7]
        rows = own_rows(run_dir)
        for key in ("step", "tokens", "train/loss"):
            assert [row[key] for row in server.history] == [row[key] for row in rows]


def test_tensorboard_continues_after_its_last_row_and_rewrites_changed_rows(run_dir):
    def row(step: int, loss: float = 1 / 3) -> dict[str, Any]:
        return {"step": step, "tokens": 10 * step, "train/loss": loss / step, "null": None}

    def write(name: str, *rows: dict[str, Any]) -> None:
        (run_dir / name).write_text("".join(json.dumps(each) + "\n" for each in rows))

    def missing_steps() -> list[int]:
        target = tensorboard.TensorboardTracker(run_dir)
        target.open()
        found = [each["step"] for each in own_rows(run_dir) if target.lacks(each)]
        target.finish(0)
        return found

    aside = run_dir / "tensorboard" / "rolled-back-0001"
    half = aside.with_name(".rolled-back-0001.tmp")  # as a killed process leaves it
    half.mkdir(parents=True)
    (half / "events.out.tfevents.1.half").write_bytes(b"half")
    write("metrics-rolled-back-0001.jsonl", row(3), row(4))
    write("metrics.jsonl", row(1), row(2))
    target = tensorboard.TensorboardTracker(run_dir)
    target.open()
    for each in own_rows(run_dir):
        target.log(each)
    target.finish(0)
    assert not half.exists() and len(tensorboard.read_back(aside)[0]) == 2
    write("metrics.jsonl", row(1), row(2), row(3))
    assert missing_steps() == [3]
    write("metrics.jsonl", row(1))
    assert missing_steps() == [], "rows that are gone are purged"
    write("metrics.jsonl", row(1, loss=2.0), row(2))
    assert missing_steps() == [1, 2], "from the first difference on"


@pytest.mark.parametrize("jump_seconds", [3600, -3600])
def test_a_jump_of_the_clock_neither_blocks_tensorboard_nor_reorders_its_files(
    run_dir, monkeypatch, jump_seconds
):
    row = {"step": 1, "tokens": 10, "train/loss": 1.0}
    path = run_dir / "metrics.jsonl"
    now = time.time
    for step, jump in enumerate((0, jump_seconds, 0), start=1):
        monkeypatch.setattr(time, "time", lambda jump=jump: now() + jump)
        with open(path, "a") as file:
            file.write(json.dumps({**row, "step": step, "tokens": 10 * step}) + "\n")
        target = tensorboard.TensorboardTracker(run_dir)
        target.open()  # would wait for an hour, longer than a test may take
        for each in own_rows(run_dir):
            if target.lacks(each):
                target.log(each)
        target.finish(0)
    rows, _ = tensorboard.read_back(run_dir / "tensorboard")
    assert [tokens for tokens, _ in rows] == [10, 20, 30]


def test_the_newest_number_on_the_server_shows_its_rows_on_any_machine(run_dir, monkeypatch):
    """A restored directory has no W&B files, but rows and samples are still sent only once."""
    sent: dict[int, dict[str, Any]] = {}
    tables: list[Any] = []

    class Run:
        starting_step = 0

        def log(self, row: dict[str, Any], step: int, commit: bool) -> None:
            assert step > max(sent, default=-1), "W&B would not take it"
            sent[step] = row
            if "samples" in row:
                tables.append(list(row["samples"].data))

    def begin_again(first: int, rows: Sequence[int], samples: Sequence[int]) -> None:
        target = wandb.WandbTracker(run_dir)
        target.run, target._first = Run(), first
        keys = {"prompt_number": 0, "top_k": 0}
        for step in samples:  # what is odd in a column ends nothing
            seed = 1 if step % 4 else "none"
            target.samples([{"step": step, "tokens": 10 * step, "seed": seed, **keys}])
        for step in rows:
            row = {"step": step, "tokens": 10 * step, "train/loss": 1.0}
            for more in ({}, {"eval/loss": 2.0}) if step in samples else ({},):
                if target.lacks({**row, **more}):
                    target.log({**row, **more})
        target._log_samples()

    begin_again(0, [1, 2, 3, 4, 5], [2, 4])
    assert sorted(sent) == [100, 200, 201, 299, 300, 400, 401, 499, 500]
    begin_again(501, [1, 2, 3, 4, 5, 6, 7], [2, 4, 6])  # the run was killed in step 5
    assert sorted(sent)[-4:] == [600, 601, 699, 700]
    begin_again(600, [], [])
    assert [[row[0] for row in table] for table in tables] == [[2], [2, 4], [6]], "none twice"
