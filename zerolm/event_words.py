"""What an event of a run means to a person: one line of words, and how much it matters. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

BAD = {
    "gave_up", "failed", "rank_lost", "hang", "launcher_lost", "checkpoint_failed", "damaged",
    "checkpoint_damaged", "attempt_failed", "supervisor_stopped",
}  # fmt: skip
NOTABLE = {
    "spike", "step_skipped", "cooldown", "rollback", "changed", "checkpoint_stall",
    "upload_failed", "upload_unfinished", "tracker_failed", "evaluation_failed",
    "evaluation_interrupted",
}  # fmt: skip
QUIET = {"checkpoint", "upload"}  # many, and as they should be

Event = Mapping[str, Any]


def level(kind: str) -> str:
    """Return `bad`, `notable`, `plain` or `quiet`."""
    if kind in BAD:
        return "bad"
    if kind in NOTABLE:
        return "notable"
    return "quiet" if kind in QUIET else "plain"


def words(event: Event) -> str:
    """Say what happened, without its name and step. Any key may be missing."""
    kind = event["event"]
    if kind in ("start", "resume"):
        where = f"on {event.get('world_size', '?')} ranks, ZeRO-{event.get('zero_stage', '?')}"
        if kind == "start":
            return where
        name = str(event.get("checkpoint")).rpartition("/")[2]
        anew = event.get("resharded")
        return f"from {name}, {where}" + (f", cut anew: {_list(anew)}" if anew else "")
    if kind == "checkpoint":
        return (
            f"{event.get('checkpoint', '')}: copied in {_seconds(event.get('copy_seconds'))}, "
            f"on disk after {_seconds(event.get('seconds', event.get('stall_seconds')))}"
        )
    if kind == "checkpoint_stall":
        return f"training stood still for {_seconds(event.get('seconds'))}" + (
            f", {_seconds(event.get('wait_seconds'))} of it for the checkpoint before"
            if event.get("wait_seconds")
            else ""
        )
    if kind == "cooldown":
        return (
            f"learning rate times {event.get('factor', '?')} for {event.get('steps', '?')} steps: "
            f"{event.get('reason', '')}"
        )
    if kind == "stage" and isinstance(event.get("shares"), Mapping):
        parts = (f"{name} {share:.3%}" for name, share in event["shares"].items())
        return f"of the mixture, {event.get('stage', '?')}: {', '.join(parts)}"
    if kind == "rollback":
        return (
            f"from step {event.get('from_step', '?')} back to {event.get('to_step', '?')}, "
            f"sequences {event.get('skipped_window', '?')} are left out: {event.get('reason', '')}"
        )
    if kind in ("rank_lost", "hang") and isinstance(event.get("ranks"), list):
        return "; ".join(_rank(rank) for rank in event["ranks"] if isinstance(rank, Mapping))
    if kind in ("upload", "restored"):
        return f"{event.get('checkpoint', '')}, {_seconds(event.get('seconds'))}"
    if kind == "changed" and isinstance(event.get("changes"), Mapping):
        return ", ".join(
            f"{key}: {' -> '.join(map(str, pair)) if isinstance(pair, list) else pair}"
            for key, pair in event["changes"].items()
        )
    if kind == "done":
        return f"{event['tokens']:,} tokens" if isinstance(event.get("tokens"), int) else ""
    known = (
        "checkpoint",
        "tracker",
        "evaluation",
        "reason",
        "reasons",
        "problem",
        "problems",
        "error",
    )
    return ": ".join(_list(event[key]) for key in known if event.get(key))


def merged(events: Sequence[Event]) -> list[dict[str, Any]]:
    """Return the events, a spike and the refusal of its step as one."""
    found: list[dict[str, Any]] = []
    for event in events:
        before = found[-1] if found else {}
        same_step = before.get("event") == "spike" and before.get("step") == event.get("step")
        if event["event"] == "step_skipped" and same_step:
            reason = str(before.get("reason", "")).rstrip(". ")
            before["reason"] = f"{reason}; the step was not taken"
        else:
            found.append(dict(event))
    return found


def _rank(rank: Mapping[str, Any]) -> str:
    return (
        f"rank {rank.get('rank', '?')} on {rank.get('host', '?')} {rank.get('reason', '')} "
        f"(in {rank.get('phase', '?')})"
    )


def _list(value: Any) -> str:
    return "; ".join(map(str, value)) if isinstance(value, list) else str(value)


def _seconds(value: Any) -> str:
    return f"{value:.3g} s" if isinstance(value, (int, float)) else "? s"
