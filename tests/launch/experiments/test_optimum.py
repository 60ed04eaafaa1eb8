"""The optimum of a sweep: closed forms for the parabola and its interval, edges, failed runs."""

import numpy as np
import pytest

from benchmarks.sweep_coverage import simulated
from launch.experiments.optimum import find_optimum
from launch.experiments.quantiles import student_quantile
from launch.experiments.results import describe

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

    The delta method gives the variance of that for independent noise of the means; with little
    noise Fieller's interval is the same.
    """
    generator, h, noise, seeds = np.random.default_rng(1), np.log(2), 0.0005, 8
    means = np.array([3.0225, 3.0, 3.0275])
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
    half = 1.7207 * deviation  # of Student's t with 3 * (seeds - 1) degrees of freedom
    low, high = np.log(np.array(found.interval) / found.value)
    assert low == pytest.approx(-half, rel=0.05)
    assert high == pytest.approx(np.log(2e-3 / found.value), rel=1e-6)  # the best measured value
    assert not found.open_ended


def test_quantiles_are_those_of_the_published_table():
    """Abramowitz and Stegun 1964, table 26.10."""
    table = {(0.9, 1): 3.078, (0.9, 4): 1.533, (0.9, 30): 1.310, (0.95, 1): 6.314, (0.95, 2): 2.920,
             (0.95, 5): 2.015, (0.95, 7): 1.895, (0.95, 120): 1.658}  # fmt: skip
    for (share, freedom), expected in table.items():
        assert student_quantile(share, freedom) == pytest.approx(expected, abs=5e-4)


@pytest.mark.parametrize("blows_up", [False, True])
@pytest.mark.parametrize("noise", [0.001, 0.005, 0.02])
@pytest.mark.parametrize("seeds", [2, 3])
def test_the_interval_covers_the_true_optimum_and_the_best_measured_value(blows_up, noise, seeds):
    """Nine of ten times; `python -m benchmarks.sweep_coverage` counts more sweeps."""
    generator, held = np.random.default_rng(1), []
    for _ in range(150):
        best = float(np.exp(generator.uniform(*np.log([1e-3, 4e-3]))))
        losses = simulated(generator, best, "parabola", blows_up, noise, seeds)
        found = find_optimum(losses)
        if found.interval is not None:
            low, high = found.interval
            held.append(low <= best <= high)
            assert low <= min(losses, key=lambda rate: np.mean(losses[rate])) <= high
    assert len(held) > 60 and np.mean(held) > 0.82


def test_rates_that_blew_up_do_not_pull_the_parabola():
    losses = dict(zip(RATES, [[3.605], [3.405], [3.305], [6.85], [7.25]], strict=True))
    found = find_optimum(losses)
    assert (found.value, found.loss, found.interval, found.at_edge) == (2e-3, 3.305, None, True)
    assert found.high == (4e-3, 8e-3) and found.missing == ((2e-3, 4e-3),)
    text = describe("learning_rate", found)
    assert "add values between 0.002 and 0.004" in text and "minimum of a" not in text
    both = find_optimum({rate: [loss, loss + 0.01] for rate, (loss,) in losses.items()})
    assert (both.value, both.interval) == (2e-3, None)


def test_a_rise_that_is_no_parabola_leaves_the_three_values_next_to_the_best():
    """A rate that is 12% worse than its neighbour, while seeds differ by 0.1%, has blown up."""
    losses = {rate: [values[0] - 0.002, values[0] + 0.002]
              for rate, values in parabola(RATES, 1.2e-3).items()}  # fmt: skip
    losses[4e-3] = [3.35, 3.36]
    found = find_optimum(losses)
    assert found.fitted == (5e-4, 2e-3) and found.points == 3
    assert found.value == pytest.approx(1.2e-3, rel=1e-6)


def test_a_value_of_which_a_seed_diverged_is_not_averaged_over_the_survivor():
    losses = {rate: [values[0], values[0] + 0.004] for rate, values in parabola(RATES).items()}
    losses[4e-3] = [2.9]  # the luckiest run of all, beside one that gave up
    found = find_optimum(losses, {4e-3: 1})
    assert found.measured == 2e-3 and found.at_edge and found.incomplete == {4e-3: 1}
    assert "0.004, where 1 run gave up" in describe("learning_rate", found)
    losses[4e-3] = [2.9, 6.0]  # it blew up, but ended
    ended = find_optimum(losses)
    assert ended.measured == 2e-3 and ended.high == (4e-3, 8e-3) and ended.at_edge
    assert find_optimum({}, {1e-3: 2}) is None


@pytest.mark.parametrize(("best", "edge"), [(1e-5, 5e-4), (1.0, 8e-3)])
def test_an_optimum_at_the_edge_is_the_last_point_and_says_so(best, edge):
    found = find_optimum({rate: loss * 2 for rate, loss in parabola(RATES, best).items()})
    assert found.at_edge and found.value == edge and found.interval is None


def test_losses_below_zero_have_an_optimum():
    losses = {rate: [values[0] - 4] for rate, values in parabola(RATES).items()}
    assert find_optimum(losses).measured == find_optimum(parabola(RATES)).measured


def test_a_far_outlier_does_not_move_the_optimum():
    """A learning rate at which the loss explodes is not among the nearest points."""
    losses = parabola([*RATES, 16e-3, 32e-3, 64e-3])
    losses[64e-3] = [11.0]
    assert find_optimum(losses).value == pytest.approx(1.7e-3, rel=1e-6)


def test_two_values_have_a_best_one_without_a_parabola():
    found = find_optimum({1e-3: [3.0, 3.1], 2e-3: [2.9, 3.0]})
    assert (found.value, found.parabola, found.interval) == (2e-3, None, None)
    assert found.at_edge
