"""`RunLog`: the lines it writes, drops on a resume, and archives on a rollback."""

import json
from pathlib import Path

from zerolm.tracking import run_log
from zerolm.tracking.run_log import RunLog


def write_steps(log: RunLog, *steps: int) -> None:
    for step in steps:
        log.metrics({"step": step, "tokens": 10 * step, "train/loss": 1 / 3 / step})


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_resume_drops_the_lines_of_repeated_steps(tmp_path) -> None:
    log = RunLog(tmp_path, 0, writes=True)
    write_steps(log, 1, 2, 3, 4)
    log.close()
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 5, "tok')  # killed in the middle of a line
    log = RunLog(tmp_path, 2, writes=True)
    assert log.has(2, "train/loss") and not log.has(3, "train/loss")
    write_steps(log, 3)
    log.close()
    rows = lines(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert rows[2]["train/loss"] == 1 / 9, "floats survive to the last bit"


def test_a_resume_says_if_rows_before_its_checkpoint_are_missing(tmp_path) -> None:
    assert RunLog(tmp_path, 0, writes=True).lacks_rows is None
    assert "has no rows: the rows up to step 3" in str(RunLog(tmp_path, 3, writes=True).lacks_rows)
    log = RunLog(tmp_path, 0, writes=True)
    write_steps(log, 1, 2, 3)
    log.close()
    assert RunLog(tmp_path, 3, writes=True).lacks_rows is None
    lost = RunLog(tmp_path, 9, writes=True).lacks_rows
    assert lost == f"{tmp_path}/metrics.jsonl ends at step 3: the rows up to step 9 are missing"


def test_infinities_and_nan_are_logged_as_null(tmp_path) -> None:
    log = RunLog(tmp_path, 0, writes=True)
    log.metrics({"step": 1, "tokens": 10, "train/grad_norm": float("inf")})
    log.close()
    assert lines(tmp_path / "metrics.jsonl") == [{"step": 1, "tokens": 10, "train/grad_norm": None}]


def test_an_incomplete_event_line_does_not_damage_the_next_one(tmp_path) -> None:
    (tmp_path / "events.jsonl").write_text('{"event": "start"}\n{"event": "chec')
    log = RunLog(tmp_path, 0, writes=True)
    log.event("resume", 3)
    log.close()
    assert json.loads((tmp_path / "events.jsonl").read_text().splitlines()[-1])["step"] == 3


def test_events_are_appended_over_all_starts(tmp_path) -> None:
    for event in ("start", "resume"):
        log = RunLog(tmp_path, 0, writes=True)
        log.event(event, 0, checkpoint=None)
        log.close()
    assert [row["event"] for row in lines(tmp_path / "events.jsonl")] == ["start", "resume"]


def test_only_the_first_rank_writes(tmp_path) -> None:
    log = RunLog(tmp_path, 0, writes=False)
    write_steps(log, 1)
    log.event("start", 0)
    log.close()
    assert list(tmp_path.iterdir()) == []


def test_rolled_back_rows_are_archived_once(tmp_path) -> None:
    log = RunLog(tmp_path, 0, writes=True)
    write_steps(log, 1, 2, 3, 4)
    log.close()
    before = lines(tmp_path / "metrics.jsonl")
    run_log.archive(tmp_path, 1, 2)
    log = RunLog(tmp_path, 2, writes=True)
    write_steps(log, 3)
    log.close()
    run_log.archive(tmp_path, 1, 2)  # a start after a crash asks again
    assert lines(tmp_path / "metrics-rolled-back-0001.jsonl") == before[2:]
    assert [row["step"] for row in lines(tmp_path / "metrics.jsonl")] == [1, 2, 3]


def test_the_name_of_the_samples_is_synced_once(tmp_path, monkeypatch) -> None:
    synced: list[object] = []
    monkeypatch.setattr(run_log, "sync_directory", synced.append)
    log = RunLog(tmp_path, 0, writes=True)
    assert not synced
    for step in (2, 4):
        log.samples([{"step": step, "tokens": step, "prompt": "a", "text": "b"}])
    log.close()
    assert synced == [tmp_path]


def test_samples_of_repeated_steps_are_dropped(tmp_path) -> None:
    log = RunLog(tmp_path, 0, writes=True)
    assert log.sampled_tokens() == 0 and not (tmp_path / "samples.jsonl").exists()
    texts = {"prompt": "a", "text": "b"}
    for step in (2, 4, 6):
        row = {"step": step, "tokens": 10 * step, **texts}
        log.samples([{**row, "prompt_number": n} for n in range(3)])
    log.close()
    with open(tmp_path / "samples.jsonl", "a") as file:
        file.write('{"step": 8, "tok')
    log = RunLog(tmp_path, 4, writes=True)
    assert log.sampled_tokens() == 40
    log.samples([{"step": 6, "tokens": 60, "prompt_number": 0, **texts}])
    log.close()
    assert [row["step"] for row in lines(tmp_path / "samples.jsonl")] == [2] * 3 + [4] * 3 + [6]
