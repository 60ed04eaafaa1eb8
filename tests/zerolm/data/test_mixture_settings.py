"""The mixture from the settings: blends and caps by name, or all problems at once."""

import json
import re
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest

from zerolm.common.values import count
from zerolm.data.epochs import cap_problems, skipped_data_notices, table, times
from zerolm.data.mixture import (
    blend_shares,
    blends_from_record,
    describe_blends,
    record,
    redistribute,
    resolve_mixture,
)
from zerolm.data.order import Blend
from zerolm.parts.settings import RunSettings

NAMES = ("web", "code", "math")
SIZES = [1000, 200, 50]  # sequences of 100 tokens


def find(name: str) -> int:
    if name not in NAMES:
        raise ValueError("names no source.")
    return NAMES.index(name)


def mixture(weights=(7, 3, 0), **given):
    settings = RunSettings(data=NAMES, seq_len=100, **given)
    problems: list[str] = []
    return settings, resolve_mixture(settings, weights, find, SIZES, problems), problems


def test_blends_start_with_the_first_sequence_at_their_tokens():
    given = ("1.5k:web=1,math=0.5", "2001:math=1,web=0")
    _, resolved, problems = mixture(data_stage=given)
    assert not problems
    assert resolved.blends == [Blend(0, (7, 3, 0)), Blend(15, (1, 0, 0.5)), Blend(21, (0, 0, 1))]
    consumed = mixture(data_stage=("1.5k:web=1@120,math=0.5",))[1].blends[1].consumed
    assert consumed == (120, 0, 0)
    recorded = record(resolved, NAMES)
    assert recorded["sources"] == list(NAMES) and recorded["max_epochs"] == [None] * 3
    assert blends_from_record(json.loads(json.dumps(recorded))["stages"]) == resolved.blends
    assert blend_shares(resolved.blends[1], NAMES) == {"web": 2 / 3, "math": 1 / 3}
    assert describe_blends(resolved.blends[1:]) == (
        "[1.0, 0.0, 0.5] from sequence 15; [0.0, 0.0, 1.0] from sequence 21"
    )


def test_the_cap_of_one_source_overrides_that_of_all():
    _, resolved, problems = mixture((7, 3, 1), max_epochs=("4", "math=1.5"))
    assert not problems and resolved.caps == [4, 4, Fraction(3, 2)]
    assert record(resolved, NAMES)["max_epochs"] == [4.0, 4.0, 1.5]
    assert resolved.blends == [Blend(0, (7, 3, 1))] and resolved.supply is None


def test_the_lowest_cap_of_a_source_is_one_of_its_sequences():
    for cap, number in (("math=0.02", 0), ("math=0.0199", 1)):
        _, _, problems = mixture((7, 3, 1), max_epochs=(cap,))
        assert len(problems) == number


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"data_stage": ("2k",)}, "--data_stage: 2k must be the number of tokens"),
        ({"data_stage": ("0:web=1",)}, "--data_stage: 0:web=1 must be the number of tokens"),
        ({"data_stage": ("2k:",)}, "--data_stage: 2k: must be the number of tokens"),
        ({"data_stage": ("1.5:math=1",)}, "--data_stage: 1.5:math=1 must be the number of tokens"),
        ({"data_stage": ("x:math=1",)}, "--data_stage: x:math=1 must be the number of tokens"),
        ({"data_stage": ("2k:wbe=1,math=1",)}, "wbe=1 names no source"),
        ({"data_stage": ("2k:web=x,math=1",)}, "web=x is not a number"),
        ({"data_stage": ("2k:web=-1,math=2",)}, "web=-1: a weight must not be below 0"),
        ({"data_stage": ("2k:math=1,math=2",)}, "math is listed twice"),
        ({"data_stage": ("2k:math=0",)}, "every weight is 0"),
        ({"data_stage": ("2k:math=1", "1990:web=1")}, "does not start after the previous blend"),
        ({"data_stage": ("1k:math=1", "3k:web=1", "2k:code=1")}, "2k:code=1 does not start after"),
        ({"data_stage": ("2k:web=1",)}, "math has no weight in any blend"),
        ({"max_epochs": ("x",)}, "--max_epochs: x is not a number"),
        ({"max_epochs": ("lua=2",)}, "lua=2 names no source"),
        ({"max_epochs": ("0",)}, "0 must be above 0. Write for example 4."),
        ({"max_epochs": ("math=0",)}, "math=0 must be above 0. Write for example math=4."),
        ({"max_epochs": ("math=-1",)}, "math=-1 must be above 0"),
        ({"max_epochs": ("2", "3")}, "3 is a second limit"),
        ({"max_epochs": ("math=2", "web=3", "math=3")}, "math=3 is a second limit"),
        ({"max_epochs": ("math=0.001",)}, "is less than one of the 50 sequences of math"),
        ({"over_max_epochs": "warn"}, "needs --max_epochs"),
    ],
)
def test_invalid_settings_are_refused(given, named):
    weights = (7, 3, 0) if "data_stage" in given else (7, 3, 1)
    _, _, problems = mixture(weights, **given)
    assert len(problems) == 1 and named in problems[0], problems


@pytest.mark.parametrize(("policy", "refused", "noted"), [(None, 1, 0), ("warn", 0, 1)])
def test_a_source_read_more_often_than_its_cap_is_refused_or_noted(policy, refused, noted):
    """A tenth of 30 blocks is 192 sequences of the 50 of math."""
    settings, resolved, _ = mixture((6, 3, 1), max_epochs=("math=3.8",), over_max_epochs=policy)
    order = resolved.order(SIZES, 0)
    problems, notices = cap_problems(resolved, order, NAMES, 1920, settings)
    assert (len(problems), len(notices)) == (refused, noted)
    message = "source math would be read 3.84 times (19,200 tokens of 5,000)"
    assert message in (problems + notices)[0]
    assert cap_problems(resolved, order, NAMES, 1856, settings) == ([], [])
    more = cap_problems(resolved, order, NAMES, 98 * 64, settings)
    four_digits = f"would be read {order.counts(98 * 64)[2] / 50} times"
    assert four_digits in [*more[0], *more[1]][0]
    at_most = mixture((6, 3, 1), max_epochs=("math=3.84",))[1]
    assert cap_problems(at_most, order, NAMES, 1920, settings) == ([], []), "as often as its cap"


def test_epochs_are_shown_without_an_exponent():
    numbers = (0.5, 3.25, 999.4, 999.7, 21_700)
    assert [times(number) for number in numbers] == ["0.5", "3.25", "999", "1,000", "21,700"]


def test_a_run_longer_than_the_caps_allow_is_refused_and_the_plan_is_shown():
    settings, resolved, _ = mixture(
        (6, 3, 1), max_epochs=("math=2", "code=1"), over_max_epochs="redistribute"
    )
    assert [blend.weights for blend in resolved.blends] == [(6, 3, 1), (6, 0, 1), (6, 0, 0)]
    assert resolved.blends[1].start == 666  # 200 sequences at a share of 3/10
    assert resolved.supply is None  # web may be read for ever
    lines = table(resolved, resolved.order(SIZES, 0), NAMES, 2000, 100)
    assert [line.split()[0] for line in lines] == ["source", *NAMES]
    starts = [f"share from {count(blend.start * 100)}" for blend in resolved.blends]
    assert re.findall(r"share from \S+", lines[0]) == starts == ["share from 0", *starts[1:]]
    assert lines[0].startswith("source   tokens ") and len(set(map(len, lines))) == 1
    order = resolved.order(SIZES, 0)
    at_once = table(resolved, order, NAMES, 666, 100)[0]
    assert at_once.count("share") == 1, "the second blend begins where this run ends"
    assert table(resolved, order, NAMES, 667, 100)[0].count("share from") == 2
    edges = [0, *(blend.start for blend in resolved.blends[1:]), 2000]
    for number, line in enumerate(lines[1:]):
        cells = line.split()
        for blend, (start, end) in enumerate(pairwise(edges)):
            weights = resolved.blends[blend].weights
            share, epochs = cells[2 + 2 * blend : 4 + 2 * blend]
            part = f"{weights[number] / sum(weights):.3%}" if weights[number] else "-"
            taken = (order.counts(end) - order.counts(start))[number]
            assert share == part and float(epochs) == float(f"{taken / SIZES[number]:.3g}")
        taken = order.counts(2000)[number]
        assert cells[1] == f"{SIZES[number] * 100:,}" and cells[-3] == f"{taken * 100:,}"
        assert cells[-2] == f"{taken / SIZES[number]:.3g}"
    assert lines[2].endswith("1") and lines[3].endswith("2") and lines[1].endswith("-")
    settings, resolved, _ = mixture((6, 3, 1), max_epochs=("1",), over_max_epochs="redistribute")
    supply = resolved.supply
    assert supply is not None and sum(SIZES) - 3 <= supply <= sum(SIZES)
    order = resolved.order(SIZES, 0)
    assert cap_problems(resolved, order, NAMES, supply, settings) == ([], [])
    (problem,), _ = cap_problems(resolved, order, NAMES, supply + 1, settings)
    assert f"leaves {supply * 100:,} tokens for a run of {supply * 100 + 100:,}" in problem


def test_the_table_of_one_blend_has_one_share_and_no_tokens_of_its_start():
    _, resolved, _ = mixture((7, 3, 1))
    head, *_ = table(resolved, resolved.order(SIZES, 0), NAMES, 100, 100)
    assert head.split() == ["source", "tokens", "share", "taken", "epochs", "at", "most"]


def test_making_up_for_a_rollback_may_exceed_a_cap_and_is_noted():
    """After the supply nothing caps a source any more; counted here sequence by sequence."""
    sizes, names = [600, 300, 100], ["web", "code", "math"]
    settings = RunSettings(over_max_epochs="redistribute")
    resolved = redistribute([Blend(0, (5.0, 4.0, 1.0))], [Fraction(1)] * 3, sizes)
    assert resolved.supply is not None
    order = resolved.order(sizes, 0)
    end, windows = resolved.supply, [[30, 94], [300, 340]]
    left = [n for n in range(end + 104) if not any(a <= n < b for a, b in windows)]
    taken = np.bincount(order(np.array(left)).source, minlength=3).tolist()
    expected = [n for n, count, size in zip(names, taken, sizes, strict=True) if count > size]
    lines = skipped_data_notices(resolved, order, names, end, windows, settings)
    assert expected and [line.split("source ")[1].split(" ")[0] for line in lines] == expected
    for line, name in zip(lines, expected, strict=True):
        times = taken[names.index(name)] / sizes[names.index(name)]
        assert f"will be read {times:.4g} times, because 104 sequences" in line
    assert not skipped_data_notices(resolved, order, names, 500, windows, settings)
    assert not skipped_data_notices(resolved, order, names, end, [], settings)


def test_a_blend_after_the_end_of_the_run_is_refused():
    for start, refused in (("149k", False), ("150k", True)):
        settings, resolved, _ = mixture(data_stage=(f"{start}:math=1",))
        problems, _ = cap_problems(resolved, resolved.order(SIZES, 0), NAMES, 1500, settings)
        late = f"{start}:math=1 starts at or after the end of the run"
        assert any(late in problem for problem in problems) is refused
        assert not refused or f"{late}, 150k tokens." in problems[0]
