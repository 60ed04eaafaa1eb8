"""A scaling law L(N, D) = E + A / N^alpha + B / D^beta, fitted to the final losses of runs.

Pure arithmetic on sizes, tokens and losses, with numpy only. Must not read runs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import numpy as np

from launch.estimate.scaling import LossFit
from launch.experiments.quantiles import student_quantile

HUBER = 1e-3  # log-loss residual above which the error is linear (Hoffmann et al. 2022, app. D.3)
ITERATIONS, PATIENCE = 300, 30  # maximum iterations; stop after this many without improvement
COEFFICIENTS = 5
EXPONENTS = (0.02, 2.0)  # plausible range: for exponents outside, the runs do not determine a term
LEAST_SHARE = 0.01  # minimum plausible E, as a share of the lowest loss
LEAST_SLOPE = 0.005  # minimum plausible exponent at a fixed token ratio; Cerebras-GPT's is 0.1
SAME_RATIO = 0.99  # correlation of log size and log tokens above which the ratio counts as fixed
SHARE = 0.80  # coverage of the intervals
# Starting values for alpha, beta, and E as a share of the lowest loss.
STARTS = list(product((0.1, 0.3, 0.5, 0.8), (0.1, 0.3, 0.5, 0.8), (0.1, 0.4, 0.7, 0.95)))
FEW = 7  # use only every 7th start if a law that is already close is among the starts


class Observed(NamedTuple):
    """The final loss of a model of a given size, trained on a given number of tokens."""

    parameters: float
    tokens: float
    loss: float


@dataclass(frozen=True)
class Prediction:
    """A predicted loss. Fields are JSON keys.

    Attributes:
        low, high: 80% interval, computed from fits that each leave out one point.
    """

    loss: float
    low: float
    high: float


def fit(points: Sequence[Observed], name: str = "fit") -> LossFit:
    """Return the law that minimizes the Huber loss between predicted and observed log losses.

    Runs Levenberg-Marquardt with Huber weights on the logarithms of E, A, B, alpha and beta, from
    many starting points at once. Sizes and tokens are divided by their geometric means, so A and B
    have about the same magnitude as E.

    Source: Hoffmann et al. 2022 (arXiv 2203.15556), section 3.3, which uses L-BFGS. Besiroglu et
    al. 2024 (arXiv 2404.10102) found that this L-BFGS run had stopped before the minimum.
    """
    losses = np.array(points)[:, 2]
    starts = np.array([_start(losses, *start) for start in STARTS])
    return _laws(points, starts, np.ones((1, len(points))), name)[0]


def fit_without(points: Sequence[Observed], law: LossFit) -> list[LossFit]:
    """Return, for each point, the law fitted to all other points.

    Args:
        law: the law fitted to all points, used as one of the starting points.
    """
    losses = np.array(points)[:, 2]
    sizes_1, tokens_1 = np.log(np.array(points)[:, :2]).mean(0)
    a, b = law.model / np.exp(law.alpha * sizes_1), law.data / np.exp(law.beta * tokens_1)
    known = np.log(np.maximum([law.entropy, a, b, law.alpha, law.beta], 1e-20))
    starts = np.array([known, *(_start(losses, *start) for start in STARTS[::FEW])])
    return _laws(points, starts, 1 - np.eye(len(points)), law.name)


def _laws(
    points: Sequence[Observed], starts: np.ndarray, kept: np.ndarray, name: str
) -> list[LossFit]:
    """Fit one law per row of `kept`, and return the best fit from all starts for each row.

    Args:
        starts: starting coefficients, of shape (S, 5).
        kept: weights of the points in each of the G fits, of shape (G, N).
    """
    sizes, tokens, losses = np.array(points, dtype=np.float64).T
    sizes_1, tokens_1 = np.log(sizes).mean(), np.log(tokens).mean()
    x, y, target = np.log(sizes) - sizes_1, np.log(tokens) - tokens_1, np.log(losses)
    groups, number = len(kept), len(starts)
    params, kept = np.tile(starts, (groups, 1)), np.repeat(kept, number, axis=0)
    damping = np.full(len(params), 1e-2)
    error, residuals, slopes = _errors(params, x, y, target, kept)
    least, since = np.full(groups, np.inf), 0
    for iteration in range(ITERATIONS):
        best = error.reshape(groups, number).min(1)
        if (best < least * (1 - 1e-9)).any():
            least, since = np.minimum(best, least), iteration
        if iteration - since > PATIENCE or least.max() < 1e-24:
            break
        weights = kept * np.minimum(1.0, HUBER / np.maximum(np.abs(residuals), 1e-300))
        weighted = slopes * weights[..., None]
        gradient = (weighted * residuals[..., None]).sum(1)
        hessian = weighted.transpose(0, 2, 1) @ slopes
        scale = np.einsum("spp->sp", hessian) + 1e-12
        hessian[:, range(COEFFICIENTS), range(COEFFICIENTS)] += damping[:, None] * scale
        step = np.linalg.solve(hessian, gradient[..., None])[..., 0]
        tried = params - np.clip(step, -1.0, 1.0)
        found = _errors(tried, x, y, target, kept)
        better = found[0] < error
        params[better], error[better] = tried[better], found[0][better]
        residuals[better], slopes[better] = found[1][better], found[2][better]
        damping = np.clip(np.where(better, damping / 3, damping * 4), 1e-12, 1e12)
    chosen = error.reshape(groups, number).argmin(1) + number * np.arange(groups)
    return [
        LossFit(
            name, float(e), float(a * np.exp(alpha * sizes_1)), float(b * np.exp(beta * tokens_1)),
            float(alpha), float(beta),
        )
        for e, a, b, alpha, beta in np.exp(params[chosen])
    ]  # fmt: skip


def _start(losses: np.ndarray, alpha: float, beta: float, share: float) -> list[float]:
    least = losses.min()
    rest = max(float(np.median(losses) - share * least), 1e-3 * float(least)) / 2
    return [float(value) for value in np.log([share * least, rest, rest, alpha, beta])]


def _errors(
    params: np.ndarray, x: np.ndarray, y: np.ndarray, target: np.ndarray, kept: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return Huber losses, residuals, and the derivatives of the residuals by the coefficients.

    Their shapes are (S,), (S, N) and (S, N, 5), for S sets of coefficients and N points.
    """
    e, a, b, alpha, beta = np.exp(np.clip(params, -60, 60)).T[..., None]
    with np.errstate(over="ignore", invalid="ignore"):
        model, data = a * np.exp(-alpha * x), b * np.exp(-beta * y)
        whole = e + model + data
        residuals = np.log(whole) - target
        parts = [e + 0 * x, model, data, -alpha * x * model, -beta * y * data]
        slopes = np.stack(parts, axis=-1) / whole[..., None]
        size = np.abs(residuals)
        each = np.where(size < HUBER, 0.5 * size**2, HUBER * (size - 0.5 * HUBER))
        huber = (kept * each).sum(-1)
    bad = ~np.isfinite(huber) | ~np.isfinite(slopes).all((1, 2))
    residuals[bad], slopes[bad] = 0.0, 0.0
    return np.where(bad, np.inf, huber), residuals, slopes


@dataclass(frozen=True)
class Fitted:
    """A law fitted to all points and, for each point, a law fitted to all other points."""

    law: LossFit
    points: list[Observed]
    without: list[LossFit]

    @classmethod
    def of(cls, points: Sequence[Observed], name: str = "fit") -> "Fitted":
        points = list(points)
        law = fit(points, name)
        return cls(law, points, fit_without(points, law))

    def errors(self) -> list[float]:
        """Return, for each point, the prediction error of the law fitted to all other points."""
        pairs = zip(self.without, self.points, strict=True)
        return [law.loss(point.parameters, point.tokens) - point.loss for law, point in pairs]

    @property
    def one_ratio(self) -> bool:
        """Whether all points have about the same number of tokens per parameter.

        If so, the contributions of size and tokens cannot be separated, and the loss at other
        ratios is unknown: only the three coefficients of E + C / N^alpha are determined.
        """
        sizes, tokens, _ = np.log(np.array(self.points, dtype=np.float64)).T
        return bool(np.corrcoef(sizes, tokens)[0, 1] > SAME_RATIO)

    def beyond(self, parameters: float, tokens: float) -> dict[str, float]:
        """Return the factors by which a model lies outside the range of the points; 1 if inside."""
        sizes, numbers, _ = np.array(self.points, dtype=np.float64).T
        ranges = {
            "compute": (sizes * numbers, parameters * tokens),
            "parameters": (sizes, parameters),
            "tokens": (numbers, tokens),
            "tokens per parameter": (numbers / sizes, tokens / parameters),
        }
        return {
            name: float(max(1.0, value / values.max(), values.min() / value))
            for name, (values, value) in ranges.items()
        }

    def implausible(self) -> list[str]:
        """Return the fitted values that are implausible for language models, such as `alpha = 0`.

        If all points have the same ratio of tokens to parameters, E, alpha and beta cannot be
        determined separately. In that case only the decrease of the loss is checked, using the
        exponent of a power law.
        """
        law, least = self.law, min(point.loss for point in self.points)
        if self.one_ratio:
            first, last = (pick(self.points, key=lambda point: point.parameters * point.tokens)
                           for pick in (min, max))  # fmt: skip
            fall = np.log(law.loss(*first[:2]) / law.loss(*last[:2]))
            exponent = float(fall / np.log(last.parameters / first.parameters))
            return [] if exponent > LEAST_SLOPE else [f"a loss that falls as N^-{exponent:.2g}"]
        found = [] if law.entropy >= LEAST_SHARE * least else [f"E = {law.entropy:.3g}"]
        exponents = {"alpha": law.alpha, "beta": law.beta}
        return found + [
            f"{name} = {value:.3g}"
            for name, value in exponents.items()
            if not EXPONENTS[0] <= value <= EXPONENTS[1]
        ]

    def predict(self, parameters: float, tokens: float) -> Prediction:
        """Return the predicted loss of a model, with an 80% interval.

        The variance is the sum of two terms, both of which assume that the law holds. The jackknife
        variance of the law grows with the distance from the runs. The variance of a single run is
        estimated from the errors of left-out points. Student's t accounts for the small number of
        points.

        Source: Efron and Stein 1981, "The jackknife estimate of variance", equation 1.2.
        """
        loss, number = self.law.loss(parameters, tokens), len(self.points)
        losses = np.array([law.loss(parameters, tokens) for law in self.without])
        of_law = (number - 1) * float(losses.var())
        of_run = float(np.median(np.abs(self.errors())) / 0.6745) ** 2
        freedom = number - (3 if self.one_ratio else COEFFICIENTS)
        quantile = student_quantile((1 + SHARE) / 2, freedom)
        half = quantile * (of_law + of_run) ** 0.5
        return Prediction(loss, loss - half, loss + half)
