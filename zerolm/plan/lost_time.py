"""The share of time that a run loses to saves, repeated steps and restarts.

`expected` computes the share from a formula, for `launch plan` and for one fault per hour.
`measured` computes it from a run's events and pauses, for its report and `status`. Reads no
configuration.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

HOUR = 3600.0
REPEATED = "repeated steps"  # key in a recovery's `parts`, set in zerolm/watchdog/startup.py

Event = Mapping[str, Any]


@dataclass(frozen=True)
class Lost:
    """Fractions of the total time, each from 0 to 1."""

    saves: float
    repeated: float
    restarts: float

    @property
    def total(self) -> float:
        return min(1.0, self.saves + self.repeated + self.restarts)

    def __str__(self) -> str:
        return (
            f"{1 - self.total:.1%} effective; lost to saves {self.saves:.2%}, repeated steps "
            f"{self.repeated:.2%}, restarts {self.restarts:.2%}"
        )


def expected(
    mean_seconds: float,
    interval_seconds: float,
    stall_seconds: float,
    write_seconds: float,
    restart_seconds: float,
) -> Lost:
    """Return the fractions of the total time that are expected to be lost.

    Args:
        mean_seconds: mean time between two faults.
        interval_seconds: time between checkpoints; on average a fault repeats half of this time.
        stall_seconds: time that training waits for a checkpoint.
        write_seconds: time until a checkpoint is complete; a fault during the write also repeats
            the steps trained since the write began.
        restart_seconds: time from a fault until training resumes, excluding repeated steps.

    Source: the first-order estimate in Daly 2006, A higher order estimate of the optimum checkpoint
    interval for restart dumps.
    """
    return Lost(
        saves=min(1.0, stall_seconds / interval_seconds),
        repeated=min(1.0, (interval_seconds + write_seconds) / 2 / mean_seconds),
        restarts=min(1.0, restart_seconds / mean_seconds),
    )


@dataclass(frozen=True)
class Measured:
    """The time that a run has lost, computed from its events and metrics.

    Attributes:
        faults: number of recoveries.
        restart_seconds: duration of each recovery, excluding repeated steps.
        repeated_seconds: total time of steps repeated after recoveries or undone by rollbacks.
        stall_seconds: time that training paused for each checkpoint, including copies, waits and
            probes.
        write_seconds: time until each checkpoint was complete.
        checkpoint_steps: median number of steps between checkpoints; 0 if unknown.
    """

    faults: int
    restart_seconds: Sequence[float]
    repeated_seconds: float
    stall_seconds: Sequence[float]
    write_seconds: Sequence[float]
    checkpoint_steps: float

    def lost(self, trained_seconds: float) -> Lost:
        """Return the lost time so far as fractions of the total: training time plus lost time."""
        saves, restarts = sum(self.stall_seconds), sum(self.restart_seconds)
        total = max(1e-9, trained_seconds + saves + restarts + self.repeated_seconds)
        return Lost(saves / total, self.repeated_seconds / total, restarts / total)

    def lost_hourly(self, step_seconds: float) -> Lost | None:
        """Return the fractions of time expected to be lost with one fault per hour.

        Returns None until the run has recovered once and saved two checkpoints.
        """
        interval = self.checkpoint_steps * step_seconds
        if not self.restart_seconds or not interval:
            return None
        stall, write = median(self.stall_seconds), median(self.write_seconds)
        return expected(HOUR, interval, stall, write, median(self.restart_seconds))


def measured(
    events: Iterable[Event],
    pauses: Sequence[tuple[int, float]] = (),
    undone_seconds: float = 0.0,
) -> Measured:
    """Measure the lost time from a run's events; events with unexpected values are ignored.

    Args:
        pauses: (step, `checkpoint/stall_seconds`) from the run's metrics. If the metric is missing
            for a checkpoint, the copy time in its event is used instead, which is only part of the
            pause.
        undone_seconds: training time of the steps that rollbacks have undone.
    """
    rows = list(events)
    recoveries = [row for row in rows if row["event"] == "recovered" and _are_parts(row)]
    saves = [
        row
        for row in rows
        if row["event"] == "checkpoint"
        and _are_numbers(row.get("copy_seconds"), row.get("seconds"))
    ]
    paused = {step for step, _ in pauses}
    gaps = [after["step"] - before["step"] for before, after in pairwise(saves)]
    gaps = [gap for gap in gaps if gap > 0]
    repeated = [row["parts"].get(REPEATED, 0.0) for row in recoveries]
    return Measured(
        faults=len(recoveries),
        restart_seconds=[
            max(0.0, sum(row["parts"].values()) - again)
            for row, again in zip(recoveries, repeated, strict=True)
        ],
        repeated_seconds=sum(repeated) + undone_seconds,
        stall_seconds=[
            *(seconds for _, seconds in pauses),
            *(row["copy_seconds"] for row in saves if row["step"] not in paused),
        ],
        write_seconds=[row["seconds"] for row in saves],
        checkpoint_steps=median(gaps) if gaps else 0,
    )


def _are_numbers(*values: object) -> bool:
    return all(isinstance(value, (int, float)) and value >= 0 for value in values)


def _are_parts(row: Event) -> bool:
    parts = row.get("parts")
    return isinstance(parts, Mapping) and _are_numbers(*parts.values())
