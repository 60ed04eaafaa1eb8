"""`zerolm status RUN`: print the state of runs, read from their files.

Prints a coloured table to a terminal, plain lines to a pipe, and JSON for programs. Needs no
connection to the run's machines. Must not import torch, so it responds in a fraction of a second (3
s for 40,000 lines of 80 metrics).
"""

import contextlib
import math
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from zerolm.common.values import count, duration, printable, strict_json
from zerolm.report.event_list import merged
from zerolm.report.run_history import RunHistory, read_runs, seconds_of
from zerolm.report.summary import findings, lost_time
from zerolm.run_dir import events
from zerolm.run_dir.records import lineage

WATCH_SECONDS = 2.0
SHORT = ("step", "loss", "speed")  # rows that `--watch` shows for each of several runs
LAST_EVENTS = 5
MOST_RESULTS = 10  # shown of the last evaluation, which may have a hundred
SPARKS, SPARK_POINTS = "▁▂▃▄▅▆▇█", 32
COLOURS = {
    "running": "bold cyan", "done": "bold green", "stopped": "bold yellow",
    "silent": "bold yellow", "failed": "bold red", "gave up": "bold red", "new": "dim",
    "bad": "red", "notable": "yellow", "plain": "", "quiet": "dim",
}  # fmt: skip

Row = dict[str, Any]


def print_status(run_dirs: Sequence[Path], *, watch: bool, as_json: bool) -> None:
    """Print the status of runs, once or, with `watch`, repeatedly until Ctrl-C.

    Raises:
        ConfigError: some directories are not run directories.
    """
    if as_json:
        for run in read_runs(run_dirs):
            print(strict_json(status_of(run)))
        return
    with contextlib.suppress(KeyboardInterrupt):
        (_show_live if sys.stdout.isatty() else _show_plain)(run_dirs, watch)


def _show_plain(run_dirs: Sequence[Path], watch: bool) -> None:
    while True:
        for run in read_runs(run_dirs):
            print("\n".join(plain_lines(status_of(run))), flush=True)
        if not watch:
            return
        time.sleep(WATCH_SECONDS)


def _show_live(run_dirs: Sequence[Path], watch: bool) -> None:
    from rich.console import Console, Group
    from rich.live import Live

    console = Console(file=getattr(sys.stdout, "stream", sys.stdout), highlight=False)

    short = watch and len(run_dirs) > 1  # the screen cannot be scrolled

    def panels() -> Group:
        return Group(*(panel(status_of(run), short) for run in read_runs(run_dirs)))

    if not watch:
        console.print(panels())
        return
    with Live(panels(), console=console, auto_refresh=False, vertical_overflow="ellipsis") as live:
        while True:
            time.sleep(WATCH_SECONDS)
            live.update(panels(), refresh=True)


def status_of(run: RunHistory) -> Row:
    """Return a run's status as printed by `--json`; unknown values are None."""
    curves, now = run.curves, time.time()
    state, why = run.state()
    return {
        "run": str(run.run_dir),
        "state": state,
        "why": why,
        "branch": run.branch or None,
        "step": run.step,
        "total_steps": run.total_steps,
        "tokens": run.tokens,
        "total_tokens": run.total_tokens,
        "init_from": (run.record.get("initial_weights") or {}).get("source"),
        "loss": curves.last("train/loss"),
        "losses": _interval_means(curves.values("train/loss")),
        "tokens_per_second": curves.recent_mean("throughput/tokens_per_second"),
        "mfu": curves.last("throughput/mfu"),
        "seconds_left": run.seconds_left() if state == events.RUNNING else None,
        "checkpoint": run.checkpoints[-1].name if run.checkpoints else None,
        "checkpoint_age_seconds": _age(run, "checkpoint", now),
        "startup": _last_event(run, "startup", ("seconds", "parts")),
        "recovered": _last_event(run, "recovered", ("seconds", "parts", "repeated_steps")),
        "lost_time": _lost_time(run),
        "evaluation": _evaluation(run),
        "events": [
            {
                "event": event["event"],
                "step": event["step"],
                "time": event.get("time"),
                "level": events.level(event["event"]),
                "words": events.message(event),
            }
            for event in _last_events(run)
        ],
        "ranks": _ranks(run),
        "heartbeat_age_seconds": run.heartbeat_age,
        "findings": findings(run),
        "problems": run.problems,
    }


def _last_event(run: RunHistory, name: str, keys: Sequence[str]) -> Row | None:
    """Return the values of `keys` in the last event with this name, or None if there is none."""
    found = [event for event in run.events if event["event"] == name]
    return {key: found[-1].get(key) for key in keys} if found else None


def _lost_time(run: RunHistory) -> Row | None:
    if (found := lost_time(run)) is None:
        return None
    lost, hourly, faults = found
    text = f"{lost}; {faults} fault{'s' * (faults != 1)}"
    text += f"; with one per hour {1 - hourly.total:.1%} effective" if hourly is not None else ""
    return {
        "faults": faults,
        **vars(lost),
        "hourly": vars(hourly) if hourly else None,
        "words": text,
    }


def _interval_means(values: Sequence[float]) -> list[float]:
    """Divide a curve into at most `SPARK_POINTS` intervals, and return the mean of each."""
    number = min(SPARK_POINTS, len(values))
    bounds = [len(values) * index // number for index in range(number + 1)] if number else []
    return [sum(values[low:high]) / (high - low) for low, high in pairwise(bounds)]


def sparkline(values: Sequence[float]) -> str:
    """Draw a curve as a line of block characters."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    low, span = min(finite), (max(finite) - min(finite)) or 1.0
    top = len(SPARKS) - 1
    return "".join(
        SPARKS[round((value - low) / span * top)] if math.isfinite(value) else " "
        for value in values
    )


def _last_events(run: RunHistory) -> list[Row]:
    """Return the last events, except quiet ones."""
    shown = [event for event in merged(run.events) if events.level(event["event"]) != "quiet"]
    return shown[-LAST_EVENTS:]


def _evaluation(run: RunHistory) -> Row | None:
    """Return the last step that was evaluated, with the metrics of the evaluation."""
    columns = {key: column for key, column in run.curves.columns.items() if key.startswith("eval/")}
    if not columns:
        return None
    step = run.curves.steps[max(lines[-1] for lines, _ in columns.values())]
    newest: Row = {"step": step}
    for key, (lines, values) in sorted(columns.items()):
        if run.curves.steps[lines[-1]] == step and math.isfinite(values[-1]):
            newest[key] = values[-1]
    return newest


def _ranks(run: RunHistory) -> Row:
    """Return the number of ranks: in total, on each host, and in each phase."""
    beats = list(run.heartbeats.values())
    hosts: dict[str, int] = {}
    phases: dict[str, int] = {}
    for beat in beats:
        hosts[str(beat.get("host"))] = hosts.get(str(beat.get("host")), 0) + 1
        running = beat.get("state") == "running"
        phase = str(beat.get("phase") if running else beat.get("reason") or beat.get("state"))
        phases[phase] = phases.get(phase, 0) + 1
    quiet = max((float(beat.get("quiet_seconds") or 0) for beat in beats), default=0.0)
    return {"count": len(beats), "hosts": hosts, "phases": phases, "quiet_seconds": quiet}


def _age(run: RunHistory, kind: str, now: float) -> float | None:
    """Return the seconds since the last event of this kind, or None if there is none."""
    for event in reversed(run.events):
        if event["event"] == kind and (then := seconds_of(event.get("time"))) is not None:
            return max(0.0, now - then)
    return None


# ---- Text output


def lines(status: Row) -> list[tuple[str, str]]:
    """Return the rows of a run's status as (label, text)."""
    found: list[tuple[str, str]] = []
    total, share = status["total_steps"], 0.0
    if status["total_tokens"]:
        # The last batch is full, so the tokens may exceed the total.
        share = min(1.0, status["tokens"] / status["total_tokens"])
    of_steps = f" of {total:,}" if total else ""
    of_tokens = f" of {count(status['total_tokens'])}" if status["total_tokens"] else ""
    found.append(
        ("step", f"{status['step']:,}{of_steps}, {count(status['tokens'])}{of_tokens} tokens, "
         f"{share:.1%}")
    )  # fmt: skip
    if status["branch"]:
        found.append(("branch", f"of {lineage(status['branch'])}"))
    if status["init_from"]:
        found.append(("weights", f"from {status['init_from']}"))
    if status["loss"] is not None:
        found.append(("loss", f"{status['loss']:.4f}  {sparkline(status['losses'])}"))
    if status["tokens_per_second"] is not None:
        speed = f"{count(status['tokens_per_second'])} tokens/s"
        speed += f", MFU {status['mfu']:.1%}" if status["mfu"] is not None else ""
        if status["seconds_left"] is not None:
            speed += f", {duration(status['seconds_left'])} to go"
        found.append(("speed", speed))
    for name in ("startup", "recovered"):
        if status[name]:
            found.append((name, events.message({"event": name, **status[name]})))
    if status["lost_time"]:
        found.append(("time", status["lost_time"]["words"]))
    if status["checkpoint"]:
        age = status["checkpoint_age_seconds"]
        ago = f", {duration(age)} ago" if age is not None else ""
        found.append(("checkpoint", status["checkpoint"] + ago))
    if status["evaluation"]:
        keys = sorted(status["evaluation"].keys() - {"step"}, key=lambda key: (key.count("/"), key))
        results = [
            f"{key.removeprefix('eval/')} {status['evaluation'][key]:.4g}"
            for key in keys[:MOST_RESULTS]
        ]
        if len(keys) > MOST_RESULTS:
            results.append(f"{len(keys) - MOST_RESULTS} more in the report")
        found.append(("evaluation", f"step {status['evaluation']['step']:,}: {', '.join(results)}"))
    ranks = status["ranks"]
    if ranks["count"]:
        hosts = ", ".join(f"{host} ({number})" for host, number in ranks["hosts"].items())
        phases = ", ".join(f"{number} {phase}" for phase, number in ranks["phases"].items())
        age = duration(status["heartbeat_age_seconds"])
        found.append(("ranks", f"{ranks['count']} on {hosts}: {phases}; last heartbeat {age} ago"))
    return found


def plain_lines(status: Row) -> list[str]:
    """Return a status as lines without colours, for a pipe or log file."""
    why = f" ({status['why']})" if status["why"] else ""
    rows = [f"{status['run']}: {status['state']}{why}"]
    rows += [f"  {name:<12}{text}" for name, text in lines(status)]
    rows += [f"  {'event':<12}{_event_line(event)}" for event in status["events"]]
    rows += [f"  {'finding':<12}{text}" for text in _finding_texts(status["findings"])]
    rows += [f"  {'unreadable':<12}{problem}" for problem in status["problems"]]
    return [printable(row) for row in rows]


def _finding_texts(found: Sequence[Row]) -> list[str]:
    """Return the texts of findings; advice that several share is added only to the first of
    them.
    """
    texts: list[str] = []
    advised = {""}
    for finding in found:
        new = finding["advice"] not in advised
        texts.append(f"{finding['text']} {finding['advice']}" if new else finding["text"])
        advised.add(finding["advice"])
    return texts


def _event_line(event: Row) -> str:
    step = f"step {event['step']:,}  " if event["step"] >= 0 else ""
    return f"{str(event['time'])[:19].replace('T', ' ')}  {step}" + (
        f"{event['event'].replace('_', ' ')}: {event['words']}".rstrip(": ")
    )


def panel(status: Row, short: bool = False) -> Any:
    """Return a `rich` panel that shows a run's status. Text from files is never interpreted as
    markup.

    Args:
        short: whether to show only the step, loss, speed and last event.
    """
    from rich.console import Group
    from rich.panel import Panel
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text as Styled

    def text_of(text: str, style: str = "") -> Styled:
        return Styled(printable(text), style=style)

    colour = COLOURS[status["state"]]
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in lines(status):
        if short and name not in SHORT:
            continue
        table.add_row(name, text_of(text))
        if name == "step" and status["total_tokens"]:
            done = min(status["tokens"], status["total_tokens"])
            total = status["total_tokens"]
            bar = ProgressBar(total, done, 48, complete_style=colour, finished_style=colour)
            table.add_row("", bar)
    for event in status["events"][-1:] if short else status["events"]:
        table.add_row("event", text_of(_event_line(event), style=COLOURS[event["level"]]))
    for text in [] if short else _finding_texts(status["findings"]):
        table.add_row("finding", text_of(text, style="yellow"))
    for problem in status["problems"]:
        table.add_row("unreadable", text_of(problem, style="red"))
    title = Styled.assemble((printable(status["run"]), "bold"), "  ", (status["state"], colour))
    parts: list[Any] = [table]
    if status["why"]:
        parts.insert(0, text_of(status["why"], style=colour))
    return Panel(Group(*parts), title=title, title_align="left", border_style=colour)
