"""Plot a sweep: the final losses over the swept setting, with fitted parabolas and optima."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FormatStrFormatter, NullLocator

from launch.experiments.optimum import Optimum
from launch.experiments.results import Result, curves


def draw(
    results: Sequence[Result], axis: str | None, found: Mapping[str, Optimum], output_png: Path
) -> Path:
    """Plot the losses of finished runs over the setting `axis`, and save the plot.

    If `axis` is None, plot one column per combination of values.
    """
    figure = Figure(figsize=(8, 4.5), dpi=100, layout="constrained")
    axes = figure.add_subplot()
    groups = curves(results, axis)
    for number, (group, losses) in enumerate(groups.items()):
        places = {float(number): losses[0.0]} if axis is None else losses
        _draw_curve(axes, group, places, found.get(group), f"C{number}")
    if axis is None:
        axes.set_xticks(range(len(groups)), [group.replace(",", "\n") for group in groups])
    else:
        axes.set_xscale("log")
        axes.set_xlabel(axis)
        values = {value for losses in groups.values() for value in losses}
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
    axes: Axes,
    group: str,
    losses: Mapping[float, Sequence[float]],
    best: Optimum | None,
    colour: str,
) -> None:
    """Plot each seed's loss, the mean losses, and the parabola with its minimum."""
    for value, several in losses.items():
        axes.plot([value] * len(several), several, "o", color=colour, alpha=0.4, markersize=4)
    means = [float(np.mean(several)) for several in losses.values()]
    axes.plot([*losses], means, "o", color=colour, markerfacecolor="white", label=group or "mean")
    if best is None:
        return
    label = f"best {best.value:.3g}"
    if best.interval is not None:
        axes.axvspan(*best.interval, color=colour, alpha=0.12, linewidth=0)
        label += f", 90% interval {best.interval[0]:.3g} to {best.interval[1]:.3g}"
    if best.parabola is not None and best.fitted is not None:
        over = np.geomspace(*best.fitted, 200)
        axes.plot(over, np.polyval(best.parabola, np.log(over)), "--", color=colour, linewidth=1)
    axes.plot(best.value, best.loss, "*", color=colour, markersize=12, label=label)
