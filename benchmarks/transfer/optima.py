"""The best learning rate for each size, from the runs of `python -m benchmarks.transfer`."""

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks import tables

STANDARD, COMPLETEP = "standard", "completep"


class Run(NamedTuple):
    """A run that is wanted, is training or is done.

    Attributes:
        exponent: the learning rate is 2 to this power.
    """

    width: int
    layers: int
    parametrization: str
    exponent: int
    seed: int = 0

    @property
    def line(self) -> tuple[int, int, str]:
        """Runs that differ only in learning rate and seed."""
        return self[:3]


Losses = dict[Run, float]  # infinite if the run has diverged


def read(path: Path) -> Losses:
    """Return the losses in the lines of a file; the last line may be incomplete."""
    found = {}
    for text in path.read_text().splitlines() if path.exists() else ():
        try:
            row = json.loads(text)
        except ValueError:
            continue
        run = Run(*(row[name] for name in Run._fields))
        found[run] = math.inf if row["loss"] is None else row["loss"]
    return found


def of_line(losses: Losses, line: tuple[int, int, str]) -> dict[int, float]:
    """Return {exponent: loss} of the first seed."""
    return {run.exponent: loss for run, loss in sorted(losses.items()) if run == (*line, run[3], 0)}


def best(curve: dict[int, float]) -> int:
    return min(curve, key=curve.__getitem__)


def vertex(curve: dict[int, float]) -> float:
    """Return the exponent of the lowest point of the parabola through the best and its neighbours.

    At an edge of the curve it is the best itself.
    """
    middle = best(curve)
    around = [curve.get(middle + step, math.inf) for step in (-1, 0, 1)]
    if not all(map(math.isfinite, around)):
        return float(middle)
    left, low, right = around
    bend = left - 2 * low + right
    return middle + 0.5 * (left - right) / bend if bend > 0 else float(middle)


def lines_of(losses: Iterable[Run], base: tuple[int, int]) -> list[tuple[int, int, str]]:
    """Return the lines by parametrization and size; the base's lines are the same in both."""
    found = {run.line for run in losses} | {(*base, COMPLETEP)}
    return sorted(found, key=lambda line: (line[2] == COMPLETEP, line[0], line[1]))


def measured(line: tuple[int, int, str], base: tuple[int, int]) -> tuple[int, int, str]:
    return (*base, STANDARD) if line[:2] == base else line


def show(losses: Losses, base: tuple[int, int]) -> list[str]:
    """Return a table of all losses and a table of the optima."""
    exponents = sorted({run.exponent for run in losses})
    at_base = of_line(losses, measured((*base, STANDARD), base))
    all_losses, optima = [], []
    for line in lines_of(losses, base):
        curve = of_line(losses, measured(line, base))
        if not curve:
            continue
        name = (line[2], line[0], line[1])
        shown = (f"{curve[each]:.4f}" if each in curve else "" for each in exponents)
        all_losses.append([*name, *shown])
        at = best(curve)
        seeds = [loss for run, loss in losses.items() if run[:4] == (*measured(line, base), at)]
        mean = statistics.fmean(seeds)
        range_of_seeds = f"{min(seeds):.4f} to {max(seeds):.4f}, {len(seeds)} seeds"
        kept = curve.get(best(at_base), math.nan) - curve[at] if at_base else math.nan
        exponent = vertex(curve)
        moved = exponent - vertex(at_base) if at_base else math.nan
        optima.append(
            [*name, f"{2**exponent:.2e}", f"{exponent:.2f}", f"{moved:+.2f}", f"{mean:.4f}",
             range_of_seeds, f"{kept:.4f}"]
        )  # fmt: skip
    size = ["parametrization", "hidden size", "layers"]
    of_optima = ["best rate", "its log2", "minus the base's", "mean loss there", "of"]
    of_optima += ["lost with the base's rate"]
    heads = [f"2^{each}" for each in exponents]
    return [tables.table([*size, *of_optima], optima), tables.table([*size, *heads], all_losses)]


def plot(losses: Losses, base: tuple[int, int], path: Path) -> None:
    """Plot the losses over the learning rate, with a line for each size."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(10, 4.5), sharex=True, sharey=True)
    for line in lines_of(losses, base):
        curve = of_line(losses, measured(line, base))
        finite = {each: loss for each, loss in sorted(curve.items()) if math.isfinite(loss)}
        if not finite:
            continue
        panel = panels[int(line[2] == COMPLETEP)]
        label = f"{line[0]} wide, {line[1]} layers"
        rates = [2.0**each for each in finite]
        [drawn] = panel.plot(rates, list(finite.values()), marker=".", label=label)
        panel.plot(2.0 ** best(finite), min(finite.values()), "o", color=drawn.get_color())
    for panel, title in zip(panels, (STANDARD, COMPLETEP), strict=True):
        panel.set_title(title)
        panel.set_xlabel("learning rate")
        panel.set_xscale("log", base=2)
        panel.xaxis.set_major_formatter("{x:.1g}")
        panel.legend(fontsize=8)
    panels[0].set_ylabel("validation loss (nats per token)")
    figure.tight_layout()
    figure.savefig(path, dpi=100)


def edges(curve: dict[int, float], limits: Sequence[int]) -> list[int]:
    """Return the exponents beyond an end of the curve where its best is, within limits."""
    beyond = {min(curve): min(curve) - 1, max(curve): max(curve) + 1}
    found = beyond.get(best(curve))
    return [found] if found is not None and limits[0] <= found <= limits[1] else []
