"""The order of a stage's passes, simulated with threads and a clock of its own."""

import threading
from queue import Queue

import pytest
import torch

from zerolm.distributed.pipeline import Arrived, one_forward_one_backward

SHAPE, FORWARD, BACKWARD = (1, 1), 1, 2


class Wires:
    """Queues between neighbouring stages, with the time at which something was sent."""

    def __init__(self, stages: int):
        self.states = [Queue() for _ in range(stages)]
        self.gradients = [Queue() for _ in range(stages)]


class SimulatedLink:
    def __init__(self, wires: Wires, stage: int, stages: int):
        self.wires, self.stage, self.stages, self.now = wires, stage, stages, 0
        self.seen: list[tuple[str, int]] = []
        self.stored = self.most_stored = self.busy = 0

    def exchange(self, shape, *, states=None, gradient=None, wants_states=False,
                 wants_gradient=False):  # fmt: skip
        assert shape == SHAPE
        if states is not None and self.stage < self.stages - 1:
            self.wires.states[self.stage + 1].put((self.now, states))
        if gradient is not None and self.stage:
            self.wires.gradients[self.stage - 1].put((self.now, gradient))
        found = {}
        if wants_states and self.stage:
            found["states"] = self._wait(self.wires.states[self.stage])
        if wants_gradient and self.stage < self.stages - 1:
            found["gradient"] = self._wait(self.wires.gradients[self.stage])
        return Arrived(**found)

    def _wait(self, queue):
        sent, value = queue.get(timeout=20)
        self.now = max(self.now, sent)
        return value

    def forward(self, number, received):
        assert (received is None) == (self.stage == 0)
        assert received is None or int(received) == number, "states of another micro-batch"
        self.now += FORWARD
        self.busy += FORWARD
        self.stored += 1
        self.most_stored = max(self.most_stored, self.stored)
        self.seen.append(("forward", number))
        return None if self.stage == self.stages - 1 else torch.tensor(number)

    def backward(self, number, gradient):
        assert (gradient is None) == (self.stage == self.stages - 1)
        assert gradient is None or int(gradient) == number, "gradient of another micro-batch"
        self.now += BACKWARD
        self.busy += BACKWARD
        self.stored -= 1
        self.seen.append(("backward", number))
        return None if self.stage == 0 else torch.tensor(number)


def simulate(stages: int, count: int) -> list[SimulatedLink]:
    wires = Wires(stages)
    links = [SimulatedLink(wires, stage, stages) for stage in range(stages)]
    threads = [
        threading.Thread(
            target=one_forward_one_backward, args=(each, SHAPE, count, each.forward, each.backward)
        )
        for each in links
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads), "a stage waits forever"
    assert all(each.empty() for each in (*wires.states, *wires.gradients))
    return links


@pytest.mark.parametrize("count", [1, 2, 3, 4, 9])
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_each_micro_batch_passes_each_stage_once_in_order(stages, count):
    for link in simulate(stages, count):
        for kind in ("forward", "backward"):
            numbers = [number for each, number in link.seen if each == kind]
            assert numbers == list(range(count))
        assert link.most_stored == min(stages - link.stage, count)


@pytest.mark.parametrize(("stages", "count"), [(2, 4), (4, 4), (4, 12), (3, 7)])
def test_idle_time_is_that_of_the_formula(stages, count):
    """(p - 1) / (m + p - 1) of the time of the whole, for equal stages and free transfers."""
    links = simulate(stages, count)
    end = max(link.now for link in links)
    for link in links:
        assert 1 - link.busy / end == pytest.approx((stages - 1) / (count + stages - 1))
