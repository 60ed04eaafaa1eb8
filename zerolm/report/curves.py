"""The lines of one `metrics.jsonl`, stored by column; a million lines take a few hundred MB."""

import math
from array import array
from collections.abc import Sequence
from typing import Any

RECENT_LINES = 20  # number of lines over which a speed is averaged

Row = dict[str, Any]


class Curves:
    """The lines of one `metrics.jsonl`, stored by column.

    Attributes:
        steps, tokens: one entry per line.
        seconds: training time up to each line, excluding checkpoints, evaluations and restarts.
        columns: {key: (indices of the lines with this key, values)}; a null value becomes NaN.
        start: step, tokens and seconds before the first line.
    """

    def __init__(self, start: tuple[int, int, float] = (0, 0, 0.0)) -> None:
        self.start = start
        self.steps, self.tokens, self.seconds = array("q"), array("q"), array("d")
        self.columns: dict[str, tuple[array[int], array[float]]] = {}

    def add(self, row: Row) -> None:
        """Append a line. A line with an earlier step replaces all lines from that step on."""
        step = row["step"]
        if self.steps and step < self.steps[-1]:
            self._truncate(step)
        seconds = self.seconds[-1] if self.seconds else self.start[2]
        of_step = row.get("throughput/step_seconds")
        if isinstance(of_step, (int, float)) and math.isfinite(of_step):
            timed, _ = self.columns.get("throughput/step_seconds", ((), ()))
            before = self.steps[timed[-1]] if timed else self.start[0]
            seconds += of_step * max(0, step - before)
        line = len(self.steps)
        self.steps.append(step)
        self.tokens.append(row["tokens"])
        self.seconds.append(seconds)
        for key, value in row.items():
            if key in ("step", "tokens"):
                continue
            if value is None:
                value = math.nan
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                lines, values = self.columns.setdefault(key, (array("q"), array("d")))
                lines.append(line)
                values.append(value)

    def _truncate(self, step: int) -> None:
        """Remove the lines for `step` and later steps."""
        while self.steps and self.steps[-1] >= step:
            for axis in (self.steps, self.tokens, self.seconds):
                axis.pop()
        for lines, values in self.columns.values():
            while lines and lines[-1] >= len(self.steps):
                lines.pop()
                values.pop()

    @property
    def duration(self) -> float:
        """Total training time of all lines, in seconds."""
        return self.seconds[-1] - self.start[2] if self.seconds else 0.0

    def before(self, step: int) -> tuple[int, int, float]:
        """Return the step, tokens and seconds of the last line before a step that has a step
        time.
        """
        timed, _ = self.columns.get("throughput/step_seconds", ((), ()))
        for line in reversed(timed):
            if self.steps[line] < step:
                return self.steps[line], self.tokens[line], self.seconds[line]
        return self.start

    def pauses(self) -> list[tuple[int, float]]:
        """Return (step, seconds) for each checkpoint pause."""
        pairs = zip(*self.columns.get("checkpoint/stall_seconds", ((), ())), strict=True)
        return [(self.steps[line], value) for line, value in pairs if math.isfinite(value)]

    def values(self, key: str) -> list[float]:
        """Return the finite values of a column, oldest first."""
        return [value for value in self.columns.get(key, ((), ()))[1] if math.isfinite(value)]

    def last(self, key: str) -> float | None:
        """Return the newest finite value of a column, or None if there is none."""
        _, values = self.columns.get(key, ((), ()))
        return next((value for value in reversed(values) if math.isfinite(value)), None)

    def recent_mean(self, key: str) -> float | None:
        """Return the mean of a column's newest finite values, or None if there are none."""
        values = self.values(key)[-RECENT_LINES:]
        return sum(values) / len(values) if values else None

    def rows(self, max_rows: int) -> list[Row]:
        """Return the original lines, sampled at regular intervals if there are many.

        Lines without a training loss (evaluations and checkpoints) are always included.

        Args:
            max_rows: maximum number of lines with a training loss.
        """
        stride = -(-len(self.steps) // max_rows) if self.steps else 1
        steps_taken = set(self.columns.get("train/loss", ((), ()))[0])
        rows: dict[int, Row] = {
            line: {"step": self.steps[line], "tokens": self.tokens[line]}
            for line in range(len(self.steps))
            if line % stride == 0 or line not in steps_taken
        }
        for key, (lines, values) in self.columns.items():
            for line, value in zip(lines, values, strict=True):
                if line in rows:
                    rows[line][key] = value if math.isfinite(value) else None
        return list(rows.values())

    def place(self, step: int) -> tuple[float, float]:
        """Return the tokens and seconds at a step by interpolation between neighbouring lines."""
        low, high = 0, len(self.steps)
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if self.steps[middle] < step else (low, middle)
        if low == len(self.steps):
            return (self.tokens[-1], self.seconds[-1]) if self.steps else self.start[1:]
        before = (self.steps[low - 1], self.tokens[low - 1], self.seconds[low - 1])
        if low == 0:
            before = self.start
        share = (step - before[0]) / max(1, self.steps[low] - before[0])
        return (
            before[1] + share * (self.tokens[low] - before[1]),
            before[2] + share * (self.seconds[low] - before[2]),
        )


def thinned(values: Sequence[float], max_points: int) -> list[int]:
    """Select the points of a curve to keep; return their indices in ascending order.

    A curve of at most `max_points` is kept completely. A longer curve is divided into intervals,
    and the lowest point, highest point and first gap of each are kept, so no outlier is lost. Both
    ends of the curve are kept.

    Args:
        values: (N,) values; NaN is a gap in the curve.
        max_points: number of points to keep, not counting gaps.
    """
    count = len(values)
    if count <= max_points:
        return list(range(count))
    num_intervals = max(1, (max_points - 2) // 2)
    chosen = {0, count - 1}
    for number in range(num_intervals):
        interval = range(count * number // num_intervals, count * (number + 1) // num_intervals)
        finite = [index for index in interval if math.isfinite(values[index])]
        if finite:
            chosen.add(min(finite, key=values.__getitem__))
            chosen.add(max(finite, key=values.__getitem__))
        if len(finite) < len(interval):
            chosen.add(next(index for index in interval if not math.isfinite(values[index])))
    return sorted(chosen)


def rounded(value: float) -> float | int | None:
    """Round a value to seven digits, the precision of float32; return None if the value is not
    finite.
    """
    if not math.isfinite(value):
        return None
    value = float(f"{value:.7g}")
    return int(value) if value.is_integer() and abs(value) < 1e15 else value
