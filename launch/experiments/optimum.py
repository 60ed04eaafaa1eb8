"""The best value of a swept setting, with its uncertainty: a parabola in its logarithm.

Pure arithmetic on losses; numpy only.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES, SHARE = 2000, 0.90  # of the bootstrap; share of its optima in the interval
REACH = 2  # points to either side of the best one that the parabola is fitted to


@dataclass(frozen=True)
class Optimum:
    """The best value of a setting. Fields are JSON keys.

    Attributes:
        value, loss: where the parabola has its minimum; the best point where there is none.
        interval: interval of `value`; None with one seed, at an edge, or without a parabola.
        parabola: coefficients of loss over log(value), highest power first; None without one.
        at_edge: the best point is the first or the last, so better values may lie outside.
        edge_share: share of the resamples whose minimum is at an edge; None without an interval.
        fitted: the first and the last value of the parabola; None without one.
        points, seeds: number of fitted values, and of losses of the value that has the fewest.
    """

    value: float
    loss: float
    interval: tuple[float, float] | None
    parabola: tuple[float, float, float] | None
    at_edge: bool
    edge_share: float | None
    fitted: tuple[float, float] | None
    points: int
    seeds: int


def find_optimum(losses: Mapping[float, Sequence[float]]) -> Optimum:
    """Return the optimum of {value: its losses, one of each seed}; values are positive.

    Each resample draws, for each value, as many losses as it has. Their deviations from the mean
    are widened by sqrt(n / (n - 1)), since n losses deviate less from their own mean than from the
    true one.
    """
    values = sorted(losses)
    means = np.array([np.mean(losses[value]) for value in values])
    best = int(means.argmin())
    seeds = min(len(losses[value]) for value in values)
    at_edge = len(values) > 1 and best in (0, len(values) - 1)
    nearest = slice(max(0, best - REACH), best + REACH + 1)
    logs = np.log(values)[nearest]
    if len(logs) < 3:
        return Optimum(values[best], float(means[best]), None, None, at_edge, None, None, 0, seeds)
    centre = logs.mean()  # the fit loses digits far from zero
    coefficients = np.polyfit(logs - centre, means[nearest], 2)
    place = centre + float(_minima(coefficients[:, None])[0])
    value, loss = values[best], float(means[best])
    if not at_edge and logs[0] < place < logs[-1]:
        value, loss = float(np.exp(place)), float(np.polyval(coefficients, place - centre))
    interval, edge_share = None, None
    if seeds > 1 and not at_edge:
        generator = np.random.default_rng(0)
        drawn = np.stack([_drawn_means(losses[value], generator) for value in values[nearest]])
        places = centre + _minima(np.polyfit(logs - centre, drawn, 2))
        ends = np.quantile(np.clip(places, logs[0], logs[-1]), [(1 - SHARE) / 2, (1 + SHARE) / 2])
        interval = (float(np.exp(ends[0])), float(np.exp(ends[1])))
        edge_share = float(((places <= logs[0]) | (places >= logs[-1])).mean())
    a, b, c = map(float, coefficients)
    parabola = (a, b - 2 * a * centre, c - b * centre + a * centre**2)
    fitted = (values[nearest][0], values[nearest][-1])
    return Optimum(value, loss, interval, parabola, at_edge, edge_share, fitted, len(logs), seeds)


def _minima(coefficients: np.ndarray) -> np.ndarray:
    """Return where (3, K) coefficients have their minima; an infinity without one."""
    a, b, _ = coefficients
    bowl = a > 0
    return np.where(bowl, -b / np.where(bowl, 2 * a, 1.0), np.copysign(np.inf, -b))


def _drawn_means(losses: Sequence[float], generator: np.random.Generator) -> np.ndarray:
    number = len(losses)
    deviations = (np.array(losses) - np.mean(losses)) * (number / (number - 1)) ** 0.5
    return np.mean(losses) + generator.choice(deviations, (RESAMPLES, number)).mean(1)
