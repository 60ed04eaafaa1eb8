"""What a user asks of a mixture: stages and caps by name, or every problem at once."""

from fractions import Fraction

import numpy as np
import pytest

from zerolm.epoch_plan import cap_problems, left_out_notices, table
from zerolm.mixture import redistributed
from zerolm.mixture_settings import resolve
from zerolm.order import Stage
from zerolm.settings import Settings

NAMES = ("web", "code", "math")
SIZES = [1000, 200, 50]  # sequences of 100 tokens


def find(name: str) -> int:
    if name not in NAMES:
        raise ValueError(f"no source is called {name!r}.")
    return NAMES.index(name)


def mixture(weights=(7, 3, 0), **given):
    settings = Settings(data=NAMES, seq_len=100, **given)
    problems: list[str] = []
    return settings, resolve(settings, weights, find, SIZES, problems), problems


def test_stages_begin_with_the_first_sequence_at_their_tokens():
    given = ("1.5k:web=1,math=0.5", "2001:math=1")
    _, found, problems = mixture(data_stage=given)
    assert not problems
    assert found.stages == [Stage(0, (7, 3, 0)), Stage(15, (1, 0, 0.5)), Stage(21, (0, 0, 1))]


def test_a_cap_of_its_own_goes_before_that_of_all():
    _, found, problems = mixture((7, 3, 1), max_epochs=("4", "math=1.5"))
    assert not problems and found.caps == [4, 4, Fraction(3, 2)]
    assert found.stages == [Stage(0, (7, 3, 1))] and found.supply is None


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"data_stage": ("2k",)}, "--data_stage: 2k, must be the tokens"),
        ({"data_stage": ("0:web=1",)}, "--data_stage: 0:web=1, must be the tokens"),
        ({"data_stage": ("2k:wbe=1,math=1",)}, "wbe=1: no source is called 'wbe'"),
        ({"data_stage": ("2k:web=x,math=1",)}, "web=x: not a number"),
        ({"data_stage": ("2k:web=-1,math=2",)}, "web=-1: a weight must not be below 0"),
        ({"data_stage": ("2k:math=1,math=2",)}, "math: is named twice"),
        ({"data_stage": ("2k:math=0",)}, "every weight is 0"),
        ({"data_stage": ("2k:math=1", "1990:web=1")}, "begins with or before the stage"),
        ({"data_stage": ("2k:web=1",)}, "math, has no weight in any stage"),
        ({"max_epochs": ("x",)}, "--max_epochs: x, not a number"),
        ({"max_epochs": ("lua=2",)}, "no source is called 'lua'"),
        ({"max_epochs": ("0",)}, "must be above 0"),
        ({"max_epochs": ("2", "3")}, "is the second one"),
        ({"max_epochs": ("math=0.001",)}, "is less than one of the 50 sequences of math"),
        ({"over_max_epochs": "warn"}, "needs --max_epochs"),
    ],
)
def test_what_cannot_be_meant_is_refused(given, named):
    weights = (7, 3, 0) if "data_stage" in given else (7, 3, 1)
    _, _, problems = mixture(weights, **given)
    assert any(named in problem for problem in problems), problems


@pytest.mark.parametrize(("policy", "refused", "noted"), [(None, 1, 0), ("warn", 0, 1)])
def test_a_source_that_would_be_read_too_often(policy, refused, noted):
    """A tenth of 30 blocks is 192 sequences of the 50 of math."""
    settings, found, _ = mixture((6, 3, 1), max_epochs=("math=3.8",), over_max_epochs=policy)
    order = found.order(SIZES, 0)
    problems, notices = cap_problems(found, order, NAMES, 1920, settings)
    assert (len(problems), len(notices)) == (refused, noted)
    said = "source math would be read 3.84 times (19,200 tokens of 5,000)"
    assert said in (problems + notices)[0]
    assert cap_problems(found, order, NAMES, 1856, settings) == ([], [])


def test_what_the_caps_leave_is_refused_and_shown():
    settings, found, _ = mixture(
        (6, 3, 1), max_epochs=("math=2", "code=1"), over_max_epochs="redistribute"
    )
    assert [stage.weights for stage in found.stages] == [(6, 3, 1), (6, 0, 1), (6, 0, 0)]
    assert found.stages[1].start == 666  # 200 sequences at a share of 3/10
    assert found.supply is None  # web may be read for ever
    lines = table(found, found.order(SIZES, 0), NAMES, 2000, 100)
    assert [line.split()[0] for line in lines] == ["source", *NAMES]
    assert lines[2].endswith("1") and lines[3].endswith("2") and lines[1].endswith("-")
    settings, found, _ = mixture((6, 3, 1), max_epochs=("1",), over_max_epochs="redistribute")
    supply = found.supply
    assert supply is not None and sum(SIZES) - 3 <= supply <= sum(SIZES)
    order = found.order(SIZES, 0)
    assert cap_problems(found, order, NAMES, supply, settings) == ([], [])
    (problem,), _ = cap_problems(found, order, NAMES, supply + 1, settings)
    assert f"leaves {supply * 100:,} tokens for a run of {supply * 100 + 100:,}" in problem


def test_what_a_rollback_left_out_may_exceed_a_cap_and_is_noted():
    """Behind the supply nothing caps a source any more; counted here sequence by sequence."""
    sizes, names = [600, 300, 100], ["web", "code", "math"]
    settings = Settings(over_max_epochs="redistribute")
    found = redistributed([Stage(0, (5.0, 4.0, 1.0))], [Fraction(1)] * 3, sizes)
    assert found.supply is not None
    order = found.order(sizes, 0)
    end, windows = found.supply, [[100, 164], [300, 340]]
    left = [n for n in range(end + 104) if not any(a <= n < b for a, b in windows)]
    taken = np.bincount(order(np.array(left)).source, minlength=3).tolist()
    expected = [n for n, count, size in zip(names, taken, sizes, strict=True) if count > size]
    lines = left_out_notices(found, order, names, end, windows, settings)
    assert expected and [line.split("source ")[1].split(" ")[0] for line in lines] == expected
    for line, name in zip(lines, expected, strict=True):
        times = taken[names.index(name)] / sizes[names.index(name)]
        assert f"will be read {times:.4g} times, since 104 sequences" in line
    assert not left_out_notices(found, order, names, 500, windows, settings)
    assert not left_out_notices(found, order, names, end, [], settings)


def test_a_stage_behind_the_end_of_the_run_is_refused():
    settings, found, _ = mixture(data_stage=("150k:math=1",))
    (problem,), _ = cap_problems(found, found.order(SIZES, 0), NAMES, 1500, settings)
    assert "150k:math=1, begins at or after the end of the run" in problem
