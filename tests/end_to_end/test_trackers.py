"""Trackers of a run: their rows after a kill and a resume, and servers that do not work."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.end_to_end.killed_runs import wait_for_step
from tests.end_to_end.recipe import profile, recipe
from tests.endpoints import WandbServer
from tests.launching import (
    ROOT,
    environment,
    events,
    free_port,
    kill_session,
    run_ranks,
    session_members,
    start,
)
from tests.wandb_reader import of_kind, own_rows, wandb_rows, wandb_runs

STEPS, SAVE = 40, 8


def run_flags(
    llama, corpus, held_out, run_dir: Path, json_file: Path, *more: object
) -> list[object]:
    arguments = recipe(llama, corpus, run_dir, json_file, STEPS, micro=2)
    arguments += ["--val_data", held_out, "--eval_tokens", 640, "--eval_interval", SAVE]
    return [*arguments, "--checkpoint_interval", SAVE, *more]


@pytest.mark.soak
def test_wandb_and_tensorboard_equal_the_metrics_of_a_killed_and_resumed_run(
    tmp_path, llama, corpus, held_out
) -> None:
    """The run is killed with its trackers; in the end they have the rows of metrics.jsonl."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run_dir = tmp_path / "run"
    json_file = profile(tmp_path / "ds.json", 2, False)
    more = ["--wandb", "offline", "--tensorboard", "--wandb_tags", "killed"]
    arguments = run_flags(llama, corpus, held_out, run_dir, json_file, *more)
    slow = {"FAULT": "step.begin:*:*:sleep=0.3"}  # so that the run is killed before its end
    process = start(2, tmp_path / "log", *arguments, **slow)
    try:
        wait_for_step(run_dir, SAVE + 3, seconds=180)
    finally:
        kill_session(process.pid)
        process.wait(timeout=30)
    assert wandb_runs(run_dir), "the killed start must have left a file"
    done = run_ranks(2, *arguments)
    assert done.returncode == 0, done.stdout[-4000:]
    assert not session_members(process.pid)

    rows = own_rows(run_dir)
    assert sum("train/loss" in row for row in rows) == STEPS
    assert len(list(run_dir.glob("wandb/offline-run-*/*.wandb"))) == 2, "one file for each start"
    ((_, records),) = wandb_runs(run_dir).items()
    assert wandb_rows(records) == rows
    print(f"{len(rows)} rows of metrics.jsonl and of W&B's file, after a SIGKILL and a resume")
    run = of_kind(records, "run")[-1]
    assert list(run.tags) == ["killed"]
    config = {item.key for item in run.config.update}
    assert {"settings", "ds_config", "model_config", "versions", "git_commit"} <= config
    artifacts = [one for one in of_kind(records, "artifact") if one.type == "checkpoint"]
    aliases = {alias for one in artifacts for alias in one.aliases}
    assert {f"step-{step:08d}" for step in range(3 * SAVE, STEPS + 1, SAVE)} <= aliases
    assert not any(entry.local_path for one in artifacts for entry in one.manifest.contents)
    assert any("restarted" in alert.title for alert in of_kind(records, "alert"))

    with WandbServer() as server:
        sync = ["wandb", "sync", "--yes", str(run_dir / "wandb")]
        sent = subprocess.run(
            [sys.executable, "-m", *sync], env=environment(**server.environment()),
            cwd=tmp_path,
            capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert sent.returncode == 0 and "ERROR" not in sent.stderr, sent.stderr
        keys = {"_step", "_timestamp", "_runtime"}
        arrived = [{key: row[key] for key in row if key not in keys} for row in server.history]
        print(f"{len(arrived)} rows that `wandb sync` has sent")
        assert arrived == rows, "W&B's own tool must send each row once"

    accumulator = EventAccumulator(str(run_dir / "tensorboard"), {"scalars": 0})
    accumulator.Reload()
    for key in ("train/loss", "eval/loss", "throughput/step_seconds"):
        drawn = [(event.step, event.value) for event in accumulator.Scalars(key)]
        assert drawn == [(row["tokens"], pytest.approx(row[key])) for row in rows if key in row], (
            key
        )


@pytest.mark.soak
@pytest.mark.parametrize("mode", ["refuse", "hang", "500"])
def test_a_run_completes_without_wandb_and_can_be_sent_later(
    tmp_path, llama, corpus, held_out, mode
) -> None:
    run_dir = tmp_path / "run"
    json_file = profile(tmp_path / "ds.json", 2, False)
    arguments = run_flags(llama, corpus, held_out, run_dir, json_file, "--wandb", "online")
    key = "1234567890" * 4
    with WandbServer(mode) as server:
        wandb = {**server.environment(), "WANDB_API_KEY": key}
        if mode == "refuse":
            wandb["WANDB_BASE_URL"] = f"http://127.0.0.1:{free_port()}"
        start_time = time.monotonic()
        done = run_ranks(1, *arguments, **wandb)
        print(f"{mode}: exit code {done.returncode} after {time.monotonic() - start_time:.1f} s")
    assert done.returncode == 0, done.stdout[-4000:]
    rows = own_rows(run_dir)
    assert sum("train/loss" in row for row in rows) == STEPS
    failed = [event for event in events(run_dir) if event["event"] == "tracker_failed"]
    assert failed and {event["tracker"] for event in failed} == {"wandb"}
    (line,) = [line for line in done.stdout.splitlines() if "wandb: lacks" in line]
    assert f"{len(rows)} of {len(rows)} rows" in line
    repair = f"zerolm wandb-sync {run_dir}"
    assert repair in line

    command = [sys.executable, "-m", *repair.split(), "--mode", "offline"]
    sent = subprocess.run(
        command, env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert sent.returncode == 0, sent.stderr
    ((run_id, records),) = wandb_runs(run_dir).items()
    assert run_id in sent.stdout and wandb_rows(records) == rows
    assert len(of_kind(records, "artifact")) >= 1
    for path in run_dir.rglob("*"):
        assert not path.is_file() or key.encode() not in path.read_bytes(), path
    assert key not in done.stdout and json.dumps(key) not in sent.stdout
