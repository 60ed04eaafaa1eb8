"""Diagnosis: no findings for healthy runs, and the right one for each fault."""

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.zerolm.report.run_directories import write_run
from zerolm.report.diagnosis import PLATEAU_BLOCKS, _trend, findings
from zerolm.report.findings import Point
from zerolm.report.run_history import read_run
from zerolm.report.status import plain_lines, status_of

TOKENS = 1000  # of a step


def cosine(steps: int, minimum: float = 0.1) -> np.ndarray:
    """Return a learning rate: warm-up for 2% of the steps, then a cosine."""
    at = np.arange(1, steps + 1)
    warm = max(1, steps // 50)
    progress = np.clip((at - warm) / max(steps - warm, 1), 0, 1)
    return np.where(
        at < warm, at / warm, minimum + (1 - minimum) * 0.5 * (1 + np.cos(math.pi * progress))
    )


def constant(steps: int) -> np.ndarray:
    return np.minimum(np.arange(1, steps + 1) / max(1, steps // 50), 1.0)


def rows(losses, rates=None, interval: int = 10, **more) -> list[dict]:
    """Return rows as a run writes them; `more` are series or constants by key."""
    rates = constant(len(losses)) if rates is None else rates
    found = []
    for number, loss in enumerate(losses):
        step = (number + 1) * interval
        row = {
            "step": step,
            "tokens": step * TOKENS,
            "train/loss": None if not math.isfinite(loss) else float(loss),
            "train/learning_rate": 1e-3 * float(rates[number]),
        }
        for key, values in more.items():
            row[key] = float(values if np.isscalar(values) else values[number])
        found.append(row)
    return found


def power_law(steps: int, floor=1.8, height=8.0, exponent=0.25, noise=0.0, seed=0) -> np.ndarray:
    at = np.arange(1, steps + 1)
    return (
        floor
        + height * (at + 2.0) ** -exponent
        + noise * np.random.default_rng(seed).standard_normal(steps)
    )


def kinds(rows, events=()) -> list[str]:
    return [finding.kind for finding in findings(rows, events)]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    steps=st.integers(1, 1500),
    floor=st.floats(0.5, 2.5),
    exponent=st.floats(0.05, 0.6),
    noise=st.floats(0.0, 0.1),
    schedule=st.sampled_from([cosine, constant]),
    seed=st.integers(0, 1000),
)
def test_a_power_law_with_noise_has_no_finding(steps, floor, exponent, noise, schedule, seed):
    losses = power_law(steps, floor, exponent=exponent, noise=noise, seed=seed)
    assert kinds(rows(losses, schedule(steps))) == []


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    noise=st.floats(0.0, 0.03), seed=st.integers(0, 1000), level=st.floats(1.0, 10.0)
)  # fmt: skip
def test_a_flat_curve_at_the_full_rate_is_a_plateau(noise, seed, level):
    losses = power_law(2000, noise=noise * level, seed=seed)
    losses[600:] = losses[600] + noise * level * np.random.default_rng(seed).standard_normal(1400)
    found = findings(rows(losses))
    assert [finding.kind for finding in found] in (["plateau"], [])
    if noise < 0.01:
        assert [finding.kind for finding in found] == ["plateau"]
        assert found[0].tokens == 1000 * 10 * TOKENS, "the last half is the span"
        assert "learning rate" in found[0].text


@pytest.mark.parametrize("slope", [-0.3, 0.0, 0.2])
def test_the_trend_is_the_line_of_least_squares_through_the_medians(slope):
    """Compared with numpy's fit and its covariance."""
    noise = np.random.default_rng(1).standard_normal(PLATEAU_BLOCKS)
    tokens = np.geomspace(1e6, 4e6, PLATEAU_BLOCKS)
    for scale in (0.0, 0.05):
        values = 3.0 + slope * np.log(tokens) + scale * noise
        points = [Point(n, int(t), v) for n, (t, v) in enumerate(zip(tokens, values, strict=True))]
        change, error = _trend(points)
        (fitted, _), covariance = np.polyfit(np.log(tokens), values, 1, cov=True)
        assert change == pytest.approx(fitted * math.log(4), abs=1e-6)
        assert error == pytest.approx(math.sqrt(covariance[0, 0]) * math.log(4), abs=1e-6)


def test_a_plateau_names_its_level_its_start_and_the_rate():
    losses = power_law(2000)
    losses[600:] = 2.5
    (found,) = findings(rows(losses))
    assert found.text.startswith(
        "The loss has been at 2.500 since step 10000, at a learning rate of 1.0e-03."
    )


def test_a_divergence_names_its_start_the_loss_now_and_the_best():
    losses = np.concatenate([np.linspace(4.0, 2.0, 400), np.full(100, 3.0)])
    found = findings(rows(losses))[0]
    assert found.kind == "divergence" and 4010 <= found.step <= 4010 + 10 * 17
    assert f"above its minimum since step {found.step}: now 3.000, 2.0" in found.text


def test_a_flat_curve_at_a_low_rate_is_not_a_plateau():
    losses = power_law(1000)
    losses[400:] = losses[400]
    assert kinds(rows(losses, cosine(1000, minimum=0.0))) == []


@settings(max_examples=30, deadline=None, derandomize=True)
@given(at=st.integers(200, 900), height=st.floats(1.0, 20.0), noise=st.floats(0.0, 0.05))
def test_a_spike_is_found_at_its_step(at, height, noise):
    losses = power_law(1000, noise=noise)
    losses[at : at + 3] += [height, height / 2, height / 4]
    found = findings(rows(losses))
    assert [finding.kind for finding in found] == ["spike"]
    assert found[0].step == (at + 1) * 10 and found[0].tokens == found[0].step * TOKENS


def test_spikes_between_two_rows_are_found_from_the_events():
    event = {"event": "spike", "step": 4321, "loss": 9.5, "time": "", "reason": "train/loss ..."}
    found = findings(rows(power_law(1000)), [event, {**event, "step": 777, "loss": None}])
    assert [(finding.kind, finding.step) for finding in found] == [("spike", 777), ("spike", 4321)]
    assert found[1].tokens == 4320 * TOKENS and "9.5" in found[1].text


@pytest.mark.parametrize(
    ("loss", "reason", "expected"),
    [
        (6.248, "the gradients are not finite", "Step 4321: the gradients are not finite."),
        (6.248, "train/grad_norm 88 is 40.1 deviations above the usual 1.2", "train/grad_norm 88"),
        (float("nan"), "train/loss is nan", "Step 4321: train/loss is nan."),
        (float("inf"), "train/loss is inf", "Step 4321: train/loss is inf."),
        (9.5, "train/loss 9.5 is 9.1 deviations above the usual 2.2", "The loss jumped to 9.500"),
        (None, None, "Step 4321: the step was an anomaly."),
    ],
)
def test_a_spike_says_which_figure_was_not_usual(loss, reason, expected):
    event = {"event": "spike", "step": 4321, "loss": loss, "reason": reason}
    (found,) = findings(rows(power_law(1000)), [event])
    assert expected in found.text and ("jumped" in found.text) == ("jumped" in expected)
    assert "inf" not in found.text or "inf" in expected


def test_advice_that_findings_share_is_printed_once(tmp_path):
    run_dir = write_run(tmp_path / "run", ended="done")
    with open(run_dir / "events.jsonl", "a") as file:
        for step in (2, 20):
            event = {"event": "spike", "step": step, "reason": "the gradients are not finite"}
            file.write(json.dumps({**event, "loss": "2.0"}) + "\n")
    text = "\n".join(plain_lines(status_of(read_run(run_dir))))
    assert text.count("the gradients are not finite") >= 2
    assert text.count("try a lower --learning_rate") == 1


def test_many_spikes_are_one_finding():
    losses = power_law(1000)
    losses[200::100] += 5
    found = findings(rows(losses))
    assert [finding.kind for finding in found] == ["spike"] and "8 spikes" in found[0].text


@settings(max_examples=30, deadline=None, derandomize=True)
@given(at=st.integers(200, 850), height=st.floats(1.0, 8.0), noise=st.floats(0.0, 0.05))
def test_a_loss_that_stays_high_is_a_divergence(at, height, noise):
    losses = power_law(1000, noise=noise)
    losses[at:] += height
    found = findings(rows(losses))
    assert found[0].kind == "divergence"
    assert abs(found[0].step - at * 10) <= 200
    assert "plateau" not in [finding.kind for finding in found]


def test_a_nan_loss_is_a_divergence():
    losses = power_law(300)
    losses[280:] = math.nan
    found = findings(rows(losses))
    assert found[0].kind == "divergence" and "no longer a finite number" in found[0].text


def test_one_infinite_loss_is_not_a_divergence():
    losses = power_law(300)
    losses[299] = math.inf
    assert kinds(rows(losses)) == []


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


def test_each_source_that_is_read_too_often_is_named_at_the_step_where_it_was():
    epochs = {f"data/{name}/epochs": np.linspace(0, most, 200)
              for name, most in (("a", 3.9), ("b", 8.0), ("c", 4.0), ("d", 16.0))}  # fmt: skip
    found = findings(rows(power_law(200), **epochs))
    assert [(each.kind, each.text.split()[1]) for each in found] == [
        ("repeated_data", "b"), ("repeated_data", "d"),
    ]  # fmt: skip
    assert [each.step for each in found] == [1010, 510]


def test_clipping_in_the_first_steps_only_is_not_a_finding():
    share = np.where(np.arange(400) < 100, 1.0, 0.1)
    assert kinds(rows(power_law(400), **{"train/clipped_share": share})) == []


def test_a_widening_validation_gap_is_overfitting_when_data_is_repeated():
    losses = power_law(600)
    evaluations = [
        {"step": step, "tokens": step * TOKENS, "eval/loss": value}
        for step, value in zip(range(500, 6001, 500), [4, 3.8, 3.6, 3.5, *np.arange(3.6, 4.4, 0.1)],
                               strict=False)
    ]  # fmt: skip
    merged = sorted(
        [*rows(losses, **{"data/web/epochs": np.linspace(0, 3, 600)}), *evaluations],
        key=lambda row: row["step"],
    )
    found = findings(merged)
    assert [finding.kind for finding in found] == ["overfitting"]
    assert found[0].step == 2000 and "web 3.0 times" in found[0].text
    assert "from 3.500 at step 2000 to 4.300" in found[0].text
    fresh = [{**row, "data/web/epochs": 0.5} for row in merged]
    assert kinds(fresh) == ["validation"]


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
