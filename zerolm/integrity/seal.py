"""`Seal`: digests of weights and optimizer states, computed after a step and compared before the
next step.

A difference means that memory changed without an optimizer step. If a rank finds a difference, all
ranks learn about it from a sum that the training step computes anyway.
"""

import time
from collections.abc import Callable, Sequence

import torch
from torch import distributed

from zerolm.engine.experts import divided_groups, divided_parameters
from zerolm.engine.parameters import residence
from zerolm.engine.protocol import Engine
from zerolm.engine.stages import groups_of, num_replicas
from zerolm.engine.states import WEIGHTS, State, parameters_in, shard_group, states
from zerolm.integrity.digests import piecewise, prepared, values_of_piece

# Digests are compared between ranks by summing exact integers. Digests are split into pieces of
# this many bits, so sums of the pieces and of their squares fit in a float64 for 8,192 ranks.
PART_BITS, PARTS = 20, 4
BUDGET = 0.003  # maximum time for digests, as a share of a step's time
MAX_INTERVAL = 64  # steps


class Seal:
    """The digests of one rank's states. Every rank must make the same calls.

    Args:
        engine: a DeepSpeed engine of ZeRO stage 1, 2 or 3.
        replicated: whether ranks store the same weights, so their digests must be equal: all
            ranks, or those of a pipeline stage. With `--shard_within`, the digests of the groups'
            states must be equal too; with `--expert_parallel`, those of experts on the ranks that
            have the same. Different weights have digests in different slots.

    Attributes:
        copied: description of the replicated states, for messages.
    """

    def __init__(self, engine: Engine, replicated: bool):
        self._engine, self._replicated = engine, replicated
        group = shard_group(engine)
        alike = num_replicas(engine.optimizer)
        in_groups = replicated and distributed.get_world_size(group) < alike
        self._group = group if in_groups else None
        self.copied = "weights or optimizer states" if in_groups else "the weights"
        self._divided = divided_groups(engine) if replicated else set()
        stages = groups_of(engine.optimizer)
        self._slot, self._common = (0, 1) if stages is None else (stages.stage, stages.stages)
        self._slots = self._common  # those of experts follow the slots of other weights
        if self._divided:
            each = next(iter(divided_parameters(engine.module).values()))
            own = residence(each)
            degree = own.shape[0] // own.length
            self._expert_slot = self._common + self._slot * degree + own.start // own.length
            self._slots += self._common * degree
        self._states: list[State] = []
        # keyed by address, size and dtype
        self._digests: dict[tuple[int, int, torch.dtype], Callable[[], torch.Tensor]] = {}
        self._sealed: list[torch.Tensor] = []
        self._now: list[torch.Tensor] = []
        self._idle = torch.empty(0)  # figures for a step without digests
        self._idle_cost: float | None = None
        self._close_seconds = 0.0
        self._cost_seconds = self._step_seconds = float("inf")
        self._began: float | None = None
        self._interval = 1

    def begin_step(self) -> None:
        """Measure the time of a step, from this call to the next."""
        now = _clock(self._engine.device.type == "cuda")
        if self._began is not None:
            self._step_seconds = _smoothed(self._step_seconds, now - self._began)
        self._began = now

    def drop(self) -> None:
        """Drop the digests, because states have been or will be loaded."""
        self._states, self._sealed, self._began = [], [], None
        self._digests.clear()

    @torch.no_grad()
    def close(self, step: int) -> None:
        """Compute the digests after a step, if due."""
        self._states, self._sealed = [], []
        if step % self._interval:
            return
        on_gpu = self._engine.device.type == "cuda"
        # only once on a GPU, because timing waits for the GPU
        timed = not on_gpu or self._cost_seconds == float("inf")
        if timed and on_gpu:
            torch.cuda.synchronize()
        before = _clock(on_gpu)
        self._states = list(states(self._engine))
        self._sealed = self._take()
        if timed and on_gpu:
            torch.cuda.synchronize()
        self._close_seconds = _clock(on_gpu) - before
        if timed and on_gpu:
            self._cost_seconds = 2 * self._close_seconds

    def _take(self) -> list[torch.Tensor]:
        """Return the digests of the current states."""
        taken = []
        for state in self._states:
            key = (state.values.data_ptr(), state.values.numel(), state.values.dtype)
            if key not in self._digests:
                self._digests[key] = prepared(state.values)
            taken.append(self._digests[key]())
        return taken

    @torch.no_grad()
    def figures(self) -> torch.Tensor:
        """Return the figures to sum over ranks for `agree`, as float64 of shape (figures,)."""
        device = self._engine.device
        cost = self._cost_seconds / self._step_seconds
        known = cost if cost < 1.0 else 0.0  # zero also if neither has been measured
        if not self._sealed:
            if known != self._idle_cost:
                size = 3 + 2 * PARTS * self._slots * self._replicated
                self._idle = torch.zeros(size, dtype=torch.float64, device=device)
                self._idle[0].fill_(known)  # copying a tensor would wait for the device
                self._idle_cost = known
            return self._idle
        before = _clock(on_gpu := device.type == "cuda")
        head = torch.ones(2, dtype=torch.float64, device=device)
        head[0].fill_(known)
        self._now = self._take()
        old, new = (
            torch.cat([each.to(device) for each in all_of]) for all_of in (self._sealed, self._now)
        )
        changed = (old != new).sum()[None].double()
        if not on_gpu:
            spent = _clock(on_gpu) - before + self._close_seconds
            self._cost_seconds = _smoothed(self._cost_seconds, spent)
        if not self._replicated:
            return torch.cat([head, changed])
        shifts = torch.arange(PARTS, device=device) * PART_BITS
        digests = torch.zeros(self._slots, dtype=torch.int64, device=device)
        for slot, each in self._of_copies(self._states, self._now).items():
            digests[slot] = each
        bits = ((digests[:, None] >> shifts) & ((1 << PART_BITS) - 1)).flatten()
        return torch.cat([head, changed, torch.cat([bits, bits.square()]).double()])

    def agree(self, figures: list[float]) -> tuple[bool, bool]:
        """Return whether the states of any rank changed, and whether replicated states differ
        between ranks.

        Args:
            figures: the result of `figures`, summed over ranks.
        """
        cost, count, changed, *parts = figures
        world_size = self._engine.world_size
        self._interval = min(MAX_INTERVAL, max(1, -int(-cost / world_size // BUDGET)))
        half, unequal = len(parts) // 2, False
        for number, (total, square) in enumerate(zip(parts[:half], parts[half:], strict=True)):
            is_common = number // PARTS < self._common
            copies = int(count) // (self._common if is_common else self._slots - self._common)
            unequal |= copies * int(square) != int(total) ** 2  # exact, unlike float products
        return changed > 0, unequal

    def changed(self) -> list[str]:
        """Return a line for each of this rank's states that changed."""
        lines = []
        for state, old, new in zip(self._states, self._sealed, self._now, strict=True):
            pieces = (old != new).nonzero().flatten().tolist()
            names = [name for piece in pieces for name in self._parameters(state, piece)]
            if pieces:
                shown = ", ".join(list(dict.fromkeys(names))[:8]) or "unknown parameters"
                lines.append(f"{state.kind}, in {shown}")
        return lines

    def digests_of_copies(self) -> dict[int, int]:
        """Return the digests of the states that are replicated on other ranks, by slot. Every rank
        must call this.
        """
        now = list(states(self._engine))
        found = self._of_copies(now, [piecewise(state.values) for state in now])
        return {slot: int(each) for slot, each in found.items()}

    def _of_copies(
        self, now: Sequence[State], digests: Sequence[torch.Tensor]
    ) -> dict[int, torch.Tensor]:
        """Return the digests of the weights and, with `--shard_within`, of the group's states."""
        weights, others, experts = (list[torch.Tensor]() for _ in range(3))
        for state, each in zip(now, digests, strict=True):
            if state.kind != WEIGHTS:
                others.append(each)
            else:
                (experts if state.group in self._divided else weights).append(each)
        total = torch.cat(weights).sum().to(self._engine.device)
        if self._group is not None:
            of_group = torch.cat(others).sum()
            distributed.all_reduce(of_group, group=self._group)
            total += of_group
        found = {self._slot: total}
        if experts:
            found[self._expert_slot] = torch.cat(experts).sum()
        return found

    def _parameters(self, state: State, piece: int) -> list[str]:
        return parameters_in(self._engine, state, *values_of_piece(state.values, piece))


def _clock(on_gpu: bool) -> float:
    """Return this thread's CPU seconds, or, with a GPU, wall-clock seconds, because the thread
    waits for the GPU.
    """
    return time.perf_counter() if on_gpu else time.thread_time()


def _smoothed(mean: float, new: float) -> float:
    """Add a value to a moving average over about ten values; if `mean` is infinite, start a new
    average.
    """
    return new if mean == float("inf") else mean + (new - mean) / 10
