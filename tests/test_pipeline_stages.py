"""`benchmarks.pipeline_stages` counts idle passes as the closed form has them."""

import pytest

from benchmarks.counted_ranks import BACKWARD, EXCHANGE, FORWARD
from benchmarks.pipeline_stages import idle_of, idle_share, interleaved, most_stored
from zerolm.distributed.pipeline import Arrived, one_forward_one_backward


class Recording:
    """Takes the place of a `Link`, and records what neighbours would exchange."""

    def __init__(self, stage: int, stages: int):
        self.stage, self.stages, self.passes = stage, stages, []

    def exchange(self, shape, *, states=None, gradient=None, wants_states=False,
                 wants_gradient=False):  # fmt: skip
        before, after = self.stage - 1, self.stage + 1
        found = [[True, after]] * (states is not None) + [[True, before]] * (gradient is not None)
        found += [[False, before]] * wants_states + [[False, after]] * wants_gradient
        found = [each for each in found if 0 <= each[1] < self.stages]
        if found:
            self.passes.append([EXCHANGE, found])
        return Arrived("states", "gradient")

    def passed(self, kind):
        def run(number, received):
            self.passes.append([kind, number])
            return kind

        return run


def orders(stages: int, count: int) -> dict[int, list]:
    links = [Recording(stage, stages) for stage in range(stages)]
    for link in links:
        one_forward_one_backward(
            link, (1, 1), count, link.passed(FORWARD), link.passed(BACKWARD)
        )  # fmt: skip
    return {link.stage: link.passes for link in links}


@pytest.mark.parametrize("stages", [2, 3, 4, 8])
@pytest.mark.parametrize("times", [1, 2, 5])
def test_stages_wait_as_long_as_the_closed_form_says_and_store_a_micro_batch_each(stages, times):
    """Although each exchange waits for both directions."""
    count = stages * times
    found = orders(stages, count)
    for backward in (1.0, 2.0):
        share = idle_share(found, backward)
        assert share == pytest.approx((stages - 1) / (count + stages - 1))
    assert [most_stored(found[stage]) for stage in found] == list(range(stages, 0, -1))


def test_a_deadlock_is_not_a_number():
    found = orders(2, 4)
    found[1].insert(0, [EXCHANGE, [[True, 0]]])
    with pytest.raises(AssertionError, match="a deadlock"):
        idle_share(found)


@pytest.mark.parametrize(
    ("stages", "chunks", "count"), [(4, 1, 8), (4, 2, 8), (4, 2, 16), (8, 4, 16)]
)
def test_interleaved_stages_wait_as_long_as_the_closed_form_says(stages, chunks, count):
    """Narayanan et al. 2021, section 2.2.2."""
    found = idle_of(interleaved(stages, count, chunks), stages * chunks, chunks)
    assert found == pytest.approx((stages - 1) / (chunks * count + stages - 1))
