"""The scaling law: it is recovered from its own losses, and from published ones.

Published: the losses of Hoffmann et al. 2022 as Besiroglu et al. 2024 read them from a figure are
not part of the project; `python -m benchmarks.published_laws FILE` fits them.
"""

import numpy as np
import pytest

from benchmarks.predict_coverage import coverage
from launch.estimate.scaling import BESIROGLU, HOFFMANN, LossFit
from launch.experiments.law import Fitted, Observed, fit, fit_without

SIZES, TOKENS = (5e7, 2e8, 8e8), (1e9, 4e9, 1.6e10)
# Cerebras-GPT (arXiv 2304.03208): parameters, tokens (20 per parameter), loss on the Pile's test
# set, as in the model card of cerebras/Cerebras-GPT-13B.
CEREBRAS = [
    Observed(111e6, 2.22e9, 2.566), Observed(256e6, 5.12e9, 2.299), Observed(590e6, 1.18e10, 2.184),
    Observed(1.3e9, 2.63e10, 1.996), Observed(2.7e9, 5.30e10, 1.834),
    Observed(6.7e9, 1.33e11, 1.704), Observed(13e9, 2.57e11, 1.575),
]  # fmt: skip


def losses(law: LossFit, noise: float = 0.0, seed: int = 0) -> list[Observed]:
    generator = np.random.default_rng(seed)
    return [
        Observed(size, tokens, law.loss(size, tokens) * np.exp(noise * generator.normal()))
        for size in SIZES
        for tokens in TOKENS
    ]


@pytest.mark.parametrize(
    "law",
    [BESIROGLU, HOFFMANN, LossFit("steep", 0.5, 3e4, 3e5, 0.6, 0.65)],
    ids=lambda law: law.name,
)
def test_a_law_is_recovered_from_its_own_losses(law):
    found = fit(losses(law))
    for key in ("entropy", "model", "data", "alpha", "beta"):
        assert getattr(found, key) == pytest.approx(getattr(law, key), rel=1e-3), key


@pytest.mark.parametrize("noise", [0.001, 0.005, 0.02])
def test_the_interval_of_noisy_losses_covers_a_larger_model(noise):
    """Nominally 8 of 10 times, in fact more often: `python -m benchmarks.predict_coverage`."""
    shape = [(size, tokens) for size in SIZES for tokens in TOKENS]
    share, _ = coverage(BESIROGLU, shape, noise, ladders=12)
    assert share >= 0.75


def test_the_laws_without_a_point_are_those_of_a_fit_without_it():
    points = losses(BESIROGLU, 0.005)
    for number, law in enumerate(fit_without(points, fit(points))):
        alone = fit(points[:number] + points[number + 1 :])
        assert law.loss(3.2e9, 6.4e10) == pytest.approx(alone.loss(3.2e9, 6.4e10), rel=1e-6)


def test_the_interval_is_wider_farther_from_the_runs():
    fitted = Fitted.of(losses(BESIROGLU, 0.003))
    widths = [
        each.high - each.low
        for each in (fitted.predict(SIZES[-1] * far, TOKENS[-1] * far) for far in (1, 4, 16))
    ]
    assert widths == sorted(widths) and widths[2] > 1.2 * widths[0]


def test_one_bad_run_hardly_moves_the_law():
    points = losses(BESIROGLU)
    points[4] = points[4]._replace(loss=points[4].loss * 1.2)
    target = (4 * SIZES[-1], 4 * TOKENS[-1])
    assert fit(points).loss(*target) == pytest.approx(BESIROGLU.loss(*target), rel=5e-3)


def test_the_largest_cerebras_gpt_is_predicted_from_the_smaller_ones():
    """Nearly four times the compute of the next largest; the errors are those of the table."""
    fitted = Fitted.of(CEREBRAS[:-1])
    found, target = fitted.predict(*CEREBRAS[-1][:2]), CEREBRAS[-1].loss
    assert found.loss == pytest.approx(target, rel=0.02)
    assert found.low < target < found.high and found.high - found.low < 0.3
    assert fitted.one_ratio and not Fitted.of(losses(BESIROGLU)).one_ratio
    assert not fitted.implausible()
    flat = Fitted.of([point._replace(loss=2.0) for point in CEREBRAS])
    assert flat.one_ratio and flat.implausible()


def test_errors_are_those_of_the_points_that_are_left_out():
    points = losses(BESIROGLU, 0.01)
    fitted = Fitted.of(points)
    law = fit(points[:3] + points[4:])
    expected = law.loss(points[3].parameters, points[3].tokens) - points[3].loss
    assert fitted.errors()[3] == pytest.approx(expected)
