"""`Health`: measure clipping, weight norms, update ratios and gradient noise in reported steps.

Measures during the step itself, without changing gradients, weights, optimizer states or RNG. The
state between steps is saved with the run's progress, so a resumed run reports bit-identical values.
"""

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from zerolm.features.feature import Batch, Feature, Row, RunParts, StepInputs, StepResult
from zerolm.run_dir.metrics import AUXILIARY, NOISE_SCALE, Metric, Panel

if TYPE_CHECKING:
    from zerolm.health.noise_scale import Estimate


@dataclass(frozen=True)
class HealthState:
    """State between steps; saved in the checkpoint as JSON.

    Attributes:
        steps: number of steps applied since the last report.
        clipped: number of these steps in which the gradient was clipped.
        noise, signal: moving averages of the fields of `zerolm.health.noise_scale.Estimate`.
    """

    steps: int = 0
    clipped: int = 0
    noise: float = 0.0
    signal: float = 0.0


class Health(Feature):
    """Measures the health of every run, at ZeRO stage 1, 2 or 3."""

    name = "health"
    SECTION = "Optimization"
    # fmt: off
    METRICS = (
        Metric("train/clipped_share", "share",
            Panel("Clipped steps", smooth=True,
                about="Share of steps since the previous line."),
            "share of steps since the previous line whose gradient was clipped; absent without "
            "`gradient_clipping`"),
        Metric("train/param_norm", "", Panel("Parameter norm", about="2-norm of all weights."),
            "2-norm of all parameters; absent if they are offloaded to NVMe"),
        Metric("train/param_norm/<block>", "",
            Panel("Parameter norm by block", many=True, ordered=True,
                about="2-norm of the weights of each block, from the first (blue) to the last "
                    "(yellow)."),
            "the same for one block: a decoder layer (`layers.3`), the embeddings, the final "
            "norm or the head. A tied head counts as part of the embeddings"),
        Metric("train/update_ratio", "",
            Panel("Update ratio", log=True,
                about="Norm of a step's weight update, divided by the norm of the weights; around "
                    "0.001 is usual."),
            "norm of the last step's update to the float32 master weights, divided by the norm "
            "of the parameters; about 1e-3 is usual. Absent for a step that was not applied"),
        Metric("train/update_ratio/<block>", "",
            Panel("Update ratio by block", many=True, ordered=True, log=True),
            "the same for one block"),
        Metric("train/noise_scale_tokens", "tokens", NOISE_SCALE,
            "gradient noise scale: the batch size at which noise and signal in the gradient are "
            "equal (see below)"),
        Metric("train/batch_tokens", "tokens", NOISE_SCALE,
            "tokens in the last step's batch, over all ranks"),
    )
    # fmt: on

    @classmethod
    def wanted(cls, plan: Any) -> bool:
        return True

    def attach(self, run: RunParts) -> None:
        from zerolm.distributed.named_sums import NamedSums
        from zerolm.health.noise_scale import SmallBatches
        from zerolm.health.norms import Blocks, UpdateMeter, is_counted_here

        engine, layout = run.engine, run.layout
        self._engine, self._device, self._gate, self._layout = engine, run.device, run.gate, layout
        self._blocks = Blocks(engine.module)
        # Muon does not report the gradient's norm. With sharded sequences or layers, no rank has
        # the gradient of a complete micro-batch.
        divided = max(layout.sequence, layout.experts, layout.stages) > 1
        self._noise = not self.plan.ds.uses_muon and not divided
        self._meter = UpdateMeter(engine, self._blocks, layout)
        own = [each for each, _ in self._blocks.parameters if is_counted_here(each, layout)]
        self._small = SmallBatches(own, run.device, layout.counts_losses(run.rank))
        self._sums = NamedSums(run.device)
        self._measuring = self._sampling = False
        self._loss_scale = 1.0

    def begin(self, step: StepInputs) -> None:
        """Determine whether to measure the step."""
        from zerolm.engine.gradients import loss_scale

        self._tokens = step.tokens
        self._measuring = step.number % self.settings.log_interval == 0
        # The noise scale compares two batch sizes, which requires more than one micro-batch.
        several = len(step.batches) * self._layout.replicas > 1
        self._sampling = self._measuring and self._noise and several
        if self._sampling:
            self._small.begin()
            self._loss_scale = loss_scale(self._engine)

    def backward(self, batch: Batch) -> AbstractContextManager[Any]:
        from zerolm.model.loss import IGNORED

        if not self._sampling:
            return nullcontext()
        return self._small.backward((batch["targets"] != IGNORED).sum())

    def update(self, result: StepResult) -> AbstractContextManager[Any]:
        """Copy the weights before the optimizer step changes them, if the step is measured."""
        if self._measuring:
            self._meter.before()
        return nullcontext()

    def after(self, step: StepInputs, result: StepResult) -> None:
        if not result.applied:
            self._measuring = self._sampling = False
            self._meter.drop()
            return
        old = HealthState(**self.state)
        clipped = 0.0 < self._gate.clip_norm < result.grad_norm
        self.state = vars(replace(old, steps=old.steps + 1, clipped=old.clipped + clipped))

    def row(self, result: StepResult) -> Row:
        """Return the last step's metrics. All figures are summed in a single reduction."""
        import torch

        from zerolm.health.noise_scale import Estimate, SmallBatchSums, average
        from zerolm.health.norms import weight_squares

        old = HealthState(**self.state)
        weights = weight_squares(self._blocks, self._device, self._layout)
        changes = self._meter.squares(self._device) if self._measuring else None
        names = self._blocks.names
        none = torch.zeros(len(names), dtype=torch.float64, device=self._device)
        figures = {
            "weights": zip(names, none if weights is None else weights, strict=True),
            "changes": zip(names, none if changes is None else changes, strict=True),
            "small batches": zip(SmallBatchSums._fields, self._small.figures, strict=True),
        }
        found = self._sums.sum({group: dict(of_group) for group, of_group in figures.items()})
        row: Row = {"train/batch_tokens": self._tokens}
        if weights is not None:
            row |= _norms("train/param_norm", found["weights"])
            if changes is not None:
                row |= _ratios("train/update_ratio", found["changes"], found["weights"])
        if self._gate.clip_norm and old.steps:
            row["train/clipped_share"] = old.clipped / old.steps
        averages = Estimate(old.noise, old.signal)
        new = self._estimate(found["small batches"], result) if self._sampling else None
        if new is not None:
            averages = average(averages, new)
            if averages.noise_scale_tokens is not None:
                row["train/noise_scale_tokens"] = averages.noise_scale_tokens
        new_state = replace(old, steps=0, clipped=0, noise=averages.noise, signal=averages.signal)
        self.state = vars(new_state)
        return row

    def _estimate(self, figures: dict[str, float], result: StepResult) -> "Estimate | None":
        from zerolm.health.noise_scale import SmallBatchSums, estimate

        sums = SmallBatchSums(**figures)
        if AUXILIARY in result.penalties and not sums.are_equal:
            return None  # router losses are averaged over micro-batches, other losses over tokens
        return estimate(sums, result.grad_norm, self._layout.replicas, self._loss_scale)


def _norms(key: str, squares: Mapping[str, float]) -> Row:
    row = {key: _root(sum(squares.values()))}
    return row | {f"{key}/{block}": _root(each) for block, each in squares.items()}


def _ratios(key: str, changes: Mapping[str, float], weights: Mapping[str, float]) -> Row:
    row = {key: _ratio(sum(changes.values()), sum(weights.values()))}
    row |= {f"{key}/{block}": _ratio(each, weights[block]) for block, each in changes.items()}
    return {key: value for key, value in row.items() if value is not None}


def _root(square: float) -> float:
    return math.sqrt(square) if math.isfinite(square) else math.inf


def _ratio(change: float, weight: float) -> float | None:
    """Return the ratio of two norms, given their squares.

    Return None if all weights are zero or a norm is not finite.
    """
    return math.sqrt(change / weight) if weight > 0.0 and math.isfinite(change + weight) else None
