"""Trackers that fail, die or are refused: the failure is reported, and nothing else stops."""

import errno
import fcntl
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import wandb as wandb_package

from tests.launching import free_port
from tests.wandb_reader import own_rows
from tests.zerolm.tracking.tracked_runs import begin, end, publish, unused_run, write_steps
from zerolm.common import child, locks
from zerolm.common.errors import ConfigError, ZerolmError
from zerolm.parts.settings import RunSettings
from zerolm.tracking import mirror as mirror_module
from zerolm.tracking import tracker_processes, wandb, wandb_identity
from zerolm.tracking import wandb_sync as wandb_sync_module
from zerolm.tracking.mirror import Mirror
from zerolm.tracking.run_log import RunLog
from zerolm.tracking.tracker import Tracker, enabled_trackers
from zerolm.tracking.tracker_processes import MAX_FAILURES
from zerolm.tracking.wandb_sync import wandb_sync


@pytest.fixture
def run_dir(tmp_path, monkeypatch) -> Path:
    return unused_run(tmp_path / "first", monkeypatch)


def test_a_failing_tracker_is_an_event_and_does_not_end_the_run(run_dir, capsys) -> None:
    (run_dir / "wandb").write_text("in the way")
    log = begin(run_dir, 0)
    write_steps(log, 1)
    end(log)
    found = own_rows(run_dir, "events.jsonl")
    assert [(one["event"], one["tracker"]) for one in found] == [("tracker_failed", "wandb")] * 2
    assert "cannot start" in found[0]["error"]
    assert f"zerolm wandb-sync {run_dir}" in found[1]["error"]
    assert len(own_rows(run_dir)) == 1
    first, last = capsys.readouterr().out.splitlines()
    assert first.endswith("; training continues")
    assert "may lack rows" in last and "training continues" not in last, "the run has ended"


class Broken(Tracker):
    """A tracker that fails at some events."""

    def __init__(self, run_dir: Path) -> None:
        super().__init__(run_dir)
        self.got: list[object] = []

    def event(self, event: dict[str, object]) -> None:
        if event.get("bad"):
            raise TypeError("unsupported operand")
        self.got.append(event["step"])

    def log(self, row: dict[str, object]) -> None:
        self.got.append(row["step"])

    def finish(self, exit_code: int) -> None:
        self.got.append("end")


def test_an_event_that_fails_is_reported_once_and_the_others_are_sent(run_dir) -> None:
    with open(run_dir / "events.jsonl", "w") as file:
        for bad in (False, True, True, False):
            file.write(json.dumps({"event": "spike", "step": 1, "bad": bad}) + "\n")
    (run_dir / "metrics.jsonl").write_text('{"step": 2, "tokens": 2}\n')
    told: list[dict[str, object]] = []
    tracker = Broken(run_dir)
    mirror = Mirror(run_dir, tracker, lambda **message: told.append(message))
    mirror.feeder.start()
    mirror.end("done")
    assert tracker.got == [2, 1, 1, "end"] and mirror.complete
    (failure,) = [what["failed"] for what in told if "failed" in what]
    assert "skipped event: TypeError" in failure


class Refused(Broken):
    """A tracker whose server refuses."""

    refuses = True

    def open(self) -> None:
        if self.refuses:
            raise ConnectionError("401 Unauthorized")


class Slow(Broken):
    """A tracker that never takes a row."""

    def log(self, row: dict[str, object]) -> None:
        time.sleep(4)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [(Refused, "ConnectionError: 401 Unauthorized"), (Slow, "did not accept them within 2 s")],
)
def test_the_last_line_says_why_rows_are_lacking(run_dir, monkeypatch, kind, reason) -> None:
    monkeypatch.setattr(mirror_module, "CONNECT_SECONDS", 1.0)
    monkeypatch.setattr(mirror_module, "END_SECONDS", 2.0)
    (run_dir / "metrics.jsonl").write_text('{"step": 1, "tokens": 1}\n{"step": 2, "tokens": 2}\n')
    told: list[dict[str, object]] = []
    tracker = kind(run_dir)
    mirror = Mirror(run_dir, tracker, lambda **message: told.append(message))
    mirror.feeder.start()
    mirror.end("done")
    tracker.refuses = False  # so that its thread ends
    assert f"lacks 2 of 2 rows ({reason})" in str(told[-1]["failed"])


def test_a_checkpoint_that_is_removed_while_it_is_referenced_is_no_failure(
    run_dir, monkeypatch
) -> None:
    """The tracker of a short run follows after its end, when checkpoints have been rotated."""
    log = RunLog(run_dir, 0, writes=True)
    publish(run_dir, log, 2)
    tracker, logged = wandb.WandbTracker(run_dir), []
    tracker.run = SimpleNamespace(id="x", log_artifact=lambda *a, **more: logged.append(a))
    add_reference = wandb_package.Artifact.add_reference

    def rotate(self, *arguments, **more):
        shutil.rmtree(run_dir / "checkpoints" / "step-00000002")
        monkeypatch.setattr(wandb_package.Artifact, "add_reference", add_reference)
        return add_reference(self, *arguments, **more)

    monkeypatch.setattr(wandb_package.Artifact, "add_reference", rotate)
    tracker.event({"event": "checkpoint", "step": 2, "checkpoint": "step-00000002"})
    assert logged == []


def test_a_tracker_process_that_keeps_dying_is_given_up_and_the_repair_is_logged(
    run_dir, monkeypatch
) -> None:
    """Offline, each process would write every row again."""
    monkeypatch.setattr(tracker_processes, "FIRST_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(tracker_processes, "POLL_SECONDS", 0.0)
    monkeypatch.setenv("ZEROLM_SUPERVISOR", "somebody-1")
    seen = run_dir / "seen"
    script = (
        "import os, sys; open(sys.argv[1], 'a').write(os.environ.get('ZEROLM_SUPERVISOR', '-'))"
    )
    popen = subprocess.Popen
    monkeypatch.setattr(
        child.subprocess, "Popen",
        lambda words, **more: popen([sys.executable, "-c", script, str(seen)], **more),
    )  # fmt: skip
    log = begin(run_dir, 0)
    trackers = log.trackers
    assert trackers is not None
    deadline = time.monotonic() + 300
    while not seen.exists() or len(seen.read_text()) < MAX_FAILURES:
        assert time.monotonic() < deadline
        trackers.tick()
        time.sleep(0.01)
    for _ in range(100):  # no more of them
        trackers.tick()
        time.sleep(0.01)
    assert seen.read_text() == "-" * MAX_FAILURES, "and none has the supervisor's mark"
    end(log)
    errors = [event["error"] for event in own_rows(run_dir, "events.jsonl")]
    assert len(errors) == MAX_FAILURES + 1
    assert all("zerolm wandb-sync" in error for error in errors[-2:])


def test_messages_of_a_tracker_process_are_received_after_a_rollback(run_dir, monkeypatch) -> None:
    (run_dir / "wandb").write_text("in the way")
    first = begin(run_dir, 0)
    first.close("rollback")
    second = RunLog(run_dir, 0, writes=True)
    second.track(RunSettings(wandb="offline"), before=first.trackers)
    end(second)
    errors = [event["error"] for event in own_rows(run_dir, "events.jsonl")]
    assert sum("may lack rows" in error for error in errors) == 2, "of both"


def test_the_wandb_mode_variable_sets_the_mode_or_disables_the_tracker(monkeypatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    for variable, mode, found in (
        ("disabled", "offline", []), ("dryrun", "offline", ["wandb"]), ("run", "online", ["wandb"]),
        ("offline", "offline", ["wandb"]), ("", "online", ["wandb"]),
    ):  # fmt: skip
        monkeypatch.setenv("WANDB_MODE", variable)
        assert wandb_identity.resolve_mode("auto") == mode
        assert enabled_trackers(RunSettings(wandb="auto")) == found
        assert enabled_trackers(RunSettings(wandb="online")) == ["wandb"]


def without_locks(file: Any, operation: int) -> None:
    assert file.writable(), "NFS locks a file exclusively only if it may be written"
    raise OSError(errno.ENOLCK, "no locks available")


def test_a_directory_that_cannot_be_synced_is_refused_in_one_line(
    tmp_path, run_dir, monkeypatch
) -> None:
    for arguments, words in (
        ({"run_dir": tmp_path}, "run.json: no such file"),
        ({"run_dir": run_dir, "mode": "online"}, "no key is configured"),
        ({"run_dir": run_dir, "same_id": True}, "has no W&B run yet"),
    ):
        with pytest.raises(ConfigError, match=words) as refused:
            wandb_sync(**arguments)
        assert len(refused.value.problems) == 1
    (run_dir / "wandb").mkdir()
    (run_dir / "wandb" / "run.json").write_text('{"id": "first"}')
    with open(run_dir / "wandb" / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # as the tracker of a run that is going on
        with pytest.raises(ConfigError, match="is still running and writes to this W&B run"):
            wandb_sync(run_dir, mode="offline", same_id=True)
    with monkeypatch.context() as patched:
        patched.setattr(locks.fcntl, "flock", without_locks)
        patched.setattr(wandb_sync_module, "_send", lambda *what, **more: "")
        assert wandb_sync(run_dir, mode="offline", same_id=True) == ["first"]
    monkeypatch.setattr(wandb, "INIT_SECONDS", 1)
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{free_port()}")
    with pytest.raises(ZerolmError, match=r"W&B did not accept the data: .*refused"):
        wandb_sync(run_dir, mode="online")
