"""The table of events: every event has a message, whichever of its keys it has."""

import pytest

from zerolm.run_dir.events import EVENTS, level, message, state_after


@pytest.mark.parametrize("name", EVENTS)
def test_a_message_needs_no_key_and_fears_no_value(name) -> None:
    assert isinstance(message({"event": name}), str)
    odd = dict.fromkeys(("checkpoint", "seconds", "ranks", "shares", "changes", "resharded"), "?")
    assert isinstance(message({"event": name, "step": 1, "time": "", **odd}), str)
    assert level(name) in ("bad", "notable", "plain", "quiet")


@pytest.mark.parametrize(
    ("event", "text"),
    [
        ({"event": "start", "world_size": 2, "zero_stage": 3}, "on 2 ranks, ZeRO-3"),
        (
            {"event": "resume", "checkpoint": "x/step-00000020", "world_size": 4, "zero_stage": 2,
             "resharded": ["world size 2 -> 4"]},
            "from step-00000020, on 4 ranks, ZeRO-2, resharded: world size 2 -> 4",
        ),
        (
            {"event": "checkpoint", "checkpoint": "step-00000020", "copy_seconds": 0.1234,
             "seconds": 2},
            "step-00000020: copied in 0.123 s, on disk after 2 s",
        ),
        (
            {"event": "checkpoint_stall", "seconds": 7.0, "wait_seconds": 6.0},
            "training was paused for 7 s, of which 6 s waiting for the previous checkpoint",
        ),
        (
            {"event": "rollback", "from_step": 60, "to_step": 40, "skipped_window": [400, 480],
             "reason": "high"},
            "from step 60 back to 40, skips sequences [400, 480]: high",
        ),
        (
            {"event": "rank_lost", "ranks": [{"rank": 1, "host": "b", "reason": "was killed",
                                              "phase": "step"}]},
            "rank 1 on b was killed (in step)",
        ),
        (
            {"event": "hang", "ranks": [{"rank": 1, "host": "b", "stage": "2 of 2",
                                         "reason": "is stopped", "phase": "step"}]},
            "rank 1 on b, stage 2 of 2, is stopped (in step)",
        ),
        ({"event": "changed", "changes": {"seed": [1, 2]}}, "seed: 1 -> 2"),
        ({"event": "stage", "stage": 2, "shares": {"a": 1}}, "data blend 2: a 100.000%"),
        ({"event": "tracker_failed", "tracker": "wandb", "error": "{no} net"}, "wandb: {no} net"),
        ({"event": "attempt_failed", "reasons": ["a", "b"], "attempt": 1}, "a; b"),
        ({"event": "done", "tokens": 120000}, "120,000 tokens"),
    ],
)  # fmt: skip
def test_a_message_says_what_happened(event, text) -> None:
    assert message(event) == text


def test_an_event_that_is_not_in_the_table_is_shown_with_its_keys() -> None:
    event = {"event": "gpu_throttled", "step": 3, "time": "", "rank": 1, "hosts": ["a", "b"]}
    assert message(event) == "rank: 1, hosts: a; b"
    assert level("gpu_throttled") == "plain" and state_after("gpu_throttled") == ""
