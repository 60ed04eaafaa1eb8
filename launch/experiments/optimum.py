"""Find the best value of a swept setting and its uncertainty.

Fits a parabola to the loss over the value's logarithm. Pure arithmetic on losses, with numpy only.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from launch.experiments.quantiles import student_quantile

SHARE = 0.90  # coverage of the intervals
REACH = 2  # number of points to fit on each side of the best point
# A value is not fitted if its worst seed's loss exceeds the lowest such loss by this factor.
HIGHEST = 1.2
# A parabola is rejected if the fit's variance exceeds the seeds' variance by this factor.
MISFIT = 6.0
NO_LOSSES: Mapping[float, int] = {}


@dataclass(frozen=True)
class Optimum:
    """The best value of a setting. Fields are JSON keys.

    Attributes:
        value, loss: minimum of the parabola, or the best point if there is no such minimum.
        measured, measured_loss: the best measured value, and its mean loss.
        interval: confidence interval for `value`, which contains `measured`; None with a single
            seed or without a parabola.
        open_ended: whether noise hides one or both ends of the interval. Such an end is set to the
            end of the grid or to the nearest value that could not be fitted.
        parabola: coefficients of loss over log(value), highest power first; None if no parabola
            was fitted.
        at_edge: whether the best point is the first or last that could be fitted, so better values
            may be outside the fitted range.
        fitted: the first and last of the fitted values; None if no parabola was fitted.
        points, seeds: number of fitted values, and minimum number of losses per value.
        high: values near the best value whose loss is too high to be fitted.
        incomplete: {value: number of its runs that gave up, failed, or ended without a finite
            loss}.
        missing: intervals next to the best value in which values should be added; None marks an
            open end.
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
    """Return the optimum of a setting, or None if no value can be compared.

    A value with failed runs is neither fitted nor chosen, since the losses of its other seeds would
    be misleading.

    Args:
        losses: {value: its losses, one per seed}; all values are positive.
        gave_up: {value: number of its runs that gave up or failed}.
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
        values: the fitted values of the setting.
        excess: variance of the mean losses around the parabola divided by the variance between
            seeds; 0 if either is unknown.
        freedom: degrees of freedom of the estimated variance.
    """

    values: Sequence[float]
    coefficients: np.ndarray
    covariance: np.ndarray
    centre: float
    excess: float
    freedom: int

    @property
    def minimum(self) -> float:
        """The value at the minimum; 0 or infinity if the parabola has no minimum."""
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
        """Return the confidence interval of the minimum; (0, inf) if the curve may be flat.

        Source: Fieller 1954, "Some problems in interval estimation". The interval is exact for
        normal noise, whereas two or three seeds are too few for a bootstrap.
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
    """Return a parabola fitted to values near the best value.

    As long as the minimum is not between the best value's neighbours, or the mean losses deviate
    from the parabola by more than the noise between seeds explains, the outermost value with the
    higher loss is dropped. The best value and its two neighbours always remain.

    Args:
        near: at least three values in ascending order; the best one is not at an end.
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
    """Fit a parabola to the mean losses.

    The variance is pooled from the deviations of the means from the parabola and of the seeds from
    their means.
    """
    logs = np.log(values)
    centre = float(logs.mean())  # subtracted, since the fit loses precision far from zero
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
