"""Draws of the campaign of combinations: one in every change, and a few in turn as soak tests."""

import pytest

from tests import ROOT
from tests.combinations.draws import FACTORS, PLAIN, draw_number
from tests.combinations.runs import write_data
from tests.combinations.trial import Trial
from tests.soak_rotation import number_of_commit

TURN, DRAWS = 8, 200  # draws of a turn, of the campaign


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    directory = tmp_path_factory.mktemp("combinations")
    write_data(directory / "data")
    return directory


@pytest.mark.parametrize(
    "more",
    [
        {"between": "evaluation"},
        # Mamba-2 reads weights of a convolution; the first step of each start is computed twice.
        {"model": "mamba2", "integrity": "on"},
    ],
)
def test_zero3_with_selective_recomputation_resumes(base, more) -> None:
    """The probe of a resume and an evaluation run the model before its first backward pass."""
    draw = {name: values[0] for name, values in FACTORS.items()} | PLAIN
    draw |= {"profile": "zero3", "recompute": "selective"} | more
    entry = Trial(draw, 0, base).run()
    assert not entry["problems"], entry


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_draws_of_this_commit_have_no_differences(base) -> None:
    first = number_of_commit(ROOT) * TURN
    for number in range(first, first + TURN):
        entry = Trial(draw_number(number % DRAWS), number % DRAWS, base).run()
        assert not entry["problems"], entry
