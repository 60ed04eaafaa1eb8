"""`Health`: measure clipping, weight norms, update ratios and gradient noise in reported steps.

Measures during the step itself, without changing gradients, weights, optimizer states or RNG. The
state between steps is saved with the run's progress, so a resumed run reports bit-identical values.
Must not depend on files or trackers.
"""

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from zerolm.engine.gradients import loss_scale
from zerolm.engine.protocol import Engine
from zerolm.engine.step_gate import StepGate
from zerolm.features.feature import StepResult
from zerolm.model.loss import IGNORED
from zerolm.plan.plan import Plan
from zerolm.train.noise_scale import Estimate, SmallBatches, SmallBatchSums, average, estimate
from zerolm.train.norms import Blocks, UpdateMeter, is_counted_here, parameter_norm, weight_squares

Row = dict[str, Any]
AUXILIARY = "train/auxiliary_loss"  # auxiliary loss of the routers
NUM_FIGURES = 5  # number of fields in SmallBatchSums


@dataclass(frozen=True)
class HealthState:
    """State between steps; saved in the checkpoint as JSON. `Health.end_step` updates it.

    Attributes:
        steps: number of steps applied since the last report.
        clipped: number of these steps in which the gradient was clipped.
        noise, signal: moving averages of the fields of `zerolm.train.noise_scale.Estimate`.
    """

    steps: int = 0
    clipped: int = 0
    noise: float = 0.0
    signal: float = 0.0


class Health:
    """Measures health metrics on one rank.

    Every rank makes the same calls, in this order, in each step: `begin`, `observe_backward` around
    each backward pass, `before_update`, `end_step`, and `row` if the step is reported.

    Args:
        engine: a DeepSpeed engine with ZeRO stage 1, 2 or 3.
        gate: its `clip_norm` is the maximum gradient norm; 0 disables clipping.
    """

    def __init__(self, plan: Plan, engine: Engine, device: torch.device, gate: StepGate):
        layout = plan.layout
        self.blocks = Blocks(engine.module)
        self._engine, self._device = engine, device
        self._interval, self._gate = plan.settings.log_interval, gate
        self._layout, self._rank = layout, engine.global_rank
        # Muon does not report the gradient's norm. With sharded sequences, no rank has the
        # gradient of a complete micro-batch.
        self._noise = not plan.profile.uses_muon and layout.sequence == 1
        self._meter = UpdateMeter(engine, self.blocks, layout)
        contributes = layout.contributes(self._rank)
        own = [each for each, _ in self.blocks.parameters if is_counted_here(each, contributes)]
        self._small = SmallBatches(own, device, contributes)
        self._measuring = self._sampling = False
        self._loss_scale = 1.0

    def begin(self, step: int, num_micro_batches: int) -> None:
        """Start a step, and determine whether to measure it."""
        self._measuring = step % self._interval == 0
        # The noise scale compares two batch sizes, which requires more than one micro-batch.
        several = num_micro_batches * self._layout.replicas > 1
        self._sampling = self._measuring and self._noise and several
        if self._sampling:
            self._small.begin()
            self._loss_scale = loss_scale(self._engine)

    def observe_backward(self, batch: dict[str, torch.Tensor]) -> AbstractContextManager[None]:
        """Return a context manager that measures a micro-batch's backward pass if needed."""
        if not self._sampling:
            return nullcontext()
        return self._small.backward((batch["targets"] != IGNORED).sum())

    def before_update(self) -> None:
        """Copy the weights before the optimizer step changes them, if the step is measured."""
        if self._measuring:
            self._meter.before()

    def end_step(self, state: dict[str, Any], result: StepResult) -> dict[str, Any]:
        """Count a step, and return the new state.

        Args:
            state: the previous `HealthState` as a dict; empty at the start of a run.
        """
        if not result.applied:
            self._measuring = self._sampling = False
            self._meter.drop()
            return state
        old = HealthState(**state)
        clipped = 0.0 < self._gate.clip_norm < result.grad_norm
        return vars(replace(old, steps=old.steps + 1, clipped=old.clipped + clipped))

    def row(self, state: dict[str, Any], result: StepResult) -> tuple[Row, dict[str, Any]]:
        """Return the last step's metrics, and the new state.

        Every rank must call this. All figures are summed in a single all-reduce.

        Args:
            state: the result of `end_step`.
        """
        old = HealthState(**state)
        weights = weight_squares(self.blocks, self._device, self._layout)
        changes = self._meter.squares(self._device) if self._measuring else None
        none = torch.zeros(len(self.blocks.names), dtype=torch.float64, device=self._device)
        figures = torch.cat(
            [
                none if weights is None else weights,
                none if changes is None else changes,
                self._small.figures,
            ]
        )
        torch.distributed.all_reduce(figures)
        found = figures.tolist()
        count = len(self.blocks.names)
        row: Row = {}
        if weights is not None:
            row |= self._norms("train/param_norm", found[:count])
            if changes is not None:
                row |= self._ratios(found[count : 2 * count], found[:count])
        if self._gate.clip_norm and old.steps:
            row["train/clipped_share"] = old.clipped / old.steps
        averages = Estimate(old.noise, old.signal)
        new = self._estimate(found[-NUM_FIGURES:], result) if self._sampling else None
        if new is not None:
            averages = average(averages, new)
            if averages.noise_scale_tokens is not None:
                row["train/noise_scale_tokens"] = averages.noise_scale_tokens
        new_state = replace(old, steps=0, clipped=0, noise=averages.noise, signal=averages.signal)
        return row, vars(new_state)

    def parameter_norm(self) -> float | None:
        """Return the 2-norm of all parameters, or None if they are offloaded to NVMe.

        Every rank must call this.
        """
        return parameter_norm(self.blocks, self._device, self._layout)

    def _norms(self, key: str, squares: list[float]) -> Row:
        blocks = zip(self.blocks.names, squares, strict=True)
        total = math.sqrt(sum(squares)) if math.isfinite(sum(squares)) else math.inf
        return {key: total, **{f"{key}/{name}": _root(each) for name, each in blocks}}

    def _ratios(self, changes: list[float], weights: list[float]) -> Row:
        row = {"train/update_ratio": _ratio(sum(changes), sum(weights))}
        for name, change, weight in zip(self.blocks.names, changes, weights, strict=True):
            row[f"train/update_ratio/{name}"] = _ratio(change, weight)
        return {key: value for key, value in row.items() if value is not None}

    def _estimate(self, figures: list[float], result: StepResult) -> Estimate | None:
        sums = SmallBatchSums(*figures)
        if AUXILIARY in result.penalties and not sums.are_equal:
            return None  # router losses are averaged over micro-batches, other losses over tokens
        return estimate(sums, result.grad_norm, self._layout.replicas, self._loss_scale)


def _root(square: float) -> float:
    return math.sqrt(square) if math.isfinite(square) else math.inf


def _ratio(change: float, weight: float) -> float | None:
    """Return the ratio of two norms, given their squares.

    Return None if all weights are zero or a norm is not finite.
    """
    return math.sqrt(change / weight) if weight > 0.0 and math.isfinite(change + weight) else None
