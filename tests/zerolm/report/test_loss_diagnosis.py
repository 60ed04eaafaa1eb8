"""Diagnosis of the training loss: divergence, spikes and plateaus, and none in noise."""

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.zerolm.report.metric_rows import TOKENS, constant, cosine, kinds, power_law, rows
from tests.zerolm.report.run_directories import write_run
from zerolm.report.diagnosis import NOISE_DEVIATIONS, PLATEAU_BLOCKS, _trend, findings
from zerolm.report.findings import Point
from zerolm.report.run_history import read_run
from zerolm.report.status import plain_lines, status_of


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


def test_by_chance_the_trend_is_off_by_its_noise_limit_once_in_200_times():
    tokens = np.geomspace(1e6, 2e6, PLATEAU_BLOCKS).astype(int).tolist()
    noise = np.random.default_rng(0).standard_normal((4000, PLATEAU_BLOCKS)).tolist()
    trends = [
        _trend([Point(0, *pair) for pair in zip(tokens, each, strict=True)]) for each in noise
    ]
    rises = sum(change > NOISE_DEVIATIONS * error for change, error in trends)
    assert rises == pytest.approx(4000 / 200, abs=2 * math.sqrt(4000 / 200))


def test_a_plateau_names_its_level_its_start_and_the_rate():
    losses = power_law(2000)
    losses[600:] = 2.5
    (found,) = findings(rows(losses))
    assert found.text.startswith(
        "The loss has been at 2.500 since step 10000, at a learning rate of 1.0e-03."
    )


@pytest.mark.parametrize(
    ("number", "warm", "before", "last", "found"),
    [
        (400, 100, 0.89, 1.0, True), (400, 101, 0.89, 1.0, False),  # a quarter of the tokens
        (400, 101, 0.9, 1.0, True),  # nine tenths of the peak will do
        (400, 1, 1.0, 0.5, True), (400, 1, 1.0, 0.49, False),  # a decay
        (94, 1, 1.0, 1.0, True), (93, 1, 1.0, 1.0, False),  # 48 rows in the last half
        (400, 1, 0.0, 0.0, False),
    ],
)  # fmt: skip
def test_a_plateau_needs_rows_near_the_peak_rate_for_most_of_the_run(
    number, warm, before, last, found
):
    rates = np.where(np.arange(1, number + 1) < warm, before, 1.0)
    rates[-1] = last
    rates *= last > 0
    written = rows(np.full(number, 2.5), rates)
    del written[0]["train/learning_rate"]  # a row without a rate is not near the peak
    assert kinds(written) == (["plateau"] if found else [])
    del written[-1]["train/learning_rate"]
    assert kinds(written) == (["plateau"] if found or last == 0.49 else [])


def test_a_divergence_names_its_start_the_loss_now_and_the_best():
    losses = np.concatenate([np.linspace(4.0, 2.0, 400), np.full(100, 3.0)])
    found = findings(rows(losses))[0]
    assert found.kind == "divergence" and 4010 <= found.step <= 4010 + 10 * 17
    assert f"above its minimum since step {found.step}: now 3.000, 2.0" in found.text


def test_a_jump_to_another_level_is_named_at_its_start_whatever_comes_later():
    losses = np.concatenate([np.full(60, 2.0), np.full(99, 3.0), [9.0]])
    (jump,) = [found for found in findings(rows(losses)) if found.kind == "spike"]
    assert jump.step == 610 and "jumped to 3.000" in jump.text


@pytest.mark.parametrize("length", range(0, 36, 5))
def test_a_short_run_that_rises_has_not_diverged_yet(length):
    assert kinds(rows(np.linspace(2.0, 4.0, length))) == []


@pytest.mark.parametrize(("low_rows", "diverged"), [(8, True), (9, False)])
def test_a_loss_that_is_high_in_most_of_any_17_rows_has_diverged(low_rows, diverged):
    losses = np.concatenate([np.linspace(4.0, 2.0, 400), np.full(170, 3.0)])
    for start in range(400, 570, 17):
        losses[start : start + low_rows] = 2.0
    assert ("divergence" in kinds(rows(losses))) is diverged


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
    near = [{**event, "step": step} for step in (4321, 4341, 4421)]  # rows are 10 steps apart
    assert [each.step for each in findings(rows(power_law(1000)), near)] == [4321]
    far = [*near, {**event, "step": 4502}, {**event, "step": 4504}]
    assert [each.step for each in findings(rows(power_law(1000)), far)] == [4321, 4502]
    (found,) = findings(rows(power_law(1000)), [{**event, "step": 5}])
    assert (found.step, found.tokens) == (5, 0), "before the first row"


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
