"""`Seal`: digests of weights and optimizer states, taken after a step and compared before the next.

What differs has changed in memory without an optimizer step. One sum over all ranks, which the
training step has anyway, tells every rank whether any of them found something.
"""

import time
from typing import Any

import torch

from zerolm.integrity.digests import piecewise, values_of_piece
from zerolm.integrity.zero_state import WEIGHTS, State, parameters_in, states

# A digest is compared over ranks by sums of exact integers: pieces of so many bits, and their
# squares, fit in a float64 for 8,192 ranks.
PART_BITS, PARTS = 20, 4
BUDGET = 0.004  # share of a step's time
MAX_INTERVAL = 64  # steps


class Seal:
    """The digests of one rank. Every rank makes the same calls.

    Args:
        engine: a DeepSpeed engine of ZeRO stage 1, 2 or 3.
        replicated: every rank has all weights, so that their digests must be equal.
    """

    def __init__(self, engine: Any, replicated: bool):
        self._engine, self._replicated = engine, replicated
        self._states: list[State] = []
        self._sealed: list[torch.Tensor] = []
        self._now: list[torch.Tensor] = []
        self._cost_seconds = self._step_seconds = float("inf")
        self._began: float | None = None
        self._interval = 1

    def begin_step(self) -> None:
        """Measure the time of a step from here to the next call."""
        now = time.perf_counter()
        if self._began is not None:
            self._step_seconds = min(self._step_seconds, now - self._began)
        self._began = now

    def drop(self) -> None:
        """Forget the digests: the states have been loaded, or are about to be."""
        self._states, self._sealed, self._began = [], [], None

    @torch.no_grad()
    def close(self, step: int) -> None:
        """Take the digests after a step, if they are due."""
        self._states, self._sealed = [], []
        if step % self._interval:
            return
        on_gpu = self._engine.device.type == "cuda"
        timed = not on_gpu or self._cost_seconds == float("inf")  # once on a GPU: it has to wait
        if timed and on_gpu:
            torch.cuda.synchronize()
        before = time.perf_counter()
        self._states = list(states(self._engine))
        self._sealed = [piecewise(state.values) for state in self._states]
        if timed and on_gpu:
            torch.cuda.synchronize()
        if timed:
            self._cost_seconds = min(self._cost_seconds, time.perf_counter() - before)

    @torch.no_grad()
    def figures(self) -> torch.Tensor:
        """Return figures to sum over ranks, (figures,) float64, for `agree`."""
        device = self._engine.device
        cost = 2 * self._cost_seconds / self._step_seconds
        known = cost if cost < 1.0 else 0.0  # also if neither has been measured
        head = torch.zeros(2, dtype=torch.float64, device=device)
        head[0].fill_(known)  # a copy of a tensor would wait for the device
        head[1].fill_(float(bool(self._sealed)))
        changed = head.new_zeros(1)
        parts = head.new_zeros(2 * PARTS if self._replicated else 0)
        if self._sealed:
            self._now = [piecewise(state.values) for state in self._states]
            old, new = (
                torch.cat([each.to(device) for each in all_of])
                for all_of in (self._sealed, self._now)
            )
            changed = (old != new).sum()[None].double()
            if self._replicated:
                weights = [
                    now
                    for state, now in zip(self._states, self._now, strict=True)
                    if state.kind == WEIGHTS
                ]
                shifts = torch.arange(PARTS, device=device) * PART_BITS
                bits = (torch.cat(weights).sum().to(device) >> shifts) & ((1 << PART_BITS) - 1)
                parts = torch.cat([bits, bits.square()]).double()
        return torch.cat([head, changed, parts])

    def agree(self, figures: list[float]) -> tuple[bool, bool]:
        """Return whether a rank's states have changed, and whether ranks have other weights.

        Args:
            figures: summed over ranks.
        """
        cost, count, changed, *parts = figures
        world_size = self._engine.world_size
        self._interval = min(MAX_INTERVAL, max(1, -int(-cost / world_size // BUDGET)))
        unequal = any(
            int(count) * int(square) != int(total) ** 2  # exact, unlike products of floats
            for total, square in zip(parts[:PARTS], parts[PARTS:], strict=True)
        )
        return changed > 0, unequal

    def changed(self) -> list[str]:
        """Return which states of this rank have changed, a line each."""
        lines = []
        for state, old, new in zip(self._states, self._sealed, self._now, strict=True):
            pieces = (old != new).nonzero().flatten().tolist()
            names = [name for piece in pieces for name in self._parameters(state, piece)]
            if pieces:
                shown = ", ".join(list(dict.fromkeys(names))[:8]) or "unknown parameters"
                lines.append(f"{state.kind}, in {shown}")
        return lines

    def weights_digest(self) -> int:
        """Return the digest of this rank's weights."""
        return sum(
            int(piecewise(state.values).sum())
            for state in states(self._engine)
            if state.kind == WEIGHTS
        )

    def _parameters(self, state: State, piece: int) -> list[str]:
        return parameters_in(self._engine, state, *values_of_piece(state.values, piece))
