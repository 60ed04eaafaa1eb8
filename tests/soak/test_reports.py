"""A kill must be reported, unless a fault at the same moment was."""

import os
import random
from types import SimpleNamespace

import pytest

from tests.soak.chunk import KilledRun, State
from tests.soak.kills import Kill

STRUCK_AT = 1_000_000.0


@pytest.mark.parametrize(
    ("output", "fault_after", "failures", "reported"),
    [
        ("supervise: stopped on request; run", None, 0, True),
        ("supervise: stop requested (SIGTERM), but the run failed", None, 1, False),
        ("supervise: stop requested (SIGTERM), but the run failed", -2, 1, True),
        ("", 3, 1, True),
        ("", 3, 0, False),
        ("", 15, 1, False),
    ],
)
def test_only_a_fault_of_the_same_moment_takes_the_place_of_a_report(
    tmp_path, output, fault_after, failures, reported
) -> None:
    for name in ("once", "run"):
        (tmp_path / name).mkdir()
    run = KilledRun(tmp_path, [], 2, [], random.Random(0))
    run._supervised = SimpleNamespace(log=tmp_path / "log")
    (tmp_path / "log").write_text(output)
    event = '{"event": "attempt_failed", "step": 3}\n'
    (tmp_path / "run" / "events.jsonl").write_text(event * failures)
    if fault_after is not None:
        path = tmp_path / "once" / "step.end-0-3-exit"
        path.touch()
        os.utime(path, (STRUCK_AT + fault_after,) * 2)
    before = State(3, 0, 1, 0, 0, 0)
    kill = Kill("stop", 3, 0)
    sign = "supervise: stopped on request"
    assert run.is_reported(kill, sign, before, STRUCK_AT) == reported
