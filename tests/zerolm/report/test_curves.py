"""Thinning keeps every outlier of a curve."""

import math

from hypothesis import given
from hypothesis import strategies as some

from zerolm.report.curves import thinned

VALUES = some.lists(some.floats(-1e6, 1e6) | some.just(math.nan), min_size=1, max_size=400)


@given(VALUES, some.integers(4, 100))
def test_extremes_ends_and_gaps_stay(values, most) -> None:
    indices = thinned(values, most)
    assert indices == sorted(set(indices)) and {0, len(values) - 1} <= set(indices)
    finite = [value for value in values if math.isfinite(value)]
    chosen = [values[index] for index in indices if math.isfinite(values[index])]
    if finite:
        assert (min(chosen), max(chosen)) == (min(finite), max(finite))
    assert len(chosen) <= max(most, 4)
    if len(values) <= most:
        assert indices == list(range(len(values)))
    if len(finite) < len(values):
        assert any(math.isnan(values[index]) for index in indices)


def test_a_single_spike_in_a_million_steps_stays() -> None:
    values = [1.0] * 1_000_000
    values[765_432] = 50.0
    values[123_456] = -3.0
    indices = thinned(values, 2000)
    assert len(indices) <= 2000 and {765_432, 123_456} <= set(indices)
