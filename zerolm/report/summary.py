"""A run in a few figures: for the head of its page, and for a terminal. Pure."""

import contextlib
import time
from typing import Any

from zerolm import diagnosis
from zerolm.run_history import History, seconds_of
from zerolm.values import count, duration

LAST_SHARE, FEWEST_LAST = 0.02, 10  # of the lines: what "the last" loss is the mean of

MOST_ROWS = 20_000  # that are looked at for findings: it takes a second

Pair = list[str]


def facts(history: History) -> list[Pair]:
    """Return what the run is: model, profile, devices, batch, ... as it said when it started."""
    derived = history.record.get("derived")
    named = derived if isinstance(derived, dict) else {}
    wanted = ("model", "profile", "devices", "batch", "accumulation", "steps", "learning rate",
              "tokens per parameter", "FLOPs of the run", "epochs")  # fmt: skip
    found = [[name, str(named[name])] for name in wanted if name in named]
    commit = history.record.get("git_commit")
    return found + ([["commit", str(commit)[:12]]] if commit else [])


def figures(history: History) -> list[Pair]:
    """Return the headline figures: what each is, its value, and a note on it."""
    curves = history.curves
    found: list[Pair] = []

    def add(name: str, value: str, note: str = "") -> None:
        found.append([name, value, note])

    losses = curves.values("train/loss")
    if losses:
        last = losses[-max(FEWEST_LAST, round(LAST_SHARE * len(losses))) :]
        add("Training loss", f"{sum(last) / len(last):.4f}", f"mean of the last {len(last)} lines")
    if (loss := curves.last("eval/loss")) is not None:
        perplexity = curves.last("eval/perplexity")
        best = min(curves.values("eval/loss"))
        note = f"perplexity {perplexity:.4g}, " if perplexity is not None else ""
        add("Validation loss", f"{loss:.4f}", f"{note}best {best:.4f}")
    for key, name in (("eval/hellaswag/acc_norm", "HellaSwag"),):
        if (share := curves.last(key)) is not None:
            add(name, f"{share:.1%}", "acc_norm")
    if speeds := curves.values("throughput/tokens_per_second")[-20:]:
        devices = history.record.get("world_size")
        add("Speed", f"{count(sum(speeds) / len(speeds))} tok/s", f"{devices} devices")
    if shares := curves.values("throughput/mfu")[-20:]:
        add("MFU", f"{sum(shares) / len(shares):.1%}", "of the devices' peak")
    if curves.seconds:
        add("Trained", duration(curves.seconds[-1]), wall_clock(history))
    if history.checkpoints:
        name = history.checkpoints[-1].name
        add("Checkpoint", name.removeprefix("step-").lstrip("0") or "0", _age(history))
    if refused := curves.last("health/skipped_steps"):
        rollbacks = int(curves.last("health/rollbacks") or 0)
        add("Refused steps", f"{int(refused)}", f"{rollbacks} rollback(s)")
    return found


def findings(history: History) -> list[dict[str, Any]]:
    """Return what stands out in a run, in words, the gravest first."""
    events = []
    for event in history.events:
        if isinstance(event.get("loss"), str):  # written as text, since it may be nan
            with contextlib.suppress(ValueError):
                event = {**event, "loss": float(event["loss"])}
        events.append(event)
    rows = history.curves.rows(MOST_ROWS)
    return [vars(finding).copy() for finding in diagnosis.findings(rows, events)]


def wall_clock(history: History) -> str:
    """Say how long ago the run began and in how many starts."""
    times = [seconds_of(event.get("time")) for event in history.events]
    known = [seconds for seconds in times if seconds is not None]
    starts = sum(event["event"] in ("start", "resume") for event in history.events)
    if not known:
        return ""
    end = time.time() if history.state()[0] == "running" else known[-1]
    return f"{duration(end - known[0])} since it began, {starts} start{'s' * (starts != 1)}"


def _age(history: History) -> str:
    for event in reversed(history.events):
        if event["event"] == "checkpoint":
            seconds = seconds_of(event.get("time"))
            if seconds is not None and history.state()[0] == "running":
                return f"{duration(max(0.0, time.time() - seconds))} ago"
            return str(event.get("time", ""))[:16].replace("T", " ")
    return ""
