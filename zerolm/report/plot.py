"""`zerolm plot`: draw the loss curves and events of runs as a PNG.

Reads only `metrics.jsonl` and `events.jsonl`; the runs may still be in progress.
"""

import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import EngFormatter
from matplotlib.transforms import Bbox

from zerolm.common.errors import ConfigError
from zerolm.run_dir.events import level
from zerolm.run_dir.files import RunFiles
from zerolm.run_dir.jsonl import EventRow, MetricsRow, read_rows

UNMARKED_EVENTS = {"start", "done"}
SMOOTHING_SHARE = 0.02  # fraction of the points, on either side of a point, to average over
GROUPED_SHARE = 0.025  # fraction of the tokens; events closer together than this share a label
LABEL_CHARACTERS, LABEL_GAP = 40, 4.0  # characters per line; pixels between two labels


def series(rows: Sequence[dict[str, Any]], key: str) -> tuple[np.ndarray, np.ndarray]:
    """Return a metric's finite values and their token counts as (tokens, values), each (N,)
    float64.
    """
    pairs = [(row["tokens"], row[key]) for row in rows if row.get(key) is not None]
    table = np.array(pairs, dtype=np.float64).reshape(-1, 2)
    table = table[np.isfinite(table[:, 1])]  # the values of a run that diverged end in NaN
    return table[:, 0], table[:, 1]


def smooth(values: np.ndarray) -> np.ndarray:
    """Return the centred running mean of (N,) values; the window shrinks near both ends."""
    reach = round(len(values) * SMOOTHING_SHARE)
    sums = np.concatenate([[0.0], np.cumsum(values)])
    at = np.arange(len(values))
    widths = np.minimum(np.minimum(at, len(values) - 1 - at), reach)
    return (sums[at + widths + 1] - sums[at - widths]) / (2 * widths + 1)


def plot_losses(
    run_dirs: Sequence[str | Path],
    output_png: str | Path | None = None,
    last_step: float = math.inf,
) -> Path:
    """Draw `train/loss` and `eval/loss` over tokens, one colour per run, and mark events.

    Args:
        output_png: file to write, in a directory that is created if missing; default: `loss.png` in
            the first run directory.
        last_step: last step to draw.

    Returns:
        The path of the image.

    Raises:
        ConfigError: some directories have no `train/loss`; lists all of them.
    """
    figure = draw_losses(run_dirs, last_step)
    output_png = Path(output_png) if output_png is not None else RunFiles(run_dirs[0]).plot
    output_png.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output_png)
    return output_png


def draw_losses(run_dirs: Sequence[str | Path], last_step: float = math.inf) -> Figure:
    """Return the figure that `plot_losses` saves."""

    unread: list[str] = []

    def until(path: Path, kind: Any) -> list[dict[str, Any]]:
        return [row for row in read_rows(path, kind, unread) if row["step"] <= last_step]

    runs = [(Path(run_dir), until(RunFiles(run_dir).metrics, MetricsRow)) for run_dir in run_dirs]
    problems = [
        f"{run_dir}: no train/loss in its metrics.jsonl. Give the --run_dir of a started run."
        if Path(run_dir).is_dir()
        else f"{run_dir}: no such directory. Give the --run_dir of a started run."
        for run_dir, rows in runs
        if not len(series(rows, "train/loss")[0])
    ]
    if problems:
        raise ConfigError(unread or problems)
    figure = Figure(figsize=(8, 4.5), dpi=100, layout="constrained")
    axes, labels = figure.add_subplot(), []
    for number, (run_dir, rows) in enumerate(runs):
        name = "" if len(runs) == 1 else f"{run_dir.name} "
        _draw_run(axes, rows, name, f"C{number}")
        labels += _draw_events(axes, rows, until(RunFiles(run_dir).events, EventRow), f"C{number}")
    axes.set_xlabel("tokens")
    axes.set_ylabel("loss (nats per token)")
    axes.set_title(", ".join(run_dir.resolve().name for run_dir, _ in runs))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.grid(alpha=0.25)
    legend = axes.legend(loc="upper right")
    FigureCanvasAgg(figure).draw()  # lays out the figure, in pixels
    _separate(axes, labels, legend.get_window_extent())
    return figure


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
) -> list[Text]:
    """Mark events at the token counts of their steps, and events without a step at the left edge.

    Returns: A label for each group of nearby events.
    """
    tokens_of_step = {row["step"]: row["tokens"] for row in rows}
    steps = sorted(tokens_of_step)
    tokens = [tokens_of_step[step] for step in steps]
    x_tokens_y_share = axes.get_xaxis_transform()  # y is a fraction of the height
    remarkable: list[tuple[float, str]] = []
    for event in events:
        kind, step = event["event"], event["step"]
        where = float(np.interp(step, steps, tokens)) if step >= 0 else tokens[0]
        if kind == "checkpoint":
            axes.plot(where, 0.01, "^", color=colour, markersize=4, transform=x_tokens_y_share)
        elif level(kind) != "quiet" and kind not in UNMARKED_EVENTS:
            remarkable.append((where, kind))
    groups: list[tuple[float, list[str]]] = []
    for where, kind in sorted(remarkable, key=lambda each: each[0]):
        if not groups or where - groups[-1][0] > GROUPED_SHARE * tokens[-1]:
            groups.append((where, []))
        groups[-1][1].append(kind)
    for where in {where for where, _ in remarkable}:
        axes.axvline(where, color=colour, linestyle=":", linewidth=1)
    return [
        axes.text(
            where, 0.98, textwrap.fill(_counted(kinds), LABEL_CHARACTERS), rotation=90, fontsize=8,
            color=colour, ha="right", va="top", transform=x_tokens_y_share,
        )
        for where, kinds in groups
    ]  # fmt: skip


def _counted(kinds: Sequence[str]) -> str:
    """Return how often each kind of event occurred, as text such as `2 x step skipped, resume`."""
    numbers = {kind.replace("_", " "): kinds.count(kind) for kind in kinds}
    return ", ".join(
        f"{number} x {kind}" if number > 1 else kind for kind, number in numbers.items()
    )


def _separate(axes: Axes, labels: Sequence[Text], legend: Bbox) -> None:
    """Move labels down or, if necessary, sideways until no label overlaps another or the legend."""
    area, placed = axes.get_window_extent(), [legend]
    for label in sorted(labels, key=lambda each: each.get_position()[0]):
        box = label.get_window_extent()
        tops = [
            area.y1 - LABEL_GAP,
            *sorted((each.y0 - LABEL_GAP for each in placed), reverse=True),
        ]
        lefts = [box.x0 + side * (box.width + LABEL_GAP) for side in (0, -1, 1, -2, 2, -3, 3)]
        places = [
            Bbox.from_bounds(left, top - box.height, box.width, box.height)
            for left in lefts
            for top in tops
            if top - box.height > area.y0 and area.x0 < left < area.x1 - box.width
        ]
        free = (each for each in places if not any(each.overlaps(other) for other in placed))
        chosen = next(free, box)
        x, y = axes.get_xaxis_transform().inverted().transform((chosen.x1, chosen.y1))
        label.set_position((x, y))
        placed.append(chosen.padded(LABEL_GAP / 2))
