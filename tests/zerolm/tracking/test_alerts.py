"""Alerts: which events and metrics raise one, and how often."""

import json
from types import SimpleNamespace

import pytest

from zerolm.checkpoint.manifest import Progress
from zerolm.ds_config.profile import Profile
from zerolm.parts.settings import RunSettings
from zerolm.tracking.alerts import ERROR, INFO, WARN, Alert, LowMfuDetector, RateLimit, of_event
from zerolm.train.stability import anomaly_fields, spike_guard

# The fields that a run logs for a spike.
GUARD = spike_guard(RunSettings(spike_threshold=4.0), Profile.parse({}))
RESULT = SimpleNamespace(loss=9.25, grad_norm=2.0)
SEEN = json.loads(json.dumps(anomaly_fields(GUARD, Progress(position=8), RESULT, 8)))


@pytest.mark.parametrize(
    ("event", "title", "level"),
    [
        ({"event": "resume", "checkpoint": "step-1"}, "restarted", INFO),
        ({"event": "spike", "loss": 9.0, "grad_norm": 2.0}, "loss spike", WARN),
        ({"event": "spike", "loss": float("nan"), "grad_norm": 2.0}, "not a finite number", ERROR),
        ({"event": "spike", "loss": None, "grad_norm": 2.0}, "not a finite number", ERROR),
        ({"event": "spike", **SEEN}, "loss spike", WARN),
        ({"event": "spike", **SEEN, "grad_norm": "inf"}, "not a finite number", ERROR),
        ({"event": "rollback", "reason": "high"}, "rolled back", WARN),
        ({"event": "hang"}, "hang", ERROR),
        ({"event": "gave_up", "reason": "high"}, "gave up", ERROR),
    ],
)
def test_events_that_need_attention_raise_an_alert(event, title, level) -> None:
    alert = of_event({"step": 7, "time": "now", **event})
    assert alert is not None and (alert.title, alert.level) == (title, level)
    assert "step 7" in alert.text and len(alert.title) < 24


def test_routine_events_raise_no_alert() -> None:
    for event in ("start", "checkpoint", "upload", "done", "stopped", "changed", "step_skipped"):
        assert of_event({"event": event, "step": 1}) is None


def test_low_mfu_raises_one_alert_until_it_has_recovered() -> None:
    watch, alerted = LowMfuDetector(), []
    values = [0.4] * 20 + [0.2] * 5 + [0.39] + [0.1] * 3
    for step, mfu in enumerate(values):
        if watch.check({"step": step, "throughput/mfu": mfu}):
            alerted.append(step)
    assert alerted == [22, 28]
    assert watch.check({"step": 99}) is None, "on a device whose peak is unknown"


def test_alerts_are_rate_limited_except_errors() -> None:
    limit = RateLimit()
    same = Alert("loss spike", "", WARN)
    assert [limit.allows(same, second) for second in (0, 10, 599, 600)] == [
        True,
        False,
        False,
        True,
    ]
    alerted = sum(limit.allows(Alert(f"{number}", "", WARN), 700.0) for number in range(100))
    assert alerted == 18, "twenty in an hour"
    assert limit.allows(Alert("hang", "", ERROR), 800.0)
    assert limit.allows(Alert("later", "", WARN), 5000.0)
    assert limit.allows(Alert("later", "", WARN), 1000.0), "the clock was set back by an hour"
