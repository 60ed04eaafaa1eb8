import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zerolm.optim.schedule import SCHEDULES, BatchSchedule, LearningRate


def curve(kind: str, minimum: float = 0.1, **changes: int) -> LearningRate:
    sizes = {"warmup_tokens": 100, "decay_tokens": 200, "total_tokens": 1000, **changes}
    return LearningRate(kind, peak=1.0, minimum=minimum, **sizes)


@pytest.mark.parametrize("kind", ["cosine", "wsd", "linear"])
def test_a_run_ends_at_the_minimum_and_peaks_after_warmup(kind: str) -> None:
    rate = curve(kind)
    assert rate(100) == 1.0
    assert rate(1000) == pytest.approx(0.1, abs=1e-15)
    assert rate(5000) == rate(1000), "beyond the budget the rate stays at the minimum"


@pytest.mark.parametrize("kind", SCHEDULES)
def test_every_schedule_is_as_its_description_says(kind: str) -> None:
    """What defaults, validation and resumes rely on, also for a schedule that was just added."""
    rate, described = curve(kind), SCHEDULES[kind]
    rates = [rate(tokens) for tokens in range(100, 2000)]
    assert rates[0] == max(rates) == 1.0 and min(rates) > 0.0
    assert rates == sorted(rates, reverse=True), "after warm-up it never rises"
    higher = [curve(kind, minimum=0.2)(tokens) for tokens in range(100, 2000)]
    assert (higher != rates) == described.uses_minimum
    longer = [curve(kind, total_tokens=1500)(tokens) for tokens in range(100, 2000)]
    assert (longer != rates) == described.needs_total
    shorter = [curve(kind, decay_tokens=100)(tokens) for tokens in range(100, 2000)]
    assert (shorter != rates) == described.uses_decay_tokens


@pytest.mark.parametrize("kind", SCHEDULES)
@given(
    total=st.integers(10**15, 4 * 10**15),
    warmup=st.one_of(st.just(0.0), st.floats(0.01, 0.5)),
    decay=st.floats(0.01, 1.0),
    minimum=st.floats(0.0, 1.0),
    place=st.floats(0.0, 0.99),
)
@settings(deadline=None)
def test_every_schedule_trains_from_its_first_step_and_jumps_nowhere(
    kind: str, total: int, warmup: float, decay: float, minimum: float, place: float
) -> None:
    """In 1e15 tokens neighbours differ by less than 1e-6 of the peak, also where a root begins."""
    start, length = int(warmup * total), int(decay * total)
    rate = LearningRate(kind, 1.0, minimum, start, length, total)
    assert rate(1) > 0.0 and rate(1 + int(place * total)) > 0.0
    assert rate(start or 1) == pytest.approx(1.0, abs=1e-6), "the peak, at once without a warm-up"
    for joint in {start or 1, max(start, total - length) or 1, total, 1 + int(place * total)}:
        assert rate(joint - 1 or 1) == pytest.approx(rate(joint), abs=1e-6)
        assert rate(joint) == pytest.approx(rate(joint + 1), abs=1e-6)
    if SCHEDULES[kind].uses_minimum:
        assert rate(total) == rate(2 * total) == pytest.approx(minimum, abs=1e-9)


def test_warmup_does_not_waste_its_first_step() -> None:
    assert curve("constant")(10) == pytest.approx(0.1)
    assert curve("constant")(1000) == 1.0


def test_wsd_holds_the_peak_until_the_decay() -> None:
    rate = curve("wsd")
    assert rate(800) == 1.0
    assert rate(900) == pytest.approx(0.55)


def test_cosine_equals_torch() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=90, eta_min=0.1)
    rate = curve("cosine")
    for step in range(91):
        assert rate(100 + 10 * step) == pytest.approx(scheduler.get_last_lr()[0], rel=1e-9)
        optimizer.step()
        scheduler.step()


def test_a_ramp_grows_in_multiples_of_its_first_batch() -> None:
    schedule = BatchSchedule(batch_sequences=32, start_sequences=8, ramp_sequences=240)
    sizes, position = [], 0
    while position < 400:
        sizes.append(schedule(position))
        position += sizes[-1]
    assert sizes[0] == 8 and sizes[-1] == 32
    assert sizes == sorted(sizes) and set(sizes) == {8, 16, 24, 32}


@given(
    start=st.integers(1, 6),
    multiple=st.integers(1, 9),
    ramp=st.integers(0, 500),
    position=st.integers(0, 600),
    more=st.integers(0, 900),
)
@settings(deadline=None)
def test_steps_counts_what_a_loop_would_take(start, multiple, ramp, position, more) -> None:
    schedule = BatchSchedule(start * multiple, start if ramp else 0, ramp)
    here, end, steps = position, position + more, 0
    while here < end:
        here += schedule(here)
        steps += 1
    assert schedule.steps(position, end) == steps


def test_cosine_is_the_textbook_curve_in_its_middle() -> None:
    assert curve("cosine")(550) == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 2)))
