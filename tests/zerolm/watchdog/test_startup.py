"""The last failure of a run, as its events tell it to the next start."""

import json
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from launch.supervise.downtime import downtime
from tests.zerolm.report.run_directories import heartbeat
from zerolm.common import processes
from zerolm.run_dir.files import RunFiles
from zerolm.watchdog import startup

FAILED = {"parts": {"noticed": 0.5, "ended": 1.5}, "ended_at": 1000.0}


def write(run_dir: Path, *events: dict, last_step: int) -> None:
    (run_dir / "events.jsonl").write_text("".join(json.dumps(row) + "\n" for row in events))
    (run_dir / "metrics.jsonl").write_text(json.dumps({"step": last_step, "tokens": 0}) + "\n")


def event(name: str, step: int, **values: object) -> dict:
    return {"event": name, "step": step, "time": "", **values}


@pytest.mark.parametrize(
    ("events", "step"),
    [
        ([], None),
        ([event("startup", 1)], None),
        ([event("startup", 1), event("attempt_failed", 0, reasons=[])], None),  # of before
        ([event("startup", 1), event("attempt_failed", 7, **FAILED)], 7),
        ([event("startup", 1), event("attempt_failed", 3, **FAILED)], 6),  # a later row is there
        ([event("attempt_failed", 7, **FAILED), event("startup", 6)], None),
        ([event("attempt_failed", 7, **FAILED), event("done", 8)], None),
        ([event("startup", 1), event("attempt_failed", 7, **FAILED),
          event("attempt_failed", 0, **FAILED | {"ended_at": 2000.0})], 7),
    ],
)  # fmt: skip
def test_a_recovery_begins_with_the_first_failure_since_a_start_trained(
    tmp_path, events, step
) -> None:
    write(tmp_path, *events, last_step=5)
    found = startup.interruption(tmp_path)
    assert (found and found.step) == step
    if found is not None:
        assert (found.parts, found.ended_at) == (FAILED["parts"], 1000.0)


def test_a_recovery_is_the_sum_of_its_parts(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(startup, "_ends", {})
    startup.mark("imports")
    startup.mark("first step")
    ended = time.time() - sum(startup.parts(None).values()) - 3.0
    failed = startup.Interruption(7, {"noticed": 0.5, "ended": 1.5}, ended)
    seconds, parts = startup.recovery(failed, None)
    assert list(parts) == ["noticed", "ended", "pause", "imports", "first step", "repeated steps"]
    assert parts["pause"] == pytest.approx(3.0, abs=0.1)
    assert seconds == pytest.approx(sum(parts.values()))


def test_an_older_parent_is_not_the_node_launcher(monkeypatch) -> None:
    monkeypatch.setattr(startup, "_ends", {})
    own = processes.inspect_process(os.getpid())
    assert list(startup.parts(replace(own, pid=own.parent - 1))) == ["node launcher"]
    older = replace(own, start_ticks=0)
    assert list(startup.parts(older)) == ["deepspeed", "node launcher"]


def test_the_fault_is_the_last_progress_of_any_rank(tmp_path) -> None:
    files, now = RunFiles(tmp_path), time.time()
    files.ranks.mkdir()
    beats = [heartbeat(0, token="1", quiet_seconds=4.0), heartbeat(1, token="1", quiet_seconds=0.5)]
    for beat, written in zip(beats, (now, now - 5.0), strict=True):  # rank 1 was killed
        path = files.heartbeat(beat["rank"])
        path.write_text("{}")
        os.utime(path, (written, written))
    assert downtime(files, beats, now + 1, now + 2)["parts"] == {"noticed": 5.0, "ended": 1.0}
    files.verdict("1").write_text("{}")
    os.utime(files.verdict("1"), (now - 3, now - 3))
    found = downtime(files, beats, now + 1, now + 2)
    assert found == {"parts": {"noticed": 1.0, "ended": 5.0}, "ended_at": round(now + 2, 2)}
    os.utime(files.heartbeat(1), (now, now))  # was stopped, and continued for its stacks
    assert downtime(files, beats, now + 1, now + 2)["parts"] == {"noticed": 1.0, "ended": 5.0}
    assert downtime(files, [], now + 1, now + 2) == {}
