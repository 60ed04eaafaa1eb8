"""The key figures of a run, for the header of its report and for `status`."""

import contextlib
import time
from typing import Any

from zerolm.common.values import count, duration, shown_bytes
from zerolm.evaluate import EVALUATIONS
from zerolm.plan.lost_time import Lost, measured
from zerolm.report import diagnosis
from zerolm.report.curves import Curves
from zerolm.report.run_history import RunHistory, seconds_of
from zerolm.run_dir.events import RUNNING, state_after
from zerolm.run_dir.files import checkpoint_step
from zerolm.run_dir.records import lineage
from zerolm.tracking.wandb_identity import page_of

LAST_SHARE, MIN_LAST_LINES = 0.02, 10  # lines over which the training loss is averaged
MAX_ROWS = 20_000  # maximum number of rows to diagnose, which takes about a second
VERSIONS = ("zerolm", "torch", "deepspeed", "transformers", "CUDA", "NCCL", "NVIDIA driver",
            "python")  # fmt: skip

Pair = list[str]


def facts(run: RunHistory) -> list[Pair]:
    """Return facts about the run, such as its model, profile and batch, as printed when it started.

    The value for `W&B` is a URL.
    """
    names = ("model", "initial weights", "profile", "devices", "batch", "accumulation", "steps",
             "learning rate", "tokens per parameter", "FLOPs of the run", "epochs")  # fmt: skip
    found = [["branch", f"of {lineage(run.branch)}"]] if run.branch else []
    found += [[name, str(run.derived[name])] for name in names if name in run.derived]
    versions = run.record.get("versions") or {}
    others = {
        "hardware": _hardware(run),
        "versions": ", ".join(f"{name} {versions[name]}" for name in VERSIONS if name in versions),
        "commit": str(run.record.get("git_commit") or "")[:12],
        "W&B": page_of(run.run_dir),
    }
    return found + [[name, value] for name, value in others.items() if value]


def _hardware(run: RunHistory) -> str:
    """Describe the device, and the first rank's host with its cores and memory."""
    record = run.record
    hosts = {beat["host"] for beat in run.heartbeats.values()}
    parts = [record.get("device"), record.get("host")]
    parts += [f"{cores} cores" if (cores := record.get("host_cores")) else None]
    parts += [shown_bytes(size) if (size := record.get("host_memory_bytes")) else None]
    parts += [f"one of {len(hosts)} hosts" if len(hosts) > 1 else None]
    return ", ".join(str(part) for part in parts if part)


def figures(run: RunHistory, price_per_hour: float | None = None) -> list[Pair]:
    """Return the key figures, each as a name, a value and a note.

    Args:
        price_per_hour: dollars per device-hour.
    """
    curves = run.curves
    found: list[Pair] = []

    def add(name: str, value: str, note: str = "") -> None:
        found.append([name, value, note])

    if (training := last_training_loss(curves)) is not None:
        add("Training loss", f"{training[0]:.4f}", f"mean of the last {training[1]} lines")
    if (loss := curves.last("eval/loss")) is not None:
        perplexity = curves.last("eval/perplexity")
        best = min(curves.values("eval/loss"))
        note = f"perplexity {perplexity:.4g}, " if perplexity is not None else ""
        add("Validation loss", f"{loss:.4f}", f"{note}best {best:.4f}")
    for key, data in (("eval", "of the validation data"), ("train", "of the last step")):
        if (bits := curves.last(f"{key}/bits_per_byte")) is not None:
            add("Bits per byte", f"{bits:.4f}", data)
            break
    for each in (headline for kind in EVALUATIONS for headline in kind.HEADLINES):
        if (score := curves.last(each.key)) is not None:
            add(each.label, each.template.format(score), each.note)
    if (speed := curves.recent_mean("throughput/tokens_per_second")) is not None:
        devices = run.record.get("world_size")
        note = f"{devices} devices" if devices else ""  # "" without a run.json
        add("Speed", f"{count(speed)} tok/s", note)
    if (share := curves.recent_mean("throughput/mfu")) is not None:
        add("MFU", f"{share:.1%}", "of the devices' peak")
    if curves.seconds:
        add("Trained", duration(run.trained_seconds), wall_clock(run))
    if (hours := device_hours(run)) is not None:
        price = f"${hours * price_per_hour:,.2f}" if price_per_hour is not None else ""
        note = (
            f"at ${price_per_hour:g} an hour" if price else "over all starts, including idle time"
        )
        add("Device-hours", f"{hours:.3g}", f"{price} {note}".strip())
    if (times := lost_time(run)) is not None:
        lost, hourly, faults = times
        value, note = str(lost).split(" effective; ")
        note += f"; {faults} fault{'s' * (faults != 1)}"
        note += f"; with one per hour {1 - hourly.total:.1%}" if hourly is not None else ""
        add("Effective time", value, note)
    if run.checkpoints:
        add("Checkpoint", str(checkpoint_step(run.checkpoints[-1].name)), _age(run))
    if refused := curves.last("health/skipped_steps"):
        rollbacks = int(curves.last("health/rollbacks") or 0)
        add("Refused steps", f"{int(refused)}", f"{rollbacks} rollback(s)")
    return found


def last_training_loss(curves: Curves) -> tuple[float, int] | None:
    """Return the mean training loss over the last lines, and the number of these lines.

    Returns None if no line has a training loss.
    """
    losses = curves.values("train/loss")
    last = losses[-max(MIN_LAST_LINES, round(LAST_SHARE * len(losses))) :]
    return (sum(last) / len(last), len(last)) if last else None


def lost_time(run: RunHistory) -> tuple[Lost, Lost | None, int] | None:
    """Return the time lost so far, the time expected to be lost with one fault per hour, and the
    number of faults.

    The total comprises training, saves, repeated and undone steps and recoveries, but not
    evaluations. Returns None until there is a save, recovery or rollback.
    """
    found = measured(
        run.events,
        [pause for curves in (run.curves, *run.rolled_back) for pause in curves.pauses()],
        sum(undone.duration for undone in run.rolled_back),
    )
    if not run.curves.seconds or not (
        found.faults or found.stall_seconds or found.repeated_seconds
    ):
        return None
    step_seconds = run.curves.last("throughput/step_seconds") or 0.0
    return found.lost(run.trained_seconds), found.lost_hourly(step_seconds), found.faults


def device_hours(run: RunHistory) -> float | None:
    """Return the device-hours used, counted from each launch until its last event or until now.

    Returns None if no event records when the run started and on how many devices.
    """
    device_seconds, devices, began, last = 0.0, 0, 0.0, 0.0
    previous = ""
    for event in run.events:
        kind, when = event["event"], seconds_of(event.get("time"))
        if when is None:
            continue
        if state_after(kind) == RUNNING and previous != "rollback":  # a rollback resumes in place
            device_seconds += devices * max(0.0, last - began)
            devices, began = event.get("world_size") or 0, when
        elif kind == "startup":
            began = min(began, when - event.get("seconds", 0.0))
        last, previous = when, kind
    if run.state()[0] == RUNNING:
        last = time.time()
    device_seconds += devices * max(0.0, last - began)
    return device_seconds / 3600 if device_seconds else None


def findings(run: RunHistory) -> list[dict[str, Any]]:
    """Diagnose a run; return the findings, the most severe first."""
    listed = []
    for event in run.events:
        if isinstance(event.get("loss"), str):  # written as text because it may be NaN
            with contextlib.suppress(ValueError):
                event = {**event, "loss": float(event["loss"])}
        listed.append(event)
    rows = run.curves.rows(MAX_ROWS)
    return [vars(finding).copy() for finding in diagnosis.findings(rows, listed)]


def wall_clock(run: RunHistory) -> str:
    """Return the wall-clock time since the run first started, and the number of starts."""
    times = [seconds_of(event.get("time")) for event in run.events]
    known = [seconds for seconds in times if seconds is not None]
    starts = sum(state_after(event["event"]) == RUNNING for event in run.events)
    if not known:
        return ""
    end = time.time() if run.state()[0] == RUNNING else known[-1]
    return (
        f"{duration(max(0.0, end - known[0]))} since it began, {starts} start{'s' * (starts != 1)}"
    )


def _age(run: RunHistory) -> str:
    for event in reversed(run.events):
        if event["event"] == "checkpoint":
            seconds = seconds_of(event.get("time"))
            if seconds is not None and run.state()[0] == RUNNING:
                return f"{duration(max(0.0, time.time() - seconds))} ago"
            return str(event.get("time", ""))[:16].replace("T", " ")
    return ""
