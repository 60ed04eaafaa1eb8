import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zerolm.optim.spikes import (
    COOL_DOWN,
    GIVE_UP,
    MAX_CONSECUTIVE_OVERFLOWS,
    NORM_FLOOR,
    ROLL_BACK,
    SKIP_WINDOW_STEPS,
    History,
    Policy,
    SpikeGuard,
    robust_z,
)

FIGURES = st.floats(-1e6, 1e6, allow_subnormal=False)
SMALL = Policy(window=8, cooldown_after=2, cooldown_steps=3, rollback_after=4, max_skips=6)


def take(guard: SpikeGuard, step: int, loss: float, norm: float = 1.0) -> tuple[bool, str | None]:
    """Take a step as the training loop does; return whether it was applied, and the response."""
    refused = guard.check_loss(loss)
    if not refused and math.isfinite(norm):
        refused = guard.check_grad_norm(norm)
    applied = not refused and math.isfinite(norm)
    return applied, guard.end_step(step, loss, norm, applied)


def warmed_up(policy: Policy = SMALL, steps: int = 8) -> SpikeGuard:
    guard = SpikeGuard(policy, History())
    for step in range(1, steps + 1):
        assert take(guard, step, 3.0 + 0.01 * (step % 3)) == (True, None)
    return guard


@given(FIGURES, st.lists(FIGURES, min_size=1, max_size=40), st.floats(0.0, 1.0))
@settings(deadline=None)
def test_the_score_is_that_of_numpy(value, window, floor) -> None:
    median = float(np.median(window))
    scale = max(1.4826 * float(np.median(np.abs(np.array(window) - median))), floor * abs(median))
    if scale == 0.0:
        assert robust_z(value, window, floor) in (0.0, math.inf, -math.inf)
    else:
        expected = (value - median) / scale
        assert robust_z(value, window, floor) == pytest.approx(expected, rel=1e-9, abs=1e-12)


@given(st.lists(st.floats(1.0, 2.0), min_size=9, max_size=40), st.floats(0.1, 100.0))
@settings(deadline=None)
def test_the_score_does_not_depend_on_the_unit(window, unit) -> None:
    scaled = [unit * each for each in window]
    expected = robust_z(3.0, window, 0.02)
    assert robust_z(3.0 * unit, scaled, 0.02) == pytest.approx(expected, rel=1e-6)


def test_one_spike_in_the_window_does_not_hide_the_next() -> None:
    window = [3.0 + 0.01 * (number % 5) for number in range(64)]
    alone = robust_z(30.0, window, 0.02)
    assert robust_z(30.0, [*window[1:], 30.0], 0.02) == pytest.approx(alone, rel=0.05)


def test_a_flat_window_makes_no_spike_of_a_wiggle() -> None:
    assert robust_z(3.0 * 1.1, [3.0] * 64, 0.02) < 6 < robust_z(3.0 * 1.2, [3.0] * 64, 0.02)


def test_of_a_window_of_zeros_anything_else_is_infinitely_far() -> None:
    scores = [robust_z(value, [0.0] * 3, 0.02) for value in (1e-9, -0.0, -1.0)]
    assert scores == [math.inf, 0.0, -math.inf]


def test_only_what_goes_up_is_a_spike_and_only_after_half_a_window() -> None:
    guard = SpikeGuard(SMALL, History())
    for step in range(1, 4):
        assert take(guard, step, 3.0) == (True, None)
    assert take(guard, 4, 300.0) == (True, None), "three steps say nothing yet"
    guard = warmed_up()
    assert take(guard, 9, 0.001) == (True, None)
    assert take(guard, 10, 30.0) == (False, None)
    assert "train/loss 30 is" in str(guard.reason)
    assert take(guard, 11, 3.0, norm=100.0)[0] is False
    assert "train/grad_norm 100 is" in str(guard.reason)


@pytest.mark.parametrize(("loss", "norm"), [(math.nan, 1.0), (math.inf, 1.0), (3.0, math.inf)])
def test_what_is_not_finite_is_an_anomaly_from_the_first_step_on(loss, norm) -> None:
    guard = SpikeGuard(Policy(threshold=0.0, skip=False), History())
    assert take(guard, 1, loss, norm) == (False, None)
    assert guard.history.anomalies == [1]


def test_responses_escalate_in_order() -> None:
    guard = warmed_up()
    responses = [take(guard, step, 30.0)[1] for step in range(9, 13)]
    assert responses == [None, COOL_DOWN, None, ROLL_BACK]
    assert guard.recent(12) == [9, 10, 11, 12]
    assert guard.factor == 0.5
    assert guard.history.losses == warmed_up().history.losses, "only accepted steps count"


def test_an_isolated_spike_costs_one_step_and_is_forgotten() -> None:
    guard = warmed_up()
    assert take(guard, 9, 30.0) == (False, None)
    for step in range(10, 18):
        assert take(guard, step, 3.0) == (True, None)
    assert take(guard, 18, 30.0) == (False, None)
    assert guard.recent(18) == [18] and guard.factor == 1.0


def test_the_learning_rate_is_restored_after_cooldown_steps_accepted_steps() -> None:
    guard = warmed_up()
    take(guard, 9, 30.0)
    assert take(guard, 10, 30.0)[1] == COOL_DOWN
    factors = []
    for step in range(11, 15):
        factors.append(guard.factor)
        take(guard, step, 3.0)
    assert factors == [0.5, 0.5, 0.5, 1.0]


@pytest.mark.parametrize(
    ("policy", "responses"),
    [
        (Policy(window=8, cooldown_after=0, rollback_after=3), [None, None, ROLL_BACK]),
        (Policy(window=8, cooldown_after=0, rollback_after=0, max_skips=3), [None, None, GIVE_UP]),
        (Policy(window=8, cooldown_after=0, rollback_after=0, max_skips=0), [None] * 3),
        (Policy(window=8, cooldown_after=1, rollback_after=2), [COOL_DOWN, ROLL_BACK, ROLL_BACK]),
        (Policy(window=8, rollback_after=1), [ROLL_BACK] * 3),
        (Policy(window=8, cooldown_after=0, rollback_after=0, max_skips=1), [GIVE_UP] * 3),
    ],
)
def test_each_response_can_be_turned_off(policy, responses) -> None:
    guard = warmed_up(policy)
    assert [take(guard, step, 30.0)[1] for step in range(9, 12)] == responses


@pytest.mark.parametrize(
    ("policy", "apart", "response"),
    [
        (Policy(window=8, cooldown_after=0, rollback_after=2), 8, ROLL_BACK),
        (Policy(window=8, rollback_after=0, cooldown_after=2), 8, COOL_DOWN),
        (Policy(window=8, rollback_after=0, cooldown_after=0, max_skips=2), SKIP_WINDOW_STEPS,
         GIVE_UP),
        # The window of anomalies may be longer than that of `max_skips`.
        (Policy(window=1500, rollback_after=2, max_skips=0), 1500, ROLL_BACK),
    ],
)  # fmt: skip
@pytest.mark.parametrize("start", [9, 5000])
def test_anomalies_count_for_exactly_their_window(policy, apart, response, start) -> None:
    """Two anomalies, one step less than the window apart, and a window apart."""
    for distance, expected in ((apart - 1, response), (apart, None)):
        guard = SpikeGuard(policy, History())
        assert take(guard, start, math.nan) == (False, None)
        assert take(guard, start + distance, math.nan) == (False, expected), distance


def test_the_history_keeps_anomalies_for_as_long_as_they_count() -> None:
    guard = SpikeGuard(Policy(window=8, rollback_after=0, max_skips=0), History())
    for step in (100, 200, 1099, 1199, 1200):
        take(guard, step, math.nan)
    assert guard.history.anomalies == [1099, 1199, 1200]


def test_overflows_are_counted_anew_after_an_applied_step() -> None:
    guard = warmed_up(Policy(window=8, overflows_are_normal=True))
    for step in range(9, 8 + MAX_CONSECUTIVE_OVERFLOWS):
        guard.check_loss(3.0)
        guard.end_step(step, 3.0, math.inf, applied=False)
    assert guard.history.overflows == MAX_CONSECUTIVE_OVERFLOWS - 1
    assert take(guard, 100, 3.0) == (True, None) and guard.history.overflows == 0
    guard.check_loss(3.0)
    assert guard.end_step(101, 3.0, math.inf, applied=False) is None


def test_only_the_last_window_of_accepted_figures_is_kept() -> None:
    guard = SpikeGuard(SMALL, History())
    for step in range(1, 21):
        take(guard, step, 3.0 + step / 1000, norm=1.0 + step / 1000)
    assert guard.history.losses == [3.0 + step / 1000 for step in range(13, 21)]
    assert guard.history.grad_norms == [1.0 + step / 1000 for step in range(13, 21)]


def test_detection_starts_with_half_a_window_and_above_the_threshold() -> None:
    for accepted, seen in ((3, False), (4, True)):
        assert take(warmed_up(SMALL, accepted), 50, 30.0)[0] is not seen
    # A flat window at 3.0 has the deviation 0.02 * 3.0: six of them are the threshold.
    for loss, seen in ((3.35, False), (3.37, True)):
        guard = SpikeGuard(SMALL, History(losses=[3.0] * 8, grad_norms=[1.0] * 8))
        assert guard.check_loss(loss) is seen


def test_steps_with_a_spike_can_be_taken_all_the_same() -> None:
    guard = warmed_up(Policy(window=8, skip=False))
    assert take(guard, 9, 30.0) == (True, None)
    assert guard.history.anomalies == [9]
    assert take(guard, 10, math.nan)[0] is False, "never what is not finite"


def test_a_non_finite_step_that_was_applied_leads_to_a_rollback_at_once() -> None:
    guard = warmed_up()
    assert not guard.weights_lost and not guard.refused
    guard.check_loss(3.0)
    assert guard.end_step(9, 3.0, math.inf, applied=True) == ROLL_BACK
    assert guard.weights_lost


def test_fp16_overflows_are_no_spikes_until_too_many_follow_each_other() -> None:
    guard = warmed_up(Policy(window=8, overflows_are_normal=True))
    for step in range(9, 8 + MAX_CONSECUTIVE_OVERFLOWS):
        guard.check_loss(3.0)
        assert guard.end_step(step, 3.0, math.inf, applied=False) is None
    assert not guard.history.anomalies
    guard.check_loss(3.0)
    assert guard.end_step(step + 1, 3.0, math.inf, applied=False) == GIVE_UP
    guard = warmed_up()  # bf16: the same step is an anomaly
    guard.check_loss(3.0)
    guard.end_step(9, 3.0, math.inf, applied=False)
    assert guard.history.anomalies == [9] and "not finite" in str(guard.reason)


def test_muons_norm_is_not_checked() -> None:
    assert take(warmed_up(Policy(window=8, watch_norm=False)), 9, 3.0, norm=1e6) == (True, None)


def test_a_history_that_went_through_json_decides_the_same() -> None:
    import json

    losses = np.random.default_rng(0).standard_t(2, 200) * 0.5 + 4
    one, resumed = SpikeGuard(SMALL, History()), SpikeGuard(SMALL, History())
    for step, loss in enumerate(losses.tolist(), start=1):
        resumed = SpikeGuard(SMALL, History(**json.loads(json.dumps(vars(resumed.history)))))
        assert take(one, step, loss) == take(resumed, step, loss)
    assert one.history == resumed.history and one.history.anomalies


# ---- False alarms, on curves that nothing is wrong with


def curve(generator, steps: int, warmup: int, tails: str) -> tuple[np.ndarray, np.ndarray]:
    """Return losses and gradient norms of a run in which nothing goes wrong.

    The loss falls from ln(50,000) as a power of the step, and faster once the learning rate has
    warmed up; a step's noise is about 1%, as that of a batch of 0.5 M tokens. Gradient norms begin
    high, fall, rise a little with the learning rate, and are log-normal.
    """
    step = np.arange(1, steps + 1)
    seen = np.cumsum(np.minimum(step / warmup, 1.0))  # sum of the learning rate
    loss = 2.0 + (math.log(50_000) - 2.0) * (1.0 + seen / 20) ** -0.35
    unit = generator.standard_normal(steps) if tails == "normal" else generator.standard_t(3, steps)
    norm = 0.3 + 3.0 * np.exp(-step / (warmup / 3)) + 0.2 * np.minimum(step / warmup, 1.0)
    width = 0.15 if tails == "normal" else 0.35
    return loss * (1 + 0.01 * unit), norm * np.exp(width * generator.standard_normal(steps))


@pytest.mark.parametrize(("tails", "allowed"), [("normal", 0), ("heavy", 1e-3)])
def test_curves_without_a_spike_raise_next_to_no_alarm(tails, allowed) -> None:
    alarms = total = 0
    for seed in range(10):
        generator = np.random.default_rng(seed)
        warmup = int(generator.integers(20, 2000))
        losses, norms = curve(generator, 4000, warmup, tails)
        guard = SpikeGuard(Policy(), History())
        for step, (loss, norm) in enumerate(zip(losses, norms, strict=True), start=1):
            applied, response = take(guard, step, float(loss), float(norm))
            alarms += not applied
            assert response is None, f"seed {seed}, step {step}: {guard.reason}"
        total += len(losses)
    assert alarms <= allowed * total, f"{alarms} alarms in {total} steps"
    print(f"{tails}: {alarms} alarms in {total} steps")


def test_a_spike_in_such_a_curve_is_seen_at_once() -> None:
    generator = np.random.default_rng(3)
    losses, norms = curve(generator, 1000, 200, "heavy")
    losses[700:703] *= 1.5
    norms[850] = 2.0 * (1 + 6 * NORM_FLOOR)
    guard = SpikeGuard(Policy(), History())
    refused = [
        step
        for step, (loss, norm) in enumerate(zip(losses, norms, strict=True))
        if not take(guard, step, float(loss), float(norm))[0]
    ]
    assert set(refused) >= {700, 701, 702, 850} and len(refused) <= 6
