"""Adaptive clipping is ZClip's, by its formulas on the whole list of norms, resumed as JSON."""

import json
import math

import numpy as np
import pytest

from zerolm.optim.adaptive_clip import Clipping, NormStatistics


def published(norms: list[float], threshold: float) -> list[float]:
    """Return the bound of each step: arXiv 2504.02507, algorithm 1, with its constants."""
    bounds = [math.inf] * 25
    mean, variance = np.mean(norms[:25]), np.var(norms[:25])
    for norm in norms[25:]:
        z = (norm - mean) / (math.sqrt(variance) + 1e-6)
        clipped = mean + threshold / z * threshold * math.sqrt(variance) if z > threshold else norm
        bounds.append(clipped if z > threshold else math.inf)
        mean = 0.97 * mean + 0.03 * clipped
        variance = 0.97 * variance + 0.03 * (clipped - mean) ** 2
    return bounds


@pytest.mark.parametrize(("fixed", "threshold"), [(0.0, 2.5), (1.2, 2.5), (0.0, 0.8)])
def test_bounds_are_zclips_and_survive_a_restart_at_any_step(fixed, threshold):
    generator = np.random.default_rng(0)
    norms = (1 + 0.1 * generator.standard_t(3, 400)).clip(0.1).tolist()
    clipping, bounds = Clipping(fixed, threshold), []
    for norm in norms:
        bounds.append(clipping.bound(norm))
        clipping.end_step(norm)
        state = json.loads(json.dumps(vars(clipping.statistics)))
        clipping = Clipping(fixed, threshold)
        clipping.statistics = NormStatistics(**state)
    adaptive = published(norms, threshold)
    assert sum(map(math.isfinite, adaptive)) > 10
    expected = [min(bound, fixed or math.inf) for bound in adaptive]
    np.testing.assert_allclose([bound or math.inf for bound in bounds], expected, rtol=1e-9)


def test_a_norm_at_the_threshold_is_not_an_outlier():
    """After equal norms, whose deviation is 0, the threshold counts in units of 1e-6."""
    clipping = Clipping(2.0, 0.5 / 1e-6)
    clipping.statistics = NormStatistics(mean=1.0, variance=0.0)
    assert clipping.bound(1.5) == 2.0 and clipping.bound(1.5001) == 1.0


def test_without_a_threshold_only_the_fixed_norm_clips():
    clipping = Clipping(0.5, 0.0)
    for norm in [1.0] * 30 + [100.0]:
        assert clipping.bound(norm) == 0.5
        clipping.end_step(norm)
    assert clipping.statistics == NormStatistics()
    assert clipping.is_active and not clipping.is_adaptive
    assert clipping.metrics(0.5) == {}
    adaptive = Clipping(0.0, 2.5)
    assert adaptive.metrics(0.5) == {"train/clip_norm": 0.5} and adaptive.metrics(0.0) == {}
    assert not Clipping(0.0, 0.0).is_active and Clipping(0.0, 2.5).is_active
