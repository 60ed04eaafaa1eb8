"""Numbers and times as text."""

import json
import math

import pytest

from zerolm.common.values import count, duration, shown_bytes, shown_seconds, strict_json


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (5, "5s"),
        (184, "3m04s"),
        (7380, "2h03m"),
        (97380, "1d03h03m"),
        (28893540, "334d09h"),
        (math.inf, "unknown"),
    ],
)
def test_seconds_are_shown_with_two_units(seconds, text) -> None:
    assert duration(seconds) == text


def test_a_time_of_minutes_is_no_power_of_ten() -> None:
    shown = [shown_seconds(seconds) for seconds in (0.012345, 2.52, 99.94, 99.96, 2520)]
    assert shown == ["0.0123 s", "2.52 s", "99.9 s", "1m40s", "42m00s"]


@pytest.mark.parametrize(
    ("show", "number", "text"),
    [(count, 0, "0"), (count, 999.4, "999"), (count, 999.6, "1k"), (count, 999_600, "1M"),
     (count, 1.234e9, "1.23B"), (count, 2.5e15, "2.5Q"), (count, math.nan, "nan"),
     (shown_bytes, 1023, "0.999 KiB"), (shown_bytes, 1.5 * 2**40, "1.5 TiB")],
)  # fmt: skip
def test_counts_and_bytes_are_shown_with_three_digits_and_a_unit(show, number, text) -> None:
    assert show(number) == text


def test_json_has_no_numbers_that_are_not_finite() -> None:
    value = {"a": [1.0, math.nan, (math.inf,)], "b": {"c": -math.inf}, "d": "nan"}
    assert json.loads(strict_json(value)) == {
        "a": [1.0, None, [None]],
        "b": {"c": None},
        "d": "nan",
    }
