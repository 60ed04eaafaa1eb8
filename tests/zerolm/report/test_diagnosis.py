"""Diagnosis: no findings for healthy runs, and the right one for each fault."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.zerolm.report.metric_rows import TOKENS, kinds, power_law, rows
from zerolm.report.diagnosis import findings


@pytest.mark.parametrize(
    ("kind", "sick", "healthy"),
    [
        ("clipping", {"train/clipped_share": 0.9}, {"train/clipped_share": 0.2}),
        ("update_ratio", {"train/update_ratio": 0.1}, {"train/update_ratio": 1e-3}),
        ("update_ratio", {"train/update_ratio": 1e-7}, {"train/update_ratio": 1e-4}),
        ("repeated_data", {"data/web/epochs": np.linspace(0, 9, 200)}, {"data/web/epochs": 3.9}),
        (
            "slow_data",
            {"throughput/data_seconds": 0.3, "throughput/step_seconds": 1},
            {"throughput/data_seconds": 0.02, "throughput/step_seconds": 1},
        ),
        ("low_mfu", {"throughput/mfu": 0.03}, {"throughput/mfu": 0.4}),
        (
            "falling_mfu",
            {"throughput/mfu": np.linspace(0.5, 0.2, 200)},
            {"throughput/mfu": np.linspace(0.5, 0.45, 200)},
        ),
        (
            "slow_rank",
            {
                "throughput/slowest_rank": 3,
                "throughput/slowest_rank_seconds": 2,
                "throughput/mean_rank_seconds": 1,
            },
            {  # each in turn
                "throughput/slowest_rank": np.arange(200) % 8,
                "throughput/slowest_rank_seconds": 2,
                "throughput/mean_rank_seconds": 1,
            },
        ),
        ("uneven_pipeline", {"stages/slowest": 1.2}, {"stages/slowest": 1.05}),
        ("uneven_experts", {"router/rank_imbalance": 1.8}, {"router/rank_imbalance": 1.3}),
        (
            "checkpoint_stalls",
            {"throughput/step_seconds": 0.1, "checkpoint/stall_seconds": 0.5},
            {"throughput/step_seconds": 1, "checkpoint/stall_seconds": 0.1},
        ),
    ],
)
def test_each_fault_is_found_and_its_absence_is_not(kind, sick, healthy):
    losses = power_law(200)
    found = findings(rows(losses, **sick))
    assert [finding.kind for finding in found] == [kind]
    assert found[0].text.endswith((".", "compares.", "hosts)."))
    assert kinds(rows(losses, **healthy)) == []
    without_rates = rows(losses, **sick)
    for row in without_rates:
        del row["train/learning_rate"]
    assert kinds(without_rates) == [kind]


def test_an_update_ratio_without_a_learning_rate_is_not_at_the_full_rate():
    written = rows(power_law(200), **{"train/update_ratio": np.repeat([1e-3, 0.1], 100)})
    for row in written[100:]:
        del row["train/learning_rate"]
    assert "update_ratio" not in kinds(written)


@pytest.mark.parametrize(("level", "above", "found"), [
    (4.0, 28, True), (4.0, 27, False),  # the median of 17 values has risen after nine
    (3.1, 60, False), (3.2, 60, True),  # by more than 5%
])  # fmt: skip
def test_a_loss_has_diverged_once_its_median_is_5_percent_above_for_20_rows(level, above, found):
    losses = np.r_[np.full(200, 3.0), np.full(above, level)]
    [*diverged] = [each for each in findings(rows(losses)) if each.kind == "divergence"]
    assert [each.step for each in diverged] == ([2090] if found else [])


def test_each_source_that_is_read_too_often_is_named_at_the_step_where_it_was():
    epochs = {f"data/{name}/epochs": np.linspace(0, most, 200)
              for name, most in (("a", 3.9), ("b", 8.0), ("c", 4.0), ("d", 16.0))}  # fmt: skip
    found = findings(rows(power_law(200), **epochs))
    assert [(each.kind, each.text.split()[1]) for each in found] == [
        ("repeated_data", "b"), ("repeated_data", "d"),
    ]  # fmt: skip
    assert [each.step for each in found] == [1010, 510]


def test_clipping_names_the_share_and_the_first_of_the_rows_it_counts():
    (found,) = findings(rows(power_law(400), **{"train/clipped_share": 0.8}))
    assert found.step == 3010, "the last quarter of the rows"
    assert found.text.startswith("80% of the steps since step 3010 were clipped")


@pytest.mark.parametrize(("rate", "kind"), [(0.49, []), (0.5, ["update_ratio"])])
def test_updates_are_judged_where_the_rate_is_at_least_half_its_peak(rate, kind):
    """A step at a lower rate changes the weights less, as it should."""
    rates = np.where(np.arange(400) < 200, 1.0, rate)
    ratios = np.where(np.arange(400) < 200, 1e-3, 1e-7)
    assert kinds(rows(power_law(400), rates, **{"train/update_ratio": ratios})) == kind


@pytest.mark.parametrize(
    ("ratio", "advice"),
    [
        (0.03, None), (0.031, "Lower --learning_rate, or warm up longer."),
        (1e-5, None), (0.99e-5, "The model hardly learns: raise --learning_rate"),
    ],
)  # fmt: skip
def test_the_advice_on_updates_says_in_which_direction_to_change_the_rate(ratio, advice):
    found = findings(rows(power_law(200), **{"train/update_ratio": ratio}))
    assert len(found) == (advice is not None)
    assert all(f"not unusual. {advice}" in each.text for each in found)


def test_clipping_in_the_first_steps_only_is_not_a_finding():
    share = np.where(np.arange(400) < 100, 1.0, 0.1)
    assert kinds(rows(power_law(400), **{"train/clipped_share": share})) == []


def with_rising_validation(losses: np.ndarray, epochs: float) -> list[dict]:
    """Return rows whose validation loss rises after step 2000, while the data is repeated."""
    values = [4, 3.8, 3.6, 3.5, *np.linspace(3.6, 4.3, 8)]
    evaluations = [
        {"step": step, "tokens": step * TOKENS, "eval/loss": value}
        for step, value in zip(range(500, 6001, 500), values, strict=True)
    ]
    read = {"data/web/epochs": np.linspace(0, epochs, len(losses))}
    return sorted([*rows(losses, **read), *evaluations], key=lambda row: row["step"])


def test_a_widening_validation_gap_is_overfitting_when_data_is_repeated():
    found = findings(with_rising_validation(power_law(600), 3.0))
    assert [finding.kind for finding in found] == ["overfitting"]
    assert found[0].step == 2000 and "web 3.0 times" in found[0].text
    assert "from 3.500 at step 2000 to 4.300" in found[0].text
    assert kinds(with_rising_validation(power_law(600), 0.5)) == ["validation"]


def test_a_validation_loss_that_rises_with_the_training_loss_is_not_overfitting():
    losses = power_law(600)
    losses[-25:] = np.linspace(losses[575], losses[50], 25)
    for each in (losses, np.full(600, 2.0)):
        assert not {"overfitting", "validation"} & set(kinds(with_rising_validation(each, 3.0)))


def test_noisy_but_falling_validation_loss_is_not_a_finding():
    losses = power_law(600)
    noise = 0.02 * np.random.default_rng(3).standard_normal(12)
    evaluations = [
        {"step": step, "tokens": step * TOKENS, "eval/loss": losses[step // 10 - 1] + bump}
        for step, bump in zip(range(500, 6001, 500), noise, strict=True)
    ]
    assert kinds(sorted([*rows(losses), *evaluations], key=lambda row: row["step"])) == []


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    st.lists(
        st.dictionaries(
            st.sampled_from(["train/loss", "train/learning_rate", "eval/loss", "throughput/mfu",
                             "train/clipped_share", "data/a/epochs", "checkpoint/stall_seconds",
                             "throughput/data_seconds", "throughput/step_seconds"]),
            st.none() | st.floats(0, 1e9) | st.integers(0, 10**9),
        ),
        max_size=120,
    )
)  # fmt: skip
def test_values_of_any_type_are_accepted(contents):
    lines = [{"step": number, "tokens": number * 7, **row} for number, row in enumerate(contents)]
    for finding in findings(lines, [{"event": "start", "step": 0}, {"event": "hang", "step": -1}]):
        json.dumps(vars(finding) if hasattr(finding, "__dict__") else finding.text)


def test_an_empty_run_has_no_finding():
    assert findings([], []) == []
