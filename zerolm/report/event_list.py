"""The report's list of a run's events, each with message, level, and position on the x-axes."""

import math
from collections.abc import Sequence
from typing import Any

from zerolm.report.curves import Curves, rounded
from zerolm.report.run_history import RunHistory
from zerolm.run_dir import events

MAX_EVENTS, MAX_MESSAGE_CHARACTERS = 600, 600
STALL_SECONDS, STALL_STEPS = 1.0, 10  # a checkpoint pause is listed if it is longer than both

Json = dict[str, Any]


def event_list(run: RunHistory) -> Json:
    """Return {"events": the latest events of each level, "events_left_out": number of other
    events}.
    """
    stalls = {stall["step"]: stall for stall in _stalls(run.curves)}
    placed: list[Json] = []
    for event, curves in with_curves(run):  # list a stall after its checkpoint
        placed.append({**event, "curves": curves})
        if event["event"] == "checkpoint" and event["step"] in stalls:
            placed.append(stalls.pop(event["step"]))
    entries = []
    for event in merged([*placed, *stalls.values()]):
        tokens, seconds = event.pop("curves", run.curves).place(max(0, event["step"]))
        entries.append(
            {
                "kind": event["event"],
                "level": events.level(event["event"]),
                "step": event["step"],
                "time": event.get("time"),
                "words": events.message(event)[:MAX_MESSAGE_CHARACTERS],
                "tokens": tokens,
                "seconds": rounded(seconds),
            }
        )
    remarkable = [entry for entry in entries if entry["level"] != "quiet"]
    quiet = [entry for entry in entries if entry["level"] == "quiet"]
    shown = remarkable[-MAX_EVENTS:] + quiet[-MAX_EVENTS // 2 :]
    order = {id(entry): index for index, entry in enumerate(entries)}
    shown.sort(key=lambda entry: order[id(entry)])
    return {"events": shown, "events_left_out": len(entries) - len(shown)}


def merged(listed: Sequence[Json]) -> list[Json]:
    """Return the events; a spike and the skip of the same step are merged into one event."""
    result: list[Json] = []
    for event in listed:
        before = result[-1] if result else {}
        same_step = before.get("event") == "spike" and before.get("step") == event.get("step")
        if event["event"] == "step_skipped" and same_step:
            reason = str(before.get("reason", "")).rstrip(". ")
            before["reason"] = f"{reason}; the step was not applied"
        else:
            result.append(dict(event))
    return result


def with_curves(run: RunHistory) -> list[tuple[Json, Curves]]:
    """Return each event with the curves that contain its step: the current or rolled-back curves.

    A step that is repeated after a rollback may have had a different token count the first time.
    """
    found = []
    undone, first_undone = run.curves, math.inf
    rolled_back = list(run.rolled_back)
    for event in reversed(run.events):
        if event["event"] == "rollback" and rolled_back:
            undone, first_undone = rolled_back.pop(), event.get("to_step", math.inf)
        found.append((event, undone if event["step"] > first_undone else run.curves))
    return found[::-1]


def _stalls(curves: Curves) -> list[Json]:
    """Return a `checkpoint_stall` event for each checkpoint that paused training for too long."""
    lines, stalls = curves.columns.get("checkpoint/stall_seconds", ((), ()))
    waits = dict(zip(*curves.columns.get("checkpoint/wait_seconds", ((), ())), strict=True))
    step_seconds = curves.values("throughput/step_seconds")
    usual = sorted(step_seconds)[len(step_seconds) // 2] if step_seconds else 0.0
    return [
        {
            "event": "checkpoint_stall",
            "step": curves.steps[line],
            "seconds": seconds,
            "wait_seconds": waits.get(line, 0.0),
        }
        for line, seconds in zip(lines, stalls, strict=True)
        if seconds > STALL_SECONDS and seconds > STALL_STEPS * usual
    ]
