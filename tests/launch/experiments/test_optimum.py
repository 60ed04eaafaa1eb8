"""The optimum of a sweep: closed forms for the parabola and its bootstrap, and the edges."""

import numpy as np
import pytest

from launch.experiments.optimum import find_optimum

RATES = [5e-4, 1e-3, 2e-3, 4e-3, 8e-3]


def parabola(rates, best=1.7e-3, curvature=0.03, least=3.0):
    return {rate: [least + curvature * np.log(rate / best) ** 2] for rate in rates}


@pytest.mark.parametrize("rates", [RATES, RATES[1:4]])
def test_the_minimum_of_an_exact_parabola_is_found(rates):
    found = find_optimum(parabola(rates))
    assert found.value == pytest.approx(1.7e-3, rel=1e-6)
    assert found.loss == pytest.approx(3.0, abs=1e-9)
    assert not found.at_edge and found.interval is None and found.seeds == 1


def test_the_interval_has_the_width_of_the_closed_form():
    """Of three values a, b, c at equal distances h the minimum is at h (a - c) / 2 (a - 2b + c).

    The delta method gives the variance of that for independent noise of the means.
    """
    generator, h, noise, seeds = np.random.default_rng(1), np.log(2), 0.002, 8
    means = np.array([3.02, 3.0, 3.03])
    scaled = generator.standard_normal((3, seeds))
    scaled -= scaled.mean(1, keepdims=True)
    scaled *= noise / scaled.std(1, ddof=1, keepdims=True)  # noise is the sample deviation
    rates = [1e-3, 2e-3, 4e-3]
    found = find_optimum(
        {rate: list(row) for rate, row in zip(rates, means[:, None] + scaled, strict=True)}
    )
    difference, curve = means[0] - means[2], means[0] - 2 * means[1] + means[2]
    assert np.log(found.value / 2e-3) == pytest.approx(h * difference / (2 * curve))
    slope = np.array([curve - difference, 2 * difference, -curve - difference])
    deviation = np.linalg.norm(slope * h / (2 * curve**2)) * noise / seeds**0.5
    width = np.log(found.interval[1] / found.interval[0])
    assert width == pytest.approx(2 * 1.645 * deviation, rel=0.08)
    assert found.edge_share == 0


def test_the_interval_covers_the_true_optimum():
    """90% of the time with many seeds; less often with two, as the documents say."""
    generator = np.random.default_rng(0)
    shares = {}
    for seeds in (2, 5):
        hits = 0
        for _ in range(100):
            losses = {
                rate: list(values[0] + 0.004 * generator.standard_normal(seeds))
                for rate, values in parabola(RATES).items()
            }
            low, high = find_optimum(losses).interval
            hits += low <= 1.7e-3 <= high
        shares[seeds] = hits / 100
    assert shares[5] >= 0.8 and shares[2] >= 0.6, shares


@pytest.mark.parametrize(("best", "edge"), [(1e-5, 5e-4), (1.0, 8e-3)])
def test_an_optimum_at_the_edge_is_the_last_point_and_says_so(best, edge):
    found = find_optimum({rate: loss * 2 for rate, loss in parabola(RATES, best).items()})
    assert found.at_edge and found.value == edge and found.interval is None


def test_a_far_outlier_does_not_move_the_optimum():
    """A learning rate at which the loss explodes is not among the nearest points."""
    losses = parabola([*RATES, 16e-3, 32e-3, 64e-3])
    losses[64e-3] = [11.0]
    assert find_optimum(losses).value == pytest.approx(1.7e-3, rel=1e-6)


def test_two_values_have_a_best_one_without_a_parabola():
    found = find_optimum({1e-3: [3.0, 3.1], 2e-3: [2.9, 3.0]})
    assert (found.value, found.parabola, found.interval) == (2e-3, None, None)
    assert found.at_edge
