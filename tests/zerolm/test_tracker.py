"""Trackers that follow a run directory: real children, real offline files."""

import errno
import fcntl
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.endpoints import WandbServer
from tests.launching import environment, free_port
from tests.wandb_reader import of_kind, own_rows, wandb_rows, wandb_runs
from zerolm import events, metrics, tensorboard_tracker, tracker, wandb_tracker
from zerolm import wandb_sync as wandb_sync_module
from zerolm.errors import ConfigError, ZerolmError
from zerolm.metrics import RunLog
from zerolm.mirror import Mirror
from zerolm.wandb_sync import wandb_sync


@pytest.fixture
def run_dir(tmp_path, monkeypatch) -> Path:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    path = tmp_path / "first"
    (path / "checkpoints").mkdir(parents=True)
    settings = {"wandb": "offline", "wandb_project": "mine", "wandb_tags": "tiny, fast"}
    record = {"settings": settings, "git_commit": "abc123", "versions": {"torch": "2"}}
    (path / "run.json").write_text(json.dumps(record))
    return path


def begin(run_dir: Path, step: int, tensorboard: bool = False, mode: str = "offline") -> RunLog:
    record = json.loads((run_dir / "run.json").read_text())
    record["settings"]["wandb"] = mode
    (run_dir / "run.json").write_text(json.dumps(record))
    log = RunLog(run_dir, step, writes=True)
    log.track(SimpleNamespace(wandb=mode, tensorboard=tensorboard))
    return log


def write_steps(log: RunLog, *steps: int) -> None:
    """Write rows whose times differ from those of the same step before, as those of a run do."""
    for step in steps:
        row = {"step": step, "tokens": 10 * step, "train/loss": 1 / 3 / step, "null": None}
        log.metrics({**row, "seconds": time.perf_counter()})


def publish(run_dir: Path, log: RunLog, step: int) -> None:
    name = f"step-{step:08d}"
    directory = run_dir / "checkpoints" / name
    directory.mkdir()
    manifest = {"digest": "d" * 64, "progress": {"step": step, "tokens": 10 * step}}
    (directory / "MANIFEST.json").write_text(json.dumps(manifest))
    (directory / "weights.pt").write_bytes(b"w" * 1000)
    (run_dir / "checkpoints" / "latest").write_text(name + "\n")
    log.event("checkpoint", step, checkpoint=name)


def sample(run_dir: Path, step: int) -> None:
    row = {"step": step, "tokens": 10 * step, "prompt_number": 0, "prompt": "One", "text": " two"}
    with open(run_dir / "samples.jsonl", "a") as file:
        file.write(json.dumps({**row, "seed": 1, "temperature": 1.0, "top_k": 0}) + "\n")


def end(log: RunLog, how: str = "done") -> None:
    log.close(how)
    log.finish_trackers()


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def wait_for_starts(run_dir: Path, number: int) -> None:
    """Wait until so many W&B trackers have begun: at its end a run gives such as have not seconds,

    which a loaded machine takes for its imports.
    """
    wait_for(lambda: len(list(run_dir.glob("wandb/offline-run-*/*.wandb"))) >= number)


def kill(log: RunLog, run_dir: Path, name: str) -> None:
    """Kill the children once one of them is at work, as a lost host would."""
    wait_for(lambda: list(run_dir.glob(name)))
    time.sleep(1.5)
    for child in log.trackers._children:
        child.process.kill()
        child.process.wait()
    log.close()


def test_wandb_and_tensorboard_have_each_row_once_over_kills_and_a_resume(run_dir, capsys) -> None:
    """Rows, checkpoints, samples and alerts; whoever was killed, at the values of metrics.jsonl."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = begin(run_dir, 0, tensorboard=True)
    write_steps(log, 1, 2)
    publish(run_dir, log, 2)
    sample(run_dir, 2)
    write_steps(log, 3, 4)
    log.event("spike", 4, reason="too high", loss=9.0, grad_norm=1.0)
    kill(log, run_dir, "wandb/offline-run-*/*.wandb")
    log = begin(run_dir, 2, tensorboard=True)
    log.event("resume", 2, checkpoint="step-00000002")
    write_steps(log, 3, 4, 5)
    log.metrics({"step": 5, "tokens": 50, "eval/loss": 2.5})
    sample(run_dir, 5)
    wait_for_starts(run_dir, 2)
    end(log, "stopped")
    log = begin(run_dir, 5, tensorboard=True)
    write_steps(log, 6)
    wait_for_starts(run_dir, 3)
    end(log)
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
        wanted = [(row["tokens"], pytest.approx(row[key])) for row in rows if key in row]
        assert drawn == wanted, key
    output = capsys.readouterr().out
    assert "wandb: offline in" in output and "tensorboard --logdir" in output


def test_a_killed_rank_leaves_a_tracker_that_tells_why(run_dir) -> None:
    """What others write down then is told, and no row is lacking."""
    script = (
        "import sys, time; from pathlib import Path; from types import SimpleNamespace as N\n"
        "from zerolm.metrics import RunLog\n"
        "log = RunLog(Path(sys.argv[1]), 0, writes=True)\n"
        "log.track(N(wandb='offline', tensorboard=False))\n"
        "log.metrics({'step': 1, 'tokens': 10}); print('ready', flush=True); time.sleep(600)"
    )
    rank = subprocess.Popen(
        [sys.executable, "-c", script, str(run_dir)], env=environment(), stdout=subprocess.PIPE
    )
    assert rank.stdout is not None and rank.stdout.readline()
    wait_for(lambda: list(run_dir.glob("wandb/offline-run-*/*.wandb")))
    rank.kill()
    rank.wait()
    events.append(run_dir, "rank_lost", 1, ended="signal 9")
    with open(run_dir / "wandb" / "lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until it has ended
    ((_, records),) = wandb_runs(run_dir).items()
    (alert,) = of_kind(records, "alert")
    assert (alert.level, "signal 9" in alert.text) == ("ERROR", True)
    assert of_kind(records, "exit")[0].exit_code == 1 and wandb_rows(records) == own_rows(run_dir)


def test_a_rollback_begins_another_wandb_run_which_has_the_whole_curve(run_dir) -> None:
    """The one before keeps what was gone back over; a restart goes on with the new one."""
    log = begin(run_dir, 0, tensorboard=True)
    write_steps(log, 1, 2, 3)
    entry = {"number": 1, "from_step": 3, "to_step": 1, "reason": "too high"}
    log.event("rollback", 3, **entry)
    wait_for_starts(run_dir, 1)
    log.close("rollback")
    (run_dir / "rollbacks.json").write_text(json.dumps({"rollbacks": [entry]}))
    metrics.archive(run_dir, 1, 1)
    for steps in ((2, 3), (4,)):
        log = begin(run_dir, steps[0] - 1, tensorboard=True)
        log.event("resume", steps[0] - 1, checkpoint="step-00000001")
        write_steps(log, *steps)
        wait_for_starts(run_dir, steps[-1] - 1)
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
    ids = wandb_sync(run_dir, mode="offline", project="other", entity="team", say=lambda line: None)
    made = wandb_runs(run_dir)
    assert set(made) - before == set(ids) and len(ids) == 2
    assert wandb_rows(made[ids[0]]) == own_rows(run_dir)
    assert wandb_rows(made[ids[1]]) == aside
    run = of_kind(made[ids[0]], "run")[0]
    assert (run.project, run.entity) == ("other", "team")


@pytest.mark.soak
def test_wandb_online_has_each_row_once_although_some_never_arrived(run_dir, monkeypatch) -> None:
    """Killed with rows that its server has not got; then resumed; then from another machine."""
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


def test_a_tracker_that_fails_is_an_event_and_not_the_end(run_dir, capsys) -> None:
    (run_dir / "wandb").write_text("in the way")
    log = begin(run_dir, 0)
    write_steps(log, 1)
    end(log)
    found = own_rows(run_dir, "events.jsonl")
    assert [(one["event"], one["tracker"]) for one in found] == [("tracker_failed", "wandb")] * 2
    assert "cannot start" in found[0]["error"]
    assert f"python -m zerolm wandb-sync {run_dir}" in found[1]["error"]
    assert len(own_rows(run_dir)) == 1 and "training goes on" in capsys.readouterr().out


def test_tensorboard_goes_on_after_the_rows_it_has_and_mends_what_was_written_in_part(run_dir):
    def row(step: int, loss: float = 1 / 3) -> dict[str, Any]:
        return {"step": step, "tokens": 10 * step, "train/loss": loss / step, "null": None}

    def write(name: str, *rows: dict[str, Any]) -> None:
        (run_dir / name).write_text("".join(json.dumps(each) + "\n" for each in rows))

    def wanted() -> list[int]:
        target = tensorboard_tracker.TensorboardTracker(run_dir)
        target.open()
        found = [each["step"] for each in own_rows(run_dir) if target.wants(each)]
        target.finish(0)
        return found

    aside = run_dir / "tensorboard" / "rolled-back-0001"
    half = aside.with_name(".rolled-back-0001.tmp")  # as a killed process leaves it
    half.mkdir(parents=True)
    (half / "events.out.tfevents.1.half").write_bytes(b"half")
    write("metrics-rolled-back-0001.jsonl", row(3), row(4))
    write("metrics.jsonl", row(1), row(2))
    target = tensorboard_tracker.TensorboardTracker(run_dir)
    target.open()
    for each in own_rows(run_dir):
        target.log(each)
    target.finish(0)
    assert not half.exists() and len(tensorboard_tracker.read_back(aside)[0]) == 2
    write("metrics.jsonl", row(1), row(2), row(3))
    assert wanted() == [3]
    write("metrics.jsonl", row(1))
    assert wanted() == [], "what is gone is taken back"
    write("metrics.jsonl", row(1, loss=2.0), row(2))
    assert wanted() == [1, 2], "from the first difference on"


def test_what_a_server_has_follows_from_its_newest_number_on_any_machine(run_dir, monkeypatch):
    """A restored directory has no files of W&B's; rows and samples are sent once all the same."""
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
        target = wandb_tracker.WandbTracker(run_dir)
        target.run, target._first = Run(), first
        keys = {"prompt_number": 0, "top_k": 0}
        for step in samples:  # what is odd in a column ends nothing
            seed = 1 if step % 4 else "none"
            target.samples([{"step": step, "tokens": 10 * step, "seed": seed, **keys}])
        for step in rows:
            row = {"step": step, "tokens": 10 * step, "train/loss": 1.0}
            for more in ({}, {"eval/loss": 2.0}) if step in samples else ({},):
                if target.wants({**row, **more}):
                    target.log({**row, **more})
        target._put_samples()

    begin_again(0, [1, 2, 3, 4, 5], [2, 4])
    assert sorted(sent) == [100, 200, 201, 299, 300, 400, 401, 499, 500]
    begin_again(501, [1, 2, 3, 4, 5, 6, 7], [2, 4, 6])  # the run was killed in step 5
    assert sorted(sent)[-4:] == [600, 601, 699, 700]
    begin_again(600, [], [])
    assert [[row[0] for row in table] for table in tables] == [[2], [2, 4], [6]], "none twice"


class Broken:
    """A target that fails at one event, and then at every row."""

    where = "nowhere"

    def __init__(self) -> None:
        self.got: list[object] = []

    def event(self, event: dict[str, object]) -> None:
        if event.get("bad"):
            raise TypeError("unsupported operand")
        self.got.append(event["step"])

    def log(self, row: dict[str, object]) -> None:
        self.got.append(row["step"])

    def finish(self, exit_code: int) -> None:
        self.got.append("end")

    def wants(self, row: dict[str, object]) -> bool:
        return True

    def open(self) -> None: ...
    def flush(self) -> None: ...
    def samples(self, rows: list[dict[str, object]]) -> None: ...


def test_what_is_wrong_with_one_event_is_told_once_and_stops_nothing_else(run_dir) -> None:
    with open(run_dir / "events.jsonl", "w") as file:
        for bad in (False, True, True, False):
            file.write(json.dumps({"event": "spike", "step": 1, "bad": bad}) + "\n")
    (run_dir / "metrics.jsonl").write_text('{"step": 2}\n')
    told: list[dict[str, object]] = []
    target = Broken()
    mirror = Mirror(run_dir, "wandb", target, lambda **what: told.append(what))
    mirror.sender.start()
    mirror.end("done")
    assert target.got == [2, 1, 1, "end"] and mirror.complete
    (failure,) = [what["failed"] for what in told if "failed" in what]
    assert "passed over event: TypeError" in failure


def test_a_child_that_dies_again_and_again_is_given_up_and_the_repair_is_told(
    run_dir, monkeypatch
) -> None:
    """Offline each of them would write every row once more."""
    monkeypatch.setattr(tracker, "FIRST_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(tracker, "LONGEST_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(tracker, "LOOK_SECONDS", 0.0)
    monkeypatch.setenv("ZEROLM_SUPERVISOR", "somebody-1")
    seen = run_dir / "seen"
    script = (
        "import os, sys; open(sys.argv[1], 'a').write(os.environ.get('ZEROLM_SUPERVISOR', '-'))"
    )
    popen = subprocess.Popen
    monkeypatch.setattr(
        tracker.subprocess, "Popen",
        lambda words, **more: popen([sys.executable, "-c", script, str(seen)], **more),
    )  # fmt: skip
    log = begin(run_dir, 0)
    trackers = log.trackers
    assert trackers is not None
    deadline = time.monotonic() + 3
    while time.monotonic() < deadline:
        trackers.poke()
        time.sleep(0.01)
    assert seen.read_text() == "-" * tracker.MOST_DEATHS, "and none has the supervisor's mark"
    end(log)
    errors = [event["error"] for event in own_rows(run_dir, "events.jsonl")]
    assert len(errors) == tracker.MOST_DEATHS + 1
    assert all("python -m zerolm wandb-sync" in error for error in errors[-2:])


def test_what_a_child_says_after_a_rollback_is_heard(run_dir, monkeypatch) -> None:
    (run_dir / "wandb").write_text("in the way")
    first = begin(run_dir, 0)
    first.close("rollback")
    second = RunLog(run_dir, 0, writes=True)
    second.track(SimpleNamespace(wandb="offline", tensorboard=False), before=first.trackers)
    end(second)
    errors = [event["error"] for event in own_rows(run_dir, "events.jsonl")]
    assert sum("may lack rows" in error for error in errors) == 2, "of both"


def test_wandb_is_told_by_its_own_variable_whether_there_is_a_tracker(monkeypatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    for told, mode, found in (
        ("disabled", "offline", []), ("dryrun", "offline", ["wandb"]), ("run", "online", ["wandb"]),
        ("offline", "offline", ["wandb"]), ("", "online", ["wandb"]),
    ):  # fmt: skip
        monkeypatch.setenv("WANDB_MODE", told)
        assert wandb_tracker.mode_of("auto") == mode
        assert tracker.names(SimpleNamespace(wandb="auto", tensorboard=False)) == found
        assert tracker.names(SimpleNamespace(wandb="online", tensorboard=False)) == ["wandb"]


def without_locks(file: Any, operation: int) -> None:
    assert file.writable(), "NFS locks a file exclusively only if it may be written"
    raise OSError(errno.ENOLCK, "no locks available")


def test_what_cannot_be_synced_is_refused_in_one_line(tmp_path, run_dir, monkeypatch) -> None:
    for arguments, words in (
        ({"run_dir": tmp_path}, "no run.json"),
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
        with pytest.raises(ConfigError, match="is going on and writes to that W&B run"):
            wandb_sync(run_dir, mode="offline", same_id=True)
    with monkeypatch.context() as patched:
        patched.setattr(wandb_sync_module.fcntl, "flock", without_locks)
        patched.setattr(wandb_sync_module, "_send", lambda *what, **more: None)
        assert wandb_sync(run_dir, mode="offline", same_id=True) == ["first"]
    monkeypatch.setattr(wandb_tracker, "INIT_SECONDS", 1)
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{free_port()}")
    with pytest.raises(ZerolmError, match=r"W&B did not take it: .*refused"):
        wandb_sync(run_dir, mode="online")
