"""A run directory as it can be read now: finished, going on, killed in a line, or damaged.

What `status`, `report.html` and whoever looks at a run start from. Reads files and decides nothing
about a run; never writes, and never asks for a run's lock, which a run that starts needs. What
could not be read is said in `problems`. Standard library only: a look takes no second.
"""

import json
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from zerolm import pulse
from zerolm.checkpoint_directory import by_step
from zerolm.curves import Curves
from zerolm.errors import ConfigError
from zerolm.events import EVENTS

SILENT_SECONDS = 60.0  # a heartbeat is written every two seconds
# Events that end one start of a run, and the state that it then is in.
ENDINGS = {
    "done": "done",
    "stopped": "stopped",
    "gave_up": "gave up",
    "failed": "failed",
    "rank_lost": "failed",
    "hang": "failed",
    "launcher_lost": "failed",
    "attempt_failed": "failed",
    "supervisor_stopped": "failed",
}
BEGINNINGS = ("start", "resume")

Row = dict[str, Any]


@dataclass
class History:
    """What is known of a run.

    Attributes:
        record: run.json, {} without one.
        rolled_back: the curves of each stretch that a rollback went back over.
        events: lines of events.jsonl, each with a `step`.
        samples: lines of samples.jsonl.
        heartbeats: {rank: what it last said}.
        heartbeat_age: seconds since any rank last wrote one; None without any.
        checkpoints: names of the published ones, oldest first.
        problems: what could not be read, a line each.
    """

    run_dir: Path
    record: Row = field(default_factory=dict)
    curves: Curves = field(default_factory=Curves)
    rolled_back: list[Curves] = field(default_factory=list)
    events: list[Row] = field(default_factory=list)
    samples: list[Row] = field(default_factory=list)
    heartbeats: dict[int, Row] = field(default_factory=dict)
    heartbeat_age: float | None = None
    checkpoints: list[Path] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.run_dir.resolve().name

    @property
    def settings(self) -> Row:
        settings = self.record.get("settings")
        return settings if isinstance(settings, dict) else {}

    @property
    def total_tokens(self) -> int | None:
        total = self.settings.get("total_tokens")
        return total if isinstance(total, int) and total > 0 else None

    @property
    def total_steps(self) -> int | None:
        """As planned, or as many as were taken: a refused step brings another one."""
        derived = self.record.get("derived")
        words = derived.get("steps", "") if isinstance(derived, dict) else ""
        found = re.match(r"[\d,]+", str(words))
        return max(int(found[0].replace(",", "")), self.step) if found else None

    @property
    def step(self) -> int:
        return self.curves.steps[-1] if self.curves.steps else 0

    @property
    def tokens(self) -> int:
        return self.curves.tokens[-1] if self.curves.tokens else 0

    def seconds_left(self) -> float | None:
        """Return the seconds of training to the end, at the speed of the last lines."""
        speeds = self.curves.values("throughput/tokens_per_second")[-20:]
        if not speeds or self.total_tokens is None:
            return None
        return max(0, self.total_tokens - self.tokens) / (sum(speeds) / len(speeds))

    def state(self) -> tuple[str, str]:
        """Return the state, and a few words on it.

        The state is one of `running`, `done`, `stopped`, `gave up`, `failed`, `silent` (it should
        be running, but nothing is heard of it) and `new` (nothing has begun).
        """
        for event in reversed(self.events):
            kind = event["event"]
            if kind in ENDINGS:
                return ENDINGS[kind], str(event.get("reason") or event.get("ended") or "")
            if kind in BEGINNINGS:
                break
        else:
            if self.heartbeat_age is None and not self.curves.steps:
                return "new", "nothing has been trained yet"
        if self.heartbeat_age is None:
            return "silent", "no heartbeats in ranks/"
        if self.heartbeat_age > SILENT_SECONDS:
            return "silent", f"no heartbeat for {self.heartbeat_age:.0f} s: killed, or suspended"
        phases = sorted({str(beat.get("phase")) for beat in self.heartbeats.values()})
        return "running", ", ".join(phases)


def read(run_dir: str | Path) -> History:
    """Read a run directory.

    Raises:
        ConfigError: it is not one: it has neither run.json, metrics.jsonl nor events.jsonl.
    """
    run_dir = Path(run_dir)
    names = ("run.json", "metrics.jsonl", EVENTS)
    if not any((run_dir / name).is_file() for name in names):
        raise ConfigError(
            f"{run_dir}: has no {', '.join(names[:-1])} or {names[-1]}. Name the --run_dir of a "
            f"run that has begun."
        )
    history = History(run_dir)
    problems = history.problems
    try:
        record = json.loads((run_dir / "run.json").read_text(encoding="utf-8"))
        history.record = record if isinstance(record, dict) else {}
    except (OSError, ValueError) as error:
        problems.append(f"run.json: {error}")
    _fill(history.curves, run_dir / "metrics.jsonl", problems)
    for path in sorted(run_dir.glob("metrics-rolled-back-*.jsonl")):
        history.rolled_back.append(Curves())
        _fill(history.rolled_back[-1], path, problems)
    history.events = [
        {**row, "event": str(row["event"])}
        for row in _lines(run_dir / EVENTS, problems, ("event",), ("step",))
    ]
    history.samples = list(
        _lines(run_dir / "samples.jsonl", problems, ("prompt", "text"), ("step", "tokens"))
    )
    history.heartbeats = pulse.read_heartbeats(run_dir)
    times = []
    for path in (run_dir / pulse.RANKS).glob("rank-*.json"):
        try:
            times.append(path.stat().st_mtime)
        except OSError:
            continue  # the run that begins again has removed it
    history.heartbeat_age = max(0.0, time.time() - max(times)) if times else None
    history.checkpoints = by_step(run_dir / "checkpoints")
    return history


def read_all(run_dirs: Sequence[str | Path]) -> list[History]:
    """Read run directories.

    Raises:
        ConfigError: each one that is none.
    """
    histories, problems = [], []
    for run_dir in run_dirs:
        try:
            histories.append(read(run_dir))
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    return histories


def _fill(curves: Curves, path: Path, problems: list[str]) -> None:
    for row in _lines(path, problems, (), ("step", "tokens")):
        curves.add(row)


def _lines(
    path: Path, problems: list[str], keys: tuple[str, ...], numbers: tuple[str, ...]
) -> Iterator[Row]:
    """Yield the lines that can be read and have these keys; say how many could not.

    A last line without its end is being written, or its writer was killed: that is no damage.
    """
    bad: list[int] = []
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                try:
                    row = json.loads(line.decode("utf-8", errors="replace"))
                    whole = isinstance(row, dict) and all(key in row for key in keys)
                    whole = whole and all(type(row.get(key)) is int for key in numbers)
                except ValueError:
                    whole = False
                if whole:
                    yield row
                elif line.endswith(b"\n"):
                    bad.append(number)
    except FileNotFoundError:
        return
    except OSError as error:
        problems.append(f"{path.name}: {error}")
    if bad:
        shown = ", ".join(map(str, bad[:5])) + (", ..." if len(bad) > 5 else "")
        problems.append(f"{path.name}: {len(bad)} lines cannot be read: {shown}")


def seconds_of(stamp: object) -> float | None:
    """Return a time of events.jsonl as seconds since 1970."""
    try:
        return datetime.strptime(str(stamp), "%Y-%m-%dT%H:%M:%S%z").timestamp()
    except ValueError:
        return None
