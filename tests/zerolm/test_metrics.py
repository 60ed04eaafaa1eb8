import json
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from zerolm import metrics
from zerolm.metrics import RunLog


def settings(wandb: str) -> SimpleNamespace:
    return SimpleNamespace(wandb=wandb, wandb_project="zerolm-test", wandb_group=None)


def write_steps(log: RunLog, *steps: int) -> None:
    for step in steps:
        log.metrics({"step": step, "tokens": 10 * step, "train/loss": 1 / 3 / step})


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


BLOCK_BYTES, HEADER_BYTES = 32768, 7  # of LevelDB's log format, in which W&B keeps its records
WHOLE, LAST = 1, 4


def wandb_records(path: Path) -> list[bytes]:
    """Return the records of an offline W&B file: parts of 7-byte header and data, in blocks."""
    content, position, parts, records = path.read_bytes(), HEADER_BYTES, b"", []
    while position + HEADER_BYTES <= len(content):
        left = BLOCK_BYTES - position % BLOCK_BYTES
        if left < HEADER_BYTES:
            position += left
            continue
        size = int.from_bytes(content[position + 4 : position + 6], "little")
        kind = content[position + 6]
        parts += content[position + HEADER_BYTES : position + HEADER_BYTES + size]
        position += HEADER_BYTES + size
        if kind in (WHOLE, LAST):
            records.append(parts)
            parts = b""
    return records


def wandb_rows(run_dir: Path, count: int) -> list[dict]:
    """Wait for `count` rows: W&B's process may still be writing when finish() returns."""
    deadline = time.monotonic() + 20
    while len(rows := wandb_rows_now(run_dir)) < count and time.monotonic() < deadline:
        time.sleep(0.1)
    return rows


def wandb_rows_now(run_dir: Path) -> list[dict]:
    """Read every row of every offline W&B file of a run, as `wandb sync` would send them."""
    from wandb.proto import wandb_internal_pb2

    rows = []
    for path in sorted(run_dir.glob("wandb/offline-run-*/*.wandb")):
        for data in wandb_records(path):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                row = {item.key or "/".join(item.nested_key): item.value_json for item in items}
                rows.append({key: json.loads(value) for key, value in row.items()})
    return rows


def test_a_resume_drops_the_lines_that_are_taken_again(tmp_path) -> None:
    log = RunLog(tmp_path, 0, writes=True)
    write_steps(log, 1, 2, 3, 4)
    log.close()
    with open(tmp_path / metrics.METRICS, "a") as file:
        file.write('{"step": 5, "tok')  # killed in the middle of a line
    log = RunLog(tmp_path, 2, writes=True)
    assert log.has(2, "train/loss") and not log.has(3, "train/loss")
    write_steps(log, 3)
    log.close()
    rows = lines(tmp_path / metrics.METRICS)
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert rows[2]["train/loss"] == 1 / 9, "floats survive to the last bit"


def test_what_json_has_no_number_for_is_null(tmp_path) -> None:
    log = RunLog(tmp_path, 0, writes=True)
    log.metrics({"step": 1, "tokens": 10, "train/grad_norm": float("inf")})
    log.close()
    assert lines(tmp_path / metrics.METRICS) == [{"step": 1, "tokens": 10, "train/grad_norm": None}]


def test_an_event_that_a_kill_cut_short_does_not_spoil_the_next(tmp_path) -> None:
    (tmp_path / metrics.EVENTS).write_text('{"event": "start"}\n{"event": "chec')
    log = RunLog(tmp_path, 0, writes=True)
    log.event("resume", 3)
    log.close()
    assert json.loads((tmp_path / metrics.EVENTS).read_text().splitlines()[-1])["step"] == 3


def test_events_are_appended_over_all_starts(tmp_path) -> None:
    for event in ("start", "resume"):
        log = RunLog(tmp_path, 0, writes=True)
        log.event(event, 0, checkpoint=None)
        log.close()
    assert [row["event"] for row in lines(tmp_path / metrics.EVENTS)] == ["start", "resume"]


def test_only_the_first_rank_writes(tmp_path) -> None:
    log = RunLog(tmp_path, 0, writes=False)
    write_steps(log, 1)
    log.event("start", 0)
    log.close()
    assert list(tmp_path.iterdir()) == []


def test_wandb_offline_has_each_row_once_over_a_kill_and_a_resume(tmp_path, monkeypatch) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("WANDB_MODE", "offline")
    log = RunLog(tmp_path, 0, writes=True)
    assert log.track(settings("offline"), {"settings": {"seed": 1}}, 0).startswith("offline")
    first_id = json.loads((tmp_path / "wandb" / "run.json").read_text())["id"]
    write_steps(log, 1, 2, 3)
    log.tracker.finish()  # the rows are flushed, then the process is lost
    time.sleep(1.1)  # W&B names an offline directory by the second and the id
    log = RunLog(tmp_path, 1, writes=True)
    log.track(settings("offline"), {}, 1)
    write_steps(log, 2, 3, 4)
    log.metrics({"step": 3, "tokens": 30, "eval/loss": 2.5})
    log.close()
    assert json.loads((tmp_path / "wandb" / "run.json").read_text())["id"] == first_id
    sent = wandb_rows(tmp_path, 5)
    steps = [row["step"] for row in sent if "train/loss" in row]
    assert steps == [1, 2, 3, 4]
    assert [row["step"] for row in sent if "eval/loss" in row] == [3]
    assert all(row["train/loss"] == 1 / 3 / row["step"] for row in sent if "train/loss" in row)


def test_a_rollback_begins_another_wandb_run_in_the_same_group(tmp_path, monkeypatch) -> None:
    """The steps that are taken again are in the second one, and it outlives a restart."""
    from wandb.proto import wandb_internal_pb2

    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("WANDB_MODE", "offline")
    log = RunLog(tmp_path, 0, writes=True)
    log.track(settings("offline"), {}, 0)
    write_steps(log, 1, 2, 3)
    log.close()
    ids = []
    for steps in ((2, 3), (4,)):
        metrics.archive(tmp_path, 1, 1)
        time.sleep(1.1)
        log = RunLog(tmp_path, steps[0] - 1, writes=True)
        log.track(settings("offline"), {}, steps[0] - 1, rollbacks=1)
        write_steps(log, *steps)
        log.close()
        ids.append(json.loads((tmp_path / "wandb" / "run.json").read_text())["id"])
    assert ids[0] == ids[1], "a restart goes on with it"
    assert [row["step"] for row in wandb_rows(tmp_path, 6)] == [1, 2, 3, 2, 3, 4]
    runs = {}
    for path in tmp_path.glob("wandb/offline-run-*/*.wandb"):
        for data in wandb_records(path):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "run":
                runs[record.run.run_id] = record.run.run_group, record.run.display_name
    name = tmp_path.name
    assert sorted(runs.values()) == [(name, name), (name, f"{name}-rollback-1")]


def test_rows_of_a_rollback_are_moved_once_and_not_lost(tmp_path) -> None:
    log = RunLog(tmp_path, 0, writes=True)
    write_steps(log, 1, 2, 3, 4)
    log.close()
    before = lines(tmp_path / metrics.METRICS)
    metrics.archive(tmp_path, 1, 2)
    log = RunLog(tmp_path, 2, writes=True)
    write_steps(log, 3)
    log.close()
    metrics.archive(tmp_path, 1, 2)  # a start after a crash asks again
    assert lines(tmp_path / metrics.ROLLED_BACK.format(1)) == before[2:]
    assert [row["step"] for row in lines(tmp_path / metrics.METRICS)] == [1, 2, 3]


def test_a_tracker_that_fails_is_an_event_and_not_the_end(tmp_path) -> None:
    log = RunLog(tmp_path, 0, writes=True)
    (tmp_path / "wandb").write_text("in the way")
    assert "not available" in log.track(settings("offline"), {}, 0)
    write_steps(log, 1)
    log.close()
    assert lines(tmp_path / metrics.EVENTS)[0]["event"] == "tracker_failed"
    assert len(lines(tmp_path / metrics.METRICS)) == 1


@pytest.mark.parametrize(
    ("number", "text"), [(999, "999"), (1234, "1.23k"), (3.2e9, "3.2B"), (1.5e13, "15T")]
)
def test_counts_are_short(number: float, text: str) -> None:
    assert metrics.count(number) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(5, "5s"), (184, "3m04s"), (7380, "2h03m"), (93_780, "1d02h03m")]
)
def test_durations_are_short(seconds: float, text: str) -> None:
    assert metrics.duration(seconds) == text


def test_samples_of_steps_that_are_taken_again_are_dropped(tmp_path) -> None:
    log = RunLog(tmp_path, 0, writes=True)
    assert log.sampled_tokens() == 0 and not (tmp_path / metrics.SAMPLES).exists()
    for step in (2, 4, 6):
        log.samples([{"step": step, "tokens": 10 * step, "prompt_number": n} for n in range(3)])
    log.close()
    with open(tmp_path / metrics.SAMPLES, "a") as file:
        file.write('{"step": 8, "tok')
    log = RunLog(tmp_path, 4, writes=True)
    assert log.sampled_tokens() == 40
    log.samples([{"step": 6, "tokens": 60, "prompt_number": 0}])
    log.close()
    assert [row["step"] for row in lines(tmp_path / metrics.SAMPLES)] == [2] * 3 + [4] * 3 + [6]
