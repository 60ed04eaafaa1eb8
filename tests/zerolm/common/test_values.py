"""Numbers and times as text."""

import json
import math

import pytest

from zerolm.common.values import duration, strict_json


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(5, "5s"), (184, "3m04s"), (7380, "2h03m"), (97380, "1d03h03m"), (math.inf, "unknown")],
)
def test_seconds_are_shown_with_two_units(seconds, text) -> None:
    assert duration(seconds) == text


def test_json_has_no_numbers_that_are_not_finite() -> None:
    value = {"a": [1.0, math.nan, (math.inf,)], "b": {"c": -math.inf}, "d": "nan"}
    assert json.loads(strict_json(value)) == {
        "a": [1.0, None, [None]],
        "b": {"c": None},
        "d": "nan",
    }
