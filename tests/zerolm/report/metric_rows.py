"""Synthetic loss curves and rows of metrics, for the tests of the diagnosis."""

import math

import numpy as np

from zerolm.report.diagnosis import findings

TOKENS = 1000  # of a step


def cosine(steps: int, minimum: float = 0.1) -> np.ndarray:
    """Return a learning rate: warm-up for 2% of the steps, then a cosine."""
    at = np.arange(1, steps + 1)
    warm = max(1, steps // 50)
    progress = np.clip((at - warm) / max(steps - warm, 1), 0, 1)
    return np.where(
        at < warm, at / warm, minimum + (1 - minimum) * 0.5 * (1 + np.cos(math.pi * progress))
    )


def constant(steps: int) -> np.ndarray:
    return np.minimum(np.arange(1, steps + 1) / max(1, steps // 50), 1.0)


def rows(losses, rates=None, interval: int = 10, **more) -> list[dict]:
    """Return rows as a run writes them; `more` are series or constants by key."""
    rates = constant(len(losses)) if rates is None else rates
    found = []
    for number, loss in enumerate(losses):
        step = (number + 1) * interval
        row = {
            "step": step,
            "tokens": step * TOKENS,
            "train/loss": None if not math.isfinite(loss) else float(loss),
            "train/learning_rate": 1e-3 * float(rates[number]),
        }
        for key, values in more.items():
            row[key] = float(values if np.isscalar(values) else values[number])
        found.append(row)
    return found


def power_law(steps: int, floor=1.8, height=8.0, exponent=0.25, noise=0.0, seed=0) -> np.ndarray:
    at = np.arange(1, steps + 1)
    return (
        floor
        + height * (at + 2.0) ** -exponent
        + noise * np.random.default_rng(seed).standard_normal(steps)
    )


def kinds(rows, events=()) -> list[str]:
    return [finding.kind for finding in findings(rows, events)]
