"""The lines of one `metrics.jsonl` by column: a million of them in some hundred megabytes. Pure."""

import math
from array import array
from typing import Any

Row = dict[str, Any]


class Curves:
    """The lines of one `metrics.jsonl`, by column.

    Attributes:
        steps, tokens: of each line.
        seconds: of training until then, without saving, evaluating and the time between starts.
        columns: {key: (numbers of the lines that have it, its values; NaN for null)}.
    """

    def __init__(self) -> None:
        self.steps, self.tokens, self.seconds = array("q"), array("q"), array("d")
        self.columns: dict[str, tuple[array[int], array[float]]] = {}

    def add(self, row: Row) -> None:
        """Append a line. One of an earlier step replaces the lines from that step on."""
        step = row["step"]
        if self.steps and step < self.steps[-1]:
            self._cut(step)
        seconds = self.seconds[-1] if self.seconds else 0.0
        if isinstance(row.get("throughput/step_seconds"), (int, float)):
            timed, _ = self.columns.get("throughput/step_seconds", ((), ()))
            before = self.steps[timed[-1]] if timed else 0
            seconds += row["throughput/step_seconds"] * max(0, step - before)
        number = len(self.steps)
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
                lines.append(number)
                values.append(value)

    def _cut(self, step: int) -> None:
        while self.steps and self.steps[-1] >= step:
            for part in (self.steps, self.tokens, self.seconds):
                part.pop()
        for lines, values in self.columns.values():
            while lines and lines[-1] >= len(self.steps):
                lines.pop()
                values.pop()

    def values(self, key: str) -> list[float]:
        """Return the finite values of a column, oldest first."""
        return [value for value in self.columns.get(key, ((), ()))[1] if math.isfinite(value)]

    def last(self, key: str) -> float | None:
        """Return the newest finite value of a column."""
        _, values = self.columns.get(key, ((), ()))
        return next((value for value in reversed(values) if math.isfinite(value)), None)

    def rows(self, most: int) -> list[Row]:
        """Return the lines as they were written, of many steps only every second, third ...

        Lines of evaluations and checkpoints, which have no training loss, are always there.
        """
        stride = -(-len(self.steps) // most) if self.steps else 1
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
        """Return the tokens and seconds at a step, between the lines around it."""
        low, high = 0, len(self.steps)
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if self.steps[middle] < step else (low, middle)
        if low == len(self.steps):
            return (self.tokens[-1], self.seconds[-1]) if self.steps else (0.0, 0.0)
        before = (self.steps[low - 1], self.tokens[low - 1], self.seconds[low - 1])
        if low == 0:
            before = (0, 0, 0.0)
        share = (step - before[0]) / max(1, self.steps[low] - before[0])
        return (
            before[1] + share * (self.tokens[low] - before[1]),
            before[2] + share * (self.seconds[low] - before[2]),
        )
