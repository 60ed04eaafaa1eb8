"""The best value of a swept setting, with its uncertainty, from a parabola over its logarithm.

Pure arithmetic on losses; numpy only.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from launch.experiments.quantiles import student_quantile

SHARE = 0.90  # coverage of the intervals
REACH = 2  # points on either side of the best one that the parabola is fitted to
HIGHEST = 1.2  # factor over the lowest worst-seed loss above which a value is not fitted
MISFIT = 6.0  # a parabola does not fit above this ratio of the fit's variance to the seeds'
NO_LOSSES: Mapping[float, int] = {}


@dataclass(frozen=True)
class Optimum:
    """The best value of a setting. Fields are JSON keys.

    Attributes:
        value, loss: minimum of the parabola; the best point if there is no parabola.
        measured, measured_loss: the best point, and its mean loss.
        interval: interval for `value`, which contains `measured`; None with one seed, at an edge,
            or without a parabola.
        open_ended: noise hides one or both ends of the interval; they are set to the ends of the
            grid or to the nearest values that could not be fitted.
        parabola: coefficients of loss over log(value), highest power first; None without one.
        at_edge: the best point is the first or last that could be fitted, so better values may be
            outside the fitted range.
        fitted: first and last value that the parabola is fitted to; None without one.
        points, seeds: number of fitted values, and minimum number of losses per value.
        high: values near the best one with a loss too high to be fitted.
        incomplete: {value: number of its runs that gave up, failed, or ended without a finite
            loss}.
        missing: intervals next to the best value where values should be added; None is an open end.
    """

    value: float
    loss: float
    measured: float
    measured_loss: float
    interval: tuple[float, float] | None
    open_ended: bool
    parabola: tuple[float, float, float] | None
    at_edge: bool
    fitted: tuple[float, float] | None
    points: int
    seeds: int
    high: tuple[float, ...]
    incomplete: dict[float, int]
    missing: tuple[tuple[float | None, float | None], ...]


def find_optimum(
    losses: Mapping[float, Sequence[float]], gave_up: Mapping[float, int] = NO_LOSSES
) -> Optimum | None:
    """Return the optimum for {value: its losses, one per seed}; values are positive.

    A value with runs that gave up or failed (`gave_up`: {value: number}) is neither fitted nor the
    best, since its other seeds' losses leave out those runs. Returns None if no value is left.
    """
    incomplete = {value: number for value, number in gave_up.items() if number}
    values = sorted({*losses, *incomplete})
    means = {value: float(np.mean(losses[value])) for value in values if value not in incomplete}
    if not means:
        return None
    highest = {value: max(losses[value]) for value in means}
    limit = min(highest.values())
    limit += (HIGHEST - 1) * abs(limit)
    bad = [value for value in values if value in incomplete or highest[value] > limit]
    best = min((value for value in means if value not in bad), key=means.__getitem__)
    place = values.index(best)
    below = max((value for value in bad if value < best), default=values[0])
    above = min((value for value in bad if value > best), default=values[-1])
    window = values[max(0, place - REACH) : place + REACH + 1]
    near = [value for value in window if below <= value <= above and value not in bad]
    around = (values[place - 1] if place else None, [*values, None][place + 1])
    missing = tuple(side for side in ((around[0], best), (best, around[1]))
                    if len(values) > 1 and (None in side or {*side} & {*bad}))  # fmt: skip
    at_edge = bool(missing)
    fit = None if at_edge or len(near) < 3 else _fitting(near, best, losses)
    value, loss, interval, open_ended = best, means[best], None, False
    seeds = min(len(losses[value]) for value in (fit.values if fit else near))
    if fit is not None:
        if fit.values[0] < fit.minimum < fit.values[-1]:
            value, loss = fit.minimum, fit.loss
        if seeds > 1:
            low, up = fit.interval()
            open_ended = low <= below or up >= above
            interval = max(below, min(low, best)), min(above, max(up, best))
    high = tuple(value for value in window if value in means and value not in near)
    parabola, fitted, points = None, None, 0
    if fit is not None:
        parabola, points = fit.parabola, len(fit.values)
        fitted = (fit.values[0], fit.values[-1])
    return Optimum(
        value, loss, best, means[best], interval, open_ended, parabola, at_edge, fitted, points,
        seeds, high, incomplete, missing,
    )  # fmt: skip


@dataclass(frozen=True)
class _Fit:
    """A parabola for the loss over log(value) - centre, with the covariance of its coefficients.

    Attributes:
        values: values that the parabola is fitted to.
        excess: variance of the means around the parabola divided by that of the seeds; 0 if either
            is unknown.
        freedom: degrees of freedom of the variance.
    """

    values: Sequence[float]
    coefficients: np.ndarray
    covariance: np.ndarray
    centre: float
    excess: float
    freedom: int

    @property
    def minimum(self) -> float:
        """The value at the minimum; 0 or infinity if there is none."""
        a, b, _ = self.coefficients
        if a > 0:
            return float(np.exp(self.centre - b / (2 * a)))
        return 0.0 if b > 0 else float("inf")

    @property
    def loss(self) -> float:
        return float(np.polyval(self.coefficients, np.log(self.minimum) - self.centre))

    @property
    def parabola(self) -> tuple[float, float, float]:
        a, b, c = map(float, self.coefficients)
        return a, b - 2 * a * self.centre, c - b * self.centre + a * self.centre**2

    def interval(self) -> tuple[float, float]:
        """Return the range in which the slope may be zero; (0, inf) if the curve may be flat.

        Source: Fieller 1954, "Some problems in interval estimation": exact for normal noise,
        whereas two or three seeds are too few for a bootstrap.
        """
        a, b, _ = self.coefficients
        (aa, ab, _), (_, bb, _), _ = self.covariance
        t = student_quantile((1 + SHARE) / 2, self.freedom)
        square, half = a**2 - t**2 * aa, (a * b - t**2 * ab) / 2
        rest = (b**2 - t**2 * bb) / 4
        if a <= 0 or square <= 0:
            return 0.0, float("inf")
        root = max(0.0, half**2 - square * rest) ** 0.5
        low, up = np.exp(self.centre + np.array([-half - root, -half + root]) / square)
        return float(low), float(up)


def _fitting(near: list[float], best: float, losses: Mapping[float, Sequence[float]]) -> _Fit:
    """Return a parabola fitted to values near the best one, which is not at an end.

    As long as the minimum is not between the best value's neighbours, or the means deviate from the
    parabola by more than the seeds' noise explains, the end with the higher loss is dropped. The
    best value and its two neighbours always remain.
    """
    while True:
        fit, place = _fit(near, losses), near.index(best)
        ends = [end for end, reach in ((near[0], place), (near[-1], len(near) - 1 - place))
                if reach > 1]  # fmt: skip
        if not ends or (fit.excess < MISFIT and near[place - 1] < fit.minimum < near[place + 1]):
            return fit
        worst = max(ends, key=lambda end: float(np.mean(losses[end])))
        near = [value for value in near if value != worst]


def _fit(values: Sequence[float], losses: Mapping[float, Sequence[float]]) -> _Fit:
    """Fit a parabola to the mean losses; their variance combines the seeds' and the fit's."""
    logs = np.log(values)
    centre = float(logs.mean())  # centered: far from zero the fit would lose precision
    numbers = np.array([len(losses[value]) for value in values])
    means = np.array([np.mean(losses[value]) for value in values])
    design = np.vander(logs - centre, 3)
    inverse = np.linalg.inv(design.T @ (numbers[:, None] * design))
    coefficients = inverse @ design.T @ (numbers * means)
    of_fit = float((numbers * (means - design @ coefficients) ** 2).sum())
    of_seeds = sum(float(np.var(losses[value])) * len(losses[value]) for value in values)
    fit_freedom, seed_freedom = len(values) - 3, int((numbers - 1).sum())
    excess = 0.0
    if fit_freedom and seed_freedom:
        excess = (of_fit / fit_freedom) / max(of_seeds / seed_freedom, 1e-300)
    freedom = fit_freedom + seed_freedom
    variance = (of_fit + of_seeds) / max(1, freedom)
    return _Fit(values, coefficients, variance * inverse, centre, excess, freedom)
