"""The table of events: the contents of `events.jsonl`, and the level and message of each event.

The table in docs/run_directory.md, the event lists in `report.html` and `zerolm status`, the state
of a run and the trackers' alerts are derived from `EVENTS`. An event that is not in `EVENTS` is
shown with all its keys and with level `plain`. Standard library only.

    python -m tests.test_tables    # writes the table in docs/run_directory.md
"""

import json
import string
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from zerolm.common.secrets import masked_values
from zerolm.common.values import shown_seconds
from zerolm.run_dir.files import RunFiles
from zerolm.run_dir.jsonl import append_line

Event = Mapping[str, Any]
Level = Literal["bad", "notable", "plain", "quiet"]

# States that an event can put a run into; "" means that the event does not change the state.
RUNNING, DONE, STOPPED, GAVE_UP, FAILED = "running", "done", "stopped", "gave up", "failed"
# Keys that explain an event, in the order in which they are joined into a message.
DETAILS = (
    "checkpoint", "checkpoints", "tracker", "evaluation", "reason", "reasons", "problem",
    "problems", "error",
)  # fmt: skip
ENDED = (DONE, STOPPED, GAVE_UP)  # states of a run that ended by itself or on request
COMMON_KEYS = ("event", "step", "time")


class AlertRule(NamedTuple):
    """An alert sent by trackers: its level (INFO, WARN, ERROR), its title, and the key of its
    details.
    """

    level: str
    title: str
    detail: str


@dataclass(frozen=True)
class EventKind:
    """One kind of event.

    Attributes:
        level: importance; `quiet` events are frequent and expected, and omitted from short lists.
        about: description for docs/run_directory.md, which lists the event's keys except the common
            ones.
        message: a template, or a function of the event. If empty, the message joins the event's
            `DETAILS`. In a template, a missing key is shown as "?", and `{key:seconds}` as a
            duration.
        state: the run's state after the event; "" if the event does not change it.
        written: False if the report derives the event from metrics.
    """

    name: str
    level: Level
    about: str
    message: str | Callable[[Event], str] = ""
    alert: AlertRule | None = None
    state: str = ""
    written: bool = True


def level(name: str) -> Level:
    """Return the level of an event."""
    return EVENTS[name].level if name in EVENTS else "plain"


def state_after(name: str) -> str:
    """Return the state that an event puts a run into, or "" if the event does not change the
    state.
    """
    return EVENTS[name].state if name in EVENTS else ""


def message(event: Event) -> str:
    """Return the message for an event, without its name and step. Any key may be missing."""
    kind = EVENTS.get(event["event"])
    if kind is None:
        known = (key for key in event if key not in COMMON_KEYS)
        return ", ".join(f"{key}: {_joined(event[key])}" for key in known)
    if callable(kind.message):
        return kind.message(event)
    if kind.message:
        return _TEMPLATES.vformat(kind.message, (), event)
    return ": ".join(_joined(event[key]) for key in DETAILS if event.get(key))


class _Templates(string.Formatter):
    def get_value(self, key: int | str, args: Any, kwargs: Mapping[str, Any]) -> Any:
        return kwargs.get(str(key), "?")

    def format_field(self, value: Any, format_spec: str) -> str:
        if not isinstance(value, (int, float)):
            return "? s" if format_spec == "seconds" else str(value)
        return shown_seconds(value) if format_spec == "seconds" else format(value, format_spec)


_TEMPLATES = _Templates()


def _joined(value: Any) -> str:
    return "; ".join(map(str, value)) if isinstance(value, list) else str(value)


# ---- Messages that are not templates


def shown_slow_host(event: Event) -> str:
    """Return the message for a `slow_host` event."""
    if not event.get("slow"):
        return _TEMPLATES.vformat("{host} is as fast as the other hosts again", (), event)
    return _TEMPLATES.vformat(
        "{host} has been {ratio:.2f} times as slow as the other hosts for {seconds:seconds}, and "
        "all ranks wait for it",
        (), event,
    )  # fmt: skip


def _started(event: Event) -> str:
    text = _TEMPLATES.vformat("on {world_size} ranks, ZeRO-{zero_stage}", (), event)
    source = f", weights from {event['init_from']}" if event.get("init_from") else ""
    return text + source


def _resumed(event: Event) -> str:
    name = str(event.get("checkpoint")).rpartition("/")[2]
    text = _TEMPLATES.vformat("on {world_size} ranks, ZeRO-{zero_stage}", (), event)
    changed = f", resharded: {_joined(event['resharded'])}" if event.get("resharded") else ""
    return f"from {name}, {text}{changed}"


def _stalled(event: Event) -> str:
    template = "training was paused for {seconds:seconds}"
    if event.get("wait_seconds", 0) >= 0.001:
        template += ", of which {wait_seconds:seconds} waiting for the previous checkpoint"
    return _TEMPLATES.vformat(template, (), event)


def _blend(event: Event) -> str:
    shares = event.get("shares")
    if not isinstance(shares, Mapping):
        return ""
    parts = ", ".join(f"{name} {share:.3%}" for name, share in shares.items())
    return f"data blend {event.get('stage', '?')}: {parts}"


def _branched(event: Event) -> str:
    start = _TEMPLATES.vformat("from {run}, {tokens:,} tokens", (), event)
    return "; ".join(filter(None, (start, _changes(event))))


def _changes(event: Event) -> str:
    changes = event.get("changes")
    if not isinstance(changes, Mapping):
        return ""
    return ", ".join(
        f"{key}: {' -> '.join(map(str, pair)) if isinstance(pair, list) else pair}"
        for key, pair in changes.items()
    )


def _parts(event: Event) -> str:
    parts = event.get("parts")
    found = parts.items() if isinstance(parts, Mapping) else ()
    return ", ".join(f"{name} {seconds} s" for name, seconds in found)


def _recovered(event: Event) -> str:
    template = "{repeated_steps} steps repeated, first new step {seconds:seconds} after the fault: "
    return _TEMPLATES.vformat(template, (), event) + _parts(event)


def _startup(event: Event) -> str:
    template = "first step after {seconds:seconds}: " + _parts(event)
    if "lost_seconds" in event:
        template += "; {lost_seconds:seconds} after the last row of metrics"
    return _TEMPLATES.vformat(template, (), event)


def _ranks(event: Event) -> str:
    ranks = event.get("ranks")
    found = [rank for rank in ranks if isinstance(rank, Mapping)] if isinstance(ranks, list) else []
    template = "rank {rank} on {host} {reason} (in {phase})"
    with_stage = "rank {rank} on {host}, stage {stage}, {reason} (in {phase})"
    shown = "; ".join(
        _TEMPLATES.vformat(with_stage if rank.get("stage") else template, (), rank)
        for rank in found
    )
    return shown or str(event.get("reason") or "")


def _corrupt(event: Event) -> str:
    places = event.get("places")
    found = (
        [each for each in places if isinstance(each, Mapping)] if isinstance(places, list) else []
    )
    where = [_TEMPLATES.vformat("rank {rank} on {host}, {device}", (), each) for each in found]
    return f"{event.get('problem', '?')}: {'; '.join(where)}; the step was computed again"


# fmt: off
_KINDS: tuple[EventKind, ...] = (
    EventKind("start", "plain",
        "the run starts: `world_size`, `zero_stage`; `init_from`: existing weights, if any",
        _started, state=RUNNING),
    EventKind("branched", "notable",
        "the run starts from another run's checkpoint (`--branch`): `run`, the directory of that "
        "run; `tokens`; `digest` of the checkpoint; `changes` of settings that affect the loss "
        "curve; `branch`: the same information about that run, if it is also a branch", _branched),
    EventKind("resume", "plain",
        "the run resumes from `checkpoint`: `world_size`, `zero_stage`; `resharded`: changes in "
        "the topology", _resumed,
        AlertRule("INFO", "restarted", "checkpoint"), RUNNING),
    EventKind("startup", "quiet",
        "the first step after this start is done: `seconds` since the launcher started, and their "
        "`parts`; `lost_seconds` since the previous row of metrics", _startup),
    EventKind("recovered", "quiet",
        "the first new step after a failure is done: `seconds` since the failure, and their "
        "`parts`; `repeated_steps`",
        _recovered),
    EventKind("rows_lost", "notable",
        "the run resumes, but `metrics.jsonl` lacks rows before its checkpoint: `problem`"),
    EventKind("changed", "notable",
        "`changes` accepted by `--accept_changes`: old and new values", _changes),
    EventKind("checkpoint", "quiet",
        "the directory `checkpoint` was published after `seconds`; training paused for "
        "`copy_seconds`",
        "{checkpoint}: copied in {copy_seconds:seconds}, on disk after {seconds:seconds}"),
    EventKind("checkpoint_failed", "bad",
        "`checkpoint`; `error` of each rank that could not write; `next_try`: step of the next "
        "attempt; after `--checkpoint_failures` failed intervals in a row the run ends",
        alert=AlertRule("ERROR", "checkpoint not written", "error")),
    EventKind("checkpoint_problem", "notable",
        "`problem` that does not affect the published checkpoint, such as an old checkpoint that "
        "could not be removed"),
    EventKind("memory_copy_failed", "notable",
        "`error` of each rank that could not copy its states to memory"),
    EventKind("checkpoint_stall", "notable", "training was paused for a long time", _stalled,
        written=False),
    EventKind("damaged", "bad",
        "a damaged checkpoint was renamed to `checkpoint`; `problems`: each file with its expected "
        "and actual size or hash", alert=AlertRule("WARN", "damaged checkpoint", "checkpoint")),
    EventKind("evaluation_failed", "notable",
        "`evaluation`: name of the evaluation or lm-eval task; `error`. Training continued; "
        "after two crashes this step is not evaluated"),
    EventKind("evaluation_interrupted", "notable",
        "the run ended, or was killed, during `evaluation`, which is retried once"),
    EventKind("spike", "notable",
        "the step was an anomaly: `reason`, `loss`, `grad_norm`, `sequences` [first, last + 1) of "
        "its batch", alert=AlertRule("WARN", "loss spike", "reason")),
    EventKind("step_skipped", "notable",
        "the step was not applied: it was refused, or skipped by DeepSpeed; the same keys as "
        "`spike`"),
    EventKind("cooldown", "notable",
        "the learning rate is multiplied by `factor` for `steps` steps; `reason`",
        "learning rate times {factor} for {steps} steps: {reason}"),
    EventKind("stage", "plain",
        "this step is the first of the next data blend: `stage`, numbered from 1; `shares` of "
        "the sources", _blend),
    EventKind("rollback", "notable",
        "the run went back to an earlier `checkpoint`: `from_step`, `to_step`, `first_anomaly`, "
        "`skipped_window` of sequence numbers, `reason`; as in `rollbacks.json`",
        "from step {from_step} back to {to_step}, skips sequences {skipped_window}: {reason}",
        AlertRule("WARN", "rolled back", "reason")),
    EventKind("replayed", "quiet",
        "the step was computed again from the same batch, with equal results: `why`, `odd` for its "
        "gradients or losses, `spot` for a random check",
        "computed again ({why}), the same result"),
    EventKind("nondeterministic", "notable",
        "two passes over the same batch differ slightly; replays are compared with a `tolerance` "
        "relative to the norm of each gradient",
        "two passes over a batch differ slightly; compared with a tolerance of {tolerance:.1e}"),
    EventKind("corrupt_step", "bad",
        "one of three passes over the same batch was wrong, and the others' result was applied: "
        "`why`; `problem`; `places`: rank, host and device; `parameters` whose gradients "
        "were wrong", _corrupt,
        AlertRule("ERROR", "silent corruption corrected", "problem")),
    EventKind("corrupted", "bad",
        "hardware has corrupted values; the run ended with exit code 77: `reason`; `places`: "
        "rank, host and device",
        alert=AlertRule("ERROR", "silent corruption", "reason"), state=FAILED),
    EventKind("rank_lost", "bad",
        "a rank's process ended before the run did: `ended`, the signal, exit code or error; "
        "`ranks`: rank, host, pid, pipeline stage, the step and phase of its last heartbeat, "
        "sequences `[first, count]` of that step, its stack file; `found_by`, the rank that "
        "reports the loss",
        _ranks, AlertRule("ERROR", "a rank was lost", "ended"), FAILED),
    EventKind("hang", "bad",
        "a rank was stopped, silent, or without progress: the keys of `rank_lost`, `device` and "
        "`doing`, the function that the rank was in; if no rank is at fault, `ranks` is empty, and "
        "`reason` names the collective that does not finish", _ranks,
        AlertRule("ERROR", "hang", "ended"), FAILED),
    EventKind("launcher_lost", "bad",
        "the process that started a host's ranks no longer exists: the keys of `rank_lost`, "
        "`host`, `pid` and `reason`",
        alert=AlertRule("ERROR", "launcher lost", "reason"), state=FAILED),
    EventKind("slow_host", "notable",
        "a host has been slower than the others for minutes, or no longer is: `host`; `slow`; "
        "`ratio` of its time, excluding waits, to the median of the others; `seconds`",
        shown_slow_host, AlertRule("WARN", "a slow host", "host")),
    EventKind("profile", "plain",
        "`--profile` recorded the step: `trace`, rank 0's file in `profile/`; `seconds` to write",
        "profile/{trace}"),
    EventKind("profile_failed", "notable", "`error`: no profile was written; training continued"),
    EventKind("upload", "quiet",
        "`checkpoint` is complete in the object store `url`; `bytes` and `seconds` of the upload",
        "{checkpoint}, {seconds:seconds}"),
    EventKind("upload_failed", "notable",
        "`url`; `error` after all attempts; training continued, and the upload will be retried"),
    EventKind("upload_unfinished", "notable",
        "`checkpoints` that are not in the store when the run ends"),
    EventKind("restored", "plain",
        "`checkpoint` was downloaded from the store `url`; `bytes`, `seconds`",
        "{checkpoint}, {seconds:seconds}"),
    EventKind("checkpoint_damaged", "bad",
        "`problem` with a checkpoint in the store, which was not restored"),
    EventKind("attempt_failed", "bad",
        "written by the supervisor: `attempt`, its number; `reasons`, one line each; `parts`: "
        "seconds until the failure was noticed and until all processes had ended, at `ended_at` "
        "(seconds since 1970)",
        alert=AlertRule("WARN", "an attempt failed", "reasons"), state=FAILED),
    EventKind("supervisor_stopped", "bad",
        "written by the supervisor, which will not restart the run: `attempt`; `reason`, its "
        "diagnosis",
        alert=AlertRule("ERROR", "supervisor stopped", "reason"), state=FAILED),
    EventKind("tracker_failed", "notable",
        "`tracker`, `error`; training continued without it"),
    EventKind("stopped", "plain",
        "`reason`: the signal, `--stop_after`, or that `deepspeed` has ended", state=STOPPED),
    EventKind("failed", "bad",
        "`reason`: checkpoints could not be written `--checkpoint_failures` times in a row, or at "
        "the end", alert=AlertRule("ERROR", "failed", "reason"), state=FAILED),
    EventKind("gave_up", "bad", "`reason`, which names the last good checkpoint",
        alert=AlertRule("ERROR", "gave up", "reason"), state=GAVE_UP),
    EventKind("done", "plain", "all steps are done; `tokens` that the run has read",
        "{tokens:,} tokens", state=DONE),
)
# fmt: on
EVENTS = {kind.name: kind for kind in _KINDS}


def event_line(event: str, step: int, **details: Any) -> str:
    """Return an event as a line of events.jsonl, without the newline and without secrets."""
    timestamp = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    shown = masked_values(details)
    return json.dumps({"event": event, "step": step, "time": timestamp, **shown})


def append_event(run_dir: str | Path, event: str, step: int, **details: Any) -> None:
    """Append an event to a run's events.jsonl from a process that has no `RunLog`.

    Args:
        step: the step that the event belongs to; -1 for none.
        details: further keys with JSON values; docs/run_directory.md lists each event's keys.
    """
    append_line(RunFiles(run_dir).events, event_line(event, step, **details))
