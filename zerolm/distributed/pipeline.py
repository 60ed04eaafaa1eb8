"""Pipeline stages: the link between neighbouring stages, and the order of their passes.

Each stage runs a micro-batch forward when the previous stage has sent its hidden states, and
backward when the next one has sent the gradient of those it got. In the order 1F1B a stage begins
with as many forward passes as there are stages after it, and then alternates, so it stores at most
as many micro-batches as there are stages from it on. A stage is idle for (p - 1) / (m + p - 1) of
the time with p equal stages and m micro-batches.

Source: Narayanan et al. 2021 (arXiv 2104.04473), section 2.2.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import distributed
from torch.distributed import P2POp, irecv, isend


class Message(NamedTuple):
    """What a stage sends to a neighbour.

    Attributes:
        values: hidden states or their gradient, (B, T, H).
        counts: integers that accompany them; None is zeros.
    """

    values: torch.Tensor
    counts: torch.Tensor | None = None


class Arrived(NamedTuple):
    """What has arrived in an exchange: from the previous stage, and from the next one."""

    states: Message | None = None
    gradient: Message | None = None


Moved = dict[str, Message]  # in an exchange: "states", "gradient"
Forward = Callable[[int, Message | None], Message | None]
Backward = Callable[[int, Message | None], Message | None]


class Link:
    """Sends hidden states to the next stage of a replica, and their gradients to the previous one.

    Neighbours must start matching exchanges in the same order. Every rank must create one.

    Args:
        peers: this replica's ranks, by stage.
        stage: this rank's stage.
        group: process group of `peers`, for broadcasts.
        transfers: another process group of `peers`, for sending and receiving.
        state_shape: of a token's hidden state, usually (H,).
        dtype: of hidden states and gradients.
        tick: called before each exchange.
        num_counts: number of integers in each message.

    Attributes:
        waited_seconds: time in exchanges since `reset`, on a CPU.
        sent_bytes: since `reset`.
        observe: called after each exchange with what was sent and what has arrived.
    """

    def __init__(
        self,
        peers: Sequence[int],
        stage: int,
        group: Any,
        transfers: Any,
        state_shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        tick: Callable[[], None] = lambda: None,
        num_counts: int = 0,
    ):
        self.stage, self.stages = stage, len(peers)
        self.group, self._transfers = group, transfers
        self.state_shape, self.dtype, self.device = tuple(state_shape), dtype, device
        self.num_counts = num_counts
        self._previous = peers[stage - 1] if stage else None
        self._next = peers[stage + 1] if stage < len(peers) - 1 else None
        self._last, self._tick = peers[-1], tick
        # NCCL needs all ranks of a group in its first call, but a transfer is between neighbours.
        distributed.all_reduce(torch.zeros(1, device=device), group=transfers)
        self.waits: list[Any] = []
        self.observe: Callable[[Moved, Moved], None] = lambda sent, arrived: None
        self.reset()

    @property
    def is_first(self) -> bool:
        return self._previous is None

    @property
    def is_last(self) -> bool:
        return self._next is None

    def reset(self) -> None:
        self.waited_seconds, self.sent_bytes = 0.0, 0
        self.waits.clear()

    def exchange(
        self,
        shape: Sequence[int],
        *,
        states: Message | None = None,
        gradient: Message | None = None,
        wants_states: bool = False,
        wants_gradient: bool = False,
    ) -> Arrived:
        """Send and receive at once, and wait for both.

        Args:
            shape: (B, T) of the micro-batches; all of a step have the same.
            states: to the next stage; ignored on the last stage.
            gradient: to the previous stage; ignored on the first stage.
            wants_states: whether the previous stage sends; ignored on the first stage.
            wants_gradient: whether the next stage sends; ignored on the last stage.
        """
        operations, moved, found = [], Moved(), Moved()
        given = {"states": (states, self._next), "gradient": (gradient, self._previous)}
        for name, (sent, peer) in given.items():
            if sent is not None and peer is not None:
                values = sent.values.detach().contiguous()
                moved[name] = Message(values, sent.counts)
                assert values.dtype == self.dtype, (values.dtype, self.dtype)
                assert values.shape == (*shape, *self.state_shape), (values.shape, shape)
                self.sent_bytes += values.nbytes + 8 * self.num_counts
                operations += self._operations(isend, values, sent.counts, peer)
        wanted = {
            "states": (wants_states, self._previous),
            "gradient": (wants_gradient, self._next),
        }
        for name, (is_wanted, peer) in wanted.items():
            if is_wanted and peer is not None:
                size = *shape, *self.state_shape
                values = torch.empty(size, dtype=self.dtype, device=self.device)
                found[name] = Message(values, self._no_counts())
                operations += self._operations(irecv, *found[name], peer)
        if operations:
            self._tick()
            with _Waiting(self):
                wait_for_neighbours(operations)
        self.observe(moved, found)
        return Arrived(**found)

    def _no_counts(self) -> torch.Tensor:
        return torch.zeros(self.num_counts, dtype=torch.int64, device=self.device)

    def _operations(
        self, operation: Any, values: torch.Tensor, counts: torch.Tensor | None, peer: int
    ) -> list[P2POp]:
        found = [P2POp(operation, values, peer, self._transfers)]
        if self.num_counts:
            counts = self._no_counts() if counts is None else counts
            found.append(P2POp(operation, counts, peer, self._transfers, tag=1))
        return found

    def broadcast(self, values: torch.Tensor) -> torch.Tensor:
        """Replace values by those of the last stage, in place, and return them. Every stage must
        call this.
        """
        self._tick()
        distributed.broadcast(values, src=self._last, group=self.group)
        return values

    def idle_seconds(self) -> float:
        """Return the time in exchanges since `reset`; waits for the device."""
        if not self.waits:
            return self.waited_seconds
        torch.cuda.synchronize(self.device)
        return sum(begin.elapsed_time(end) for begin, end in self.waits) / 1000


def wait_for_neighbours(operations: list[P2POp]) -> None:
    """Send and receive. `zerolm.watchdog.liveness` knows this function by its name."""
    for work in distributed.batch_isend_irecv(operations):
        work.wait()


class _Waiting:
    """Measures how long a stage waits: on a GPU how long its stream does."""

    def __init__(self, link: Link):
        self._link, self._on_gpu = link, link.device.type == "cuda"

    def __enter__(self) -> None:
        if self._on_gpu:
            self._begin = torch.cuda.Event(enable_timing=True)
            self._begin.record()
        self._started = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._link.waited_seconds += time.perf_counter() - self._started
        if self._on_gpu:
            end = torch.cuda.Event(enable_timing=True)
            end.record()
            self._link.waits.append((self._begin, end))


def one_forward_one_backward(
    link: Link, shape: Sequence[int], count: int, forward: Forward, backward: Backward
) -> None:
    """Run this stage's passes over all micro-batches of a step. Every rank must call this.

    Args:
        shape: (B, T) of each micro-batch.
        forward: takes a micro-batch's number and the previous stage's message; returns the one to
            send. Neither exists at the ends.
        backward: takes a micro-batch's number and the message with the gradient of what was sent;
            returns that of what was received. Called in the order of the numbers.
    """
    ahead = min(link.stages - link.stage - 1, count)  # forward passes before the first backward
    for number in range(ahead):
        received = link.exchange(shape, wants_states=True).states
        link.exchange(shape, states=forward(number, received))
    received = link.exchange(shape, wants_states=True).states if ahead < count else None
    for done in range(count - ahead):
        sent = forward(ahead + done, received)
        gradient = link.exchange(shape, states=sent, wants_gradient=True).gradient
        more = ahead + done + 1 < count
        gradient = backward(done, gradient)
        received = link.exchange(shape, gradient=gradient, wants_states=more).states
    for done in range(count - ahead, count):
        gradient = backward(done, link.exchange(shape, wants_gradient=True).gradient)
        link.exchange(shape, gradient=gradient)
