"""The picture of a sweep: final losses over the swept setting, with the parabolas and optima."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FormatStrFormatter, NullLocator

from launch.experiments.optimum import Optimum
from launch.experiments.results import SEED, Result, curves


def draw(
    results: Sequence[Result], axis: str | None, found: Mapping[str, Optimum], output_png: Path
) -> Path:
    """Draw the losses of the done runs: over a setting, or one column for each combination."""
    figure = Figure(figsize=(8, 4.5), dpi=100, layout="constrained")
    axes = figure.add_subplot()
    if axis is None:
        _draw_columns(axes, results)
    else:
        for number, (group, losses) in enumerate(curves(results, axis).items()):
            _draw_curve(axes, group, losses, found[group], f"C{number}")
        axes.set_xscale("log")
        axes.set_xlabel(axis)
        values = {value for each in curves(results, axis).values() for value in each}
        axes.xaxis.set_major_locator(FixedLocator(sorted(values)))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FormatStrFormatter("%g"))
        axes.legend()
    metric = next(result.metric for result in results if result.metric)
    axes.set_ylabel(f"{metric.partition(',')[0]} (nats per token)")
    axes.set_title(output_png.resolve().parent.name)
    axes.grid(alpha=0.25)
    figure.savefig(output_png)
    return output_png


def _draw_curve(
    axes: Axes, group: str, losses: Mapping[float, Sequence[float]], best: Optimum, colour: str
) -> None:
    """Draw the losses of the seeds, their means, and the parabola with its minimum."""
    values = sorted(losses)
    for value in values:
        several = losses[value]
        axes.plot([value] * len(several), several, "o", color=colour, alpha=0.4, markersize=4)
    means = [float(np.mean(losses[value])) for value in values]
    axes.plot(values, means, "o", color=colour, markerfacecolor="white", label=group or "mean")
    label = f"best {best.value:.3g}"
    if best.interval is not None:
        axes.axvspan(*best.interval, color=colour, alpha=0.12, linewidth=0)
        label += f", 90% interval {best.interval[0]:.3g} to {best.interval[1]:.3g}"
    if best.parabola is not None and best.fitted is not None:
        over = np.geomspace(*best.fitted, 200)
        axes.plot(over, np.polyval(best.parabola, np.log(over)), "--", color=colour, linewidth=1)
    axes.plot(best.value, best.loss, "*", color=colour, markersize=12, label=label)


def _draw_columns(axes: Axes, results: Sequence[Result]) -> None:
    """Draw the losses of the seeds and their mean, a column for each combination."""
    columns: dict[str, list[float]] = {}
    for result in results:
        if result.loss is not None:
            others = [f"{key}={value}" for key, value in result.values.items() if key != SEED]
            columns.setdefault("\n".join(others), []).append(result.loss)
    for place, losses in enumerate(columns.values()):
        axes.plot([place] * len(losses), losses, "o", color="C0", alpha=0.4, markersize=4)
        axes.plot(place, float(np.mean(losses)), "o", color="C0", markerfacecolor="white")
    axes.set_xticks(range(len(columns)), list(columns))
