"""Odd figures: outliers are found at once, noise and trends hardly ever."""

import math

import pytest
import torch

from zerolm.integrity.bounds import MIN_STEPS, Bounds


def noisy(steps: int, trend: float = 0.0, deviation: float = 0.3) -> torch.Tensor:
    """Return (steps, 50) positive figures, log-normal, that change by a factor e^trend a step."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(steps, 50, generator=generator) * deviation
    return (noise + trend * torch.arange(steps)[:, None]).exp()


@pytest.mark.parametrize("trend", [0.0, -0.002, 0.002])
@pytest.mark.parametrize("deviation", [0.05, 0.3, 1.0])
def test_noise_is_not_odd(trend, deviation) -> None:
    bounds = Bounds()
    assert not sum(bool(bounds.add(row)) for row in noisy(1000, trend, deviation))


@pytest.mark.parametrize("wrong", [math.inf, math.nan, 1e6, 1e-6, 0.0])
def test_one_outlier_among_the_figures_is_odd_and_hides_no_later_one(wrong) -> None:
    bounds = Bounds()
    rows = noisy(MIN_STEPS + 40)
    for number, row in enumerate(rows):
        odd = number >= MIN_STEPS and number % 10 == 0
        if odd:
            row[7] = wrong
        assert bool(bounds.add(row)) == odd


def test_what_is_not_finite_is_odd_from_the_first_step_except_overflows_of_fp16() -> None:
    gradient, loss = torch.tensor([1.0, math.inf, 1.0]), torch.tensor([1.0, 1.0, math.inf])
    assert bool(Bounds().add(gradient)) and bool(Bounds().add(loss))
    fp16 = Bounds(non_finite_is_odd=False)
    assert not bool(fp16.add(gradient)) and bool(fp16.add(loss))


def test_false_alarms_widen_the_bounds_so_that_they_stay_below_one_step_in_200() -> None:
    bounds, generator, count = Bounds(), torch.Generator().manual_seed(1), 0
    for _ in range(4000):  # heavy tails: one figure in 50 is 100 times as large
        row = torch.ones(20)
        row[torch.rand(20, generator=generator) < 0.001] = 100.0
        if bool(bounds.add(row)):
            count += 1
            bounds.widen()
    assert 0 < count < 20
