"""Building blocks for `zerolm.report.diagnosis`: findings, and the values of one metric."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from zerolm.optim.spikes import MAD_TO_DEVIATION

Row = Mapping[str, Any]

RECENT_ROWS = 20  # number of rows used to judge speed and update sizes


@dataclass(frozen=True)
class Finding:
    """One problem with a run, with advice for the user.

    Attributes: kind: "divergence", "spike", "plateau", "overfitting", "validation", "clipping",
        "update_ratio", "repeated_data", "slow_data", "low_mfu", "falling_mfu", "slow_rank",
        "uneven_experts", "uneven_pipeline", "checkpoint_stalls" or "slow_host".
        step, tokens: where in the run the problem occurred.
        text: one or two sentences on what the metrics show, and what to try.
        advice: what to try, if it applies to several findings; it is then shown only once.
    """

    kind: str
    step: int
    tokens: int
    text: str
    advice: str = ""


@dataclass(frozen=True)
class Point:
    """A metric value, and its position in the run."""

    step: int
    tokens: int
    value: float


def points_of(rows: Iterable[Row], key: str) -> list[Point]:
    """Return the points of a metric whose values are finite."""
    return [
        Point(row["step"], row["tokens"], float(row[key]))
        for row in rows
        if isinstance(row.get(key), int | float) and math.isfinite(row[key])
    ]


def recent_of(rows: Iterable[Row], key: str) -> list[Point]:
    """Return the last `RECENT_ROWS` points of a metric, or an empty list if there are fewer."""
    points = points_of(rows, key)[-RECENT_ROWS:]
    return points if len(points) == RECENT_ROWS else []


def median_of(points: Iterable[Point]) -> float:
    """Return the median of the points' values."""
    return statistics.median(point.value for point in points)


def noise_of(points: Sequence[Point]) -> float:
    """Return a robust estimate of the standard deviation of the noise around a smooth curve."""
    steps = [abs(b.value - a.value) for a, b in pairwise(points)]
    return MAD_TO_DEVIATION * statistics.median(steps) / math.sqrt(2) if steps else 0.0


def finding_at(kind: str, at: Point, text: str, advice: str = "") -> Finding:
    """Return a finding that refers to the step and tokens of a point."""
    return Finding(kind, at.step, at.tokens, text, advice)
