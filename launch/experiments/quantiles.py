"""Quantiles of Student's t, for intervals from a few runs. Standard library only."""

import math


def student_quantile(share: float, freedom: int) -> float:
    """Return a quantile of Student's t-distribution.

    Bisects the distribution function, which has a closed form for integer degrees of freedom.

    Args:
        share: probability of the quantile, above one half.
        freedom: degrees of freedom.

    Source: Abramowitz and Stegun 1964, 26.7.3 and 26.7.4.
    """
    low, high = 0.0, 1.0
    while _student(high, freedom) < share:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _student(middle, freedom) < share else (low, middle)
    return high


def _student(value: float, freedom: int) -> float:
    """Return the distribution function of Student's t at a non-negative value."""
    angle = math.atan(value / math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    term, total = 1.0, 0.0
    if freedom % 2:
        term = cosine
        for number in range(3, freedom + 1, 2):
            total += term
            term *= cosine**2 * (number - 1) / number
        return 0.5 + (angle + sine * total) / math.pi
    for number in range(2, freedom + 1, 2):
        total += term
        term *= cosine**2 * (number - 1) / number
    return 0.5 + sine * total / 2
