"""A scaling law L(N, D) = E + A / N^alpha + B / D^beta, fitted to final losses of runs.

Pure arithmetic on sizes, tokens and losses; numpy only. Must not read runs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import numpy as np

from launch.plan.scaling import LossFit

HUBER = 1e-3  # Hoffmann et al. 2022, appendix D.3: the residual of a log loss where it turns linear
ITERATIONS, PATIENCE = 300, 30  # most, and those after which the best start must have improved
COEFFICIENTS = 5
EXPONENTS = (0.02, 2.0)  # of every published law between; outside, the runs do not show the term
LEAST_SHARE = 0.01  # of E in the best loss
SAME_RATIO = 0.99  # correlation of the logarithms of sizes and tokens
NORMAL_QUANTILE = 1.2816  # for an interval of 80%
# Starting values of (alpha, beta), and the share of the least loss that is E.
STARTS = list(product((0.1, 0.3, 0.5, 0.8), (0.1, 0.3, 0.5, 0.8), (0.1, 0.4, 0.7, 0.95)))


class Observed(NamedTuple):
    """The final loss of a model of `parameters` after `tokens`."""

    parameters: float
    tokens: float
    loss: float


@dataclass(frozen=True)
class Prediction:
    """A predicted loss. Fields are JSON keys.

    Attributes:
        low, high: 80% interval, from leaving out one point at a time.
    """

    loss: float
    low: float
    high: float


def fit(points: Sequence[Observed], name: str = "fit") -> LossFit:
    """Return the law with the least Huber loss of log losses, of many starts.

    By Levenberg-Marquardt with the weights of the Huber loss, on the logarithms of E, A, B, alpha
    and beta, all starts at once. Sizes and tokens are divided by their geometric means, so that A
    and B are losses, of about the size of E.

    Source: Hoffmann et al. 2022 (arXiv 2203.15556), section 3.3; there L-BFGS. Besiroglu et al.
    2024 (arXiv 2404.10102) found that it had stopped before its minimum.
    """
    sizes, tokens, losses = np.array(points, dtype=np.float64).T
    sizes_1, tokens_1 = np.log(sizes).mean(), np.log(tokens).mean()
    x, y, target = np.log(sizes) - sizes_1, np.log(tokens) - tokens_1, np.log(losses)
    params = np.array([_start(losses, *start) for start in STARTS])
    damping, (error, residuals, slopes) = np.full(len(params), 1e-2), _errors(params, x, y, target)
    least, since = float("inf"), 0
    for number in range(ITERATIONS):
        if error.min() < least * (1 - 1e-9):
            least, since = float(error.min()), number
        if number - since > PATIENCE or least < 1e-24:
            break
        weights = np.minimum(1.0, HUBER / np.maximum(np.abs(residuals), 1e-300))
        gradient = np.einsum("snp,sn->sp", slopes, weights * residuals)
        hessian = np.einsum("snp,sn,snq->spq", slopes, weights, slopes)
        scale = np.einsum("spp->sp", hessian) + 1e-12
        hessian[:, range(COEFFICIENTS), range(COEFFICIENTS)] += damping[:, None] * scale
        step = np.linalg.solve(hessian, gradient[..., None])[..., 0]
        tried = params - np.clip(step, -1.0, 1.0)
        found = _errors(tried, x, y, target)
        better = found[0] < error
        params[better], error[better] = tried[better], found[0][better]
        residuals[better], slopes[better] = found[1][better], found[2][better]
        damping = np.clip(np.where(better, damping / 3, damping * 4), 1e-12, 1e12)
    e, a, b, alpha, beta = np.exp(params[int(error.argmin())])
    return LossFit(
        name, float(e), float(a * np.exp(alpha * sizes_1)), float(b * np.exp(beta * tokens_1)),
        float(alpha), float(beta),
    )  # fmt: skip


def _start(losses: np.ndarray, alpha: float, beta: float, share: float) -> list[float]:
    least = losses.min()
    rest = max(float(np.median(losses) - share * least), 1e-3 * float(least)) / 2
    return [float(value) for value in np.log([share * least, rest, rest, alpha, beta])]


def _errors(
    params: np.ndarray, x: np.ndarray, y: np.ndarray, target: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the Huber losses (S,), the residuals (S, N) and their slopes (S, N, 5)."""
    e, a, b, alpha, beta = np.exp(np.clip(params, -60, 60)).T[..., None]
    with np.errstate(over="ignore", invalid="ignore"):
        model, data = a * np.exp(-alpha * x), b * np.exp(-beta * y)
        whole = e + model + data
        residuals = np.log(whole) - target
        parts = [e + 0 * x, model, data, -alpha * x * model, -beta * y * data]
        slopes = np.stack(parts, axis=-1) / whole[..., None]
        size = np.abs(residuals)
        huber = np.where(size < HUBER, 0.5 * size**2, HUBER * (size - 0.5 * HUBER)).sum(-1)
    bad = ~np.isfinite(huber) | ~np.isfinite(slopes).all((1, 2))
    residuals[bad], slopes[bad] = 0.0, 0.0
    return np.where(bad, np.inf, huber), residuals, slopes


@dataclass(frozen=True)
class Fitted:
    """A law fitted to all points, and one law for each point, fitted without it."""

    law: LossFit
    points: list[Observed]
    without: list[LossFit]

    @classmethod
    def of(cls, points: Sequence[Observed], name: str = "fit") -> "Fitted":
        points = list(points)
        without = [fit([*points[:place], *points[place + 1 :]]) for place in range(len(points))]
        return cls(fit(points, name), points, without)

    def errors(self) -> list[float]:
        """Return, for each point, the predicted minus the measured loss when it is left out."""
        pairs = zip(self.without, self.points, strict=True)
        return [law.loss(point.parameters, point.tokens) - point.loss for law, point in pairs]

    @property
    def one_ratio(self) -> bool:
        """Whether all points have about the same tokens per parameter.

        Then the shares of size and tokens in the loss are unknown, and so is the loss at another
        ratio: three coefficients remain, E + C / N^alpha.
        """
        sizes, tokens, _ = np.log(np.array(self.points, dtype=np.float64)).T
        return bool(np.corrcoef(sizes, tokens)[0, 1] > SAME_RATIO)

    def beyond(self, parameters: float, tokens: float) -> dict[str, float]:
        """Return how far a model is beyond the points: {"compute": 4.0, ...}, 1 in their range."""
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
        """Return the coefficients that no law of language models has, as `alpha = 0`."""
        law, least = self.law, min(point.loss for point in self.points)
        found = [] if law.entropy >= LEAST_SHARE * least else [f"E = {law.entropy:.3g}"]
        exponents = {"alpha": law.alpha, "beta": law.beta}
        return found + [
            f"{name} = {value:.3g}"
            for name, value in exponents.items()
            if not EXPONENTS[0] <= value <= EXPONENTS[1]
        ]

    def predict(self, parameters: float, tokens: float) -> Prediction:
        """Return the loss of a model with an interval of 80%.

        Its variance is that of the jackknife for the law, which grows with the distance from the
        runs, plus that of a run, from the errors of the points that are left out; Student's t
        for the few points. Both take the law for true.

        Source: Efron and Stein 1981, "The jackknife estimate of variance", equation 1.2; the
        quantile: Abramowitz and Stegun 1964, 26.7.5.
        """
        loss, number = self.law.loss(parameters, tokens), len(self.points)
        losses = np.array([law.loss(parameters, tokens) for law in self.without])
        of_law = (number - 1) * float(losses.var())
        of_run = float(np.median(np.abs(self.errors())) / 0.6745) ** 2
        freedom, z = number - (3 if self.one_ratio else COEFFICIENTS), NORMAL_QUANTILE
        quantile = z + (z**3 + z) / (4 * freedom)
        quantile += (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
        half = quantile * (of_law + of_run) ** 0.5
        return Prediction(loss, loss - half, loss + half)
