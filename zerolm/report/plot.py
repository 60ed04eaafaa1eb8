"""`python -m zerolm plot`: the loss curves of runs as a PNG, with their events.

Reads `metrics.jsonl` and `events.jsonl` only; the runs may still be in progress.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from zerolm.common.errors import ConfigError
from zerolm.common.events import level
from zerolm.common.jsonl import EventRow, MetricsRow, read_rows
from zerolm.common.run_files import RunFiles

UNMARKED_EVENTS = {"start", "done"}
SMOOTHING_SHARE = 0.02  # of the points, to either side


def series(rows: Sequence[dict[str, Any]], key: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens and the finite values of a metric, (N,) float64 each."""
    pairs = [(row["tokens"], row[key]) for row in rows if row.get(key) is not None]
    table = np.array(pairs, dtype=np.float64).reshape(-1, 2)
    table = table[np.isfinite(table[:, 1])]  # a run that diverged ends in NaN
    return table[:, 0], table[:, 1]


def smooth(values: np.ndarray) -> np.ndarray:
    """Return the centred running mean of (N,) values; the window is shorter near both ends."""
    reach = round(len(values) * SMOOTHING_SHARE)
    sums = np.concatenate([[0.0], np.cumsum(values)])
    at = np.arange(len(values))
    widths = np.minimum(np.minimum(at, len(values) - 1 - at), reach)
    return (sums[at + widths + 1] - sums[at - widths]) / (2 * widths + 1)


def plot_losses(
    run_dirs: Sequence[str | Path], output_png: str | Path, last_step: float = math.inf
) -> Path:
    """Draw `train/loss` and `eval/loss` over tokens, one colour per run, and mark events.

    Args:
        output_png: its directory is created if it is missing.
        last_step: later steps are not drawn.

    Returns:
        `output_png`.

    Raises:
        ConfigError: some directories have no `train/loss`; each one is named.
    """

    def until(path: Path, kind: Any) -> list[dict[str, Any]]:
        return [row for row in read_rows(path, kind) if row["step"] <= last_step]

    runs = [(Path(run_dir), until(RunFiles(run_dir).metrics, MetricsRow)) for run_dir in run_dirs]
    problems = [
        f"{RunFiles(run_dir).metrics}: no train/loss in it. Give the --run_dir of a started run."
        for run_dir, rows in runs
        if not len(series(rows, "train/loss")[0])
    ]
    if problems:
        raise ConfigError(problems)
    figure = Figure(figsize=(8, 4.5), dpi=100, layout="constrained")
    axes = figure.add_subplot()
    for number, (run_dir, rows) in enumerate(runs):
        name = "" if len(runs) == 1 else f"{run_dir.name} "
        _draw_run(axes, rows, name, f"C{number}")
        _draw_events(axes, rows, until(RunFiles(run_dir).events, EventRow), f"C{number}")
    axes.set_xlabel("tokens")
    axes.set_ylabel("loss (nats per token)")
    axes.set_title(", ".join(run_dir.resolve().name for run_dir, _ in runs))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.grid(alpha=0.25)
    axes.legend(loc="upper right")
    output_png = Path(output_png)
    output_png.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output_png)
    return output_png


def _draw_run(axes: Axes, rows: Sequence[dict[str, Any]], name: str, colour: str) -> None:
    tokens, losses = series(rows, "train/loss")
    axes.plot(tokens, losses, color=colour, alpha=0.3, linewidth=1)
    axes.plot(tokens, smooth(losses), color=colour, linewidth=1.8, label=f"{name}train/loss")
    tokens, losses = series(rows, "eval/loss")
    if len(tokens):
        axes.plot(
            tokens,
            losses,
            linestyle="none",
            marker="o",
            markerfacecolor="white",
            markeredgecolor=colour,
            label=f"{name}eval/loss",
        )


def _draw_events(
    axes: Axes, rows: Sequence[dict[str, Any]], events: Sequence[dict[str, Any]], colour: str
) -> None:
    """Mark the events at the tokens of their steps; those without a step at the left."""
    tokens_of_step = {row["step"]: row["tokens"] for row in rows}
    steps = sorted(tokens_of_step)
    tokens = [tokens_of_step[step] for step in steps]
    x_tokens_y_share = axes.get_xaxis_transform()  # y is a share of the height
    remarkable: dict[float, list[str]] = {}
    for event in events:
        kind, step = event["event"], event["step"]
        where = float(np.interp(step, steps, tokens)) if step >= 0 else tokens[0]
        if kind == "checkpoint":
            axes.plot(where, 0.01, "^", color=colour, markersize=4, transform=x_tokens_y_share)
        elif level(kind) != "quiet" and kind not in UNMARKED_EVENTS:
            remarkable.setdefault(where, []).append(kind)
    for where, kinds in remarkable.items():
        axes.axvline(where, color=colour, linestyle=":", linewidth=1)
        axes.text(
            where, 0.98, ", ".join(kinds) + " ", rotation=90, fontsize=8, color=colour,
            ha="right", va="top", transform=x_tokens_y_share,
        )  # fmt: skip
