"""`Feature`: base class of optional parts of training; a subclass contains everything specific to a
part.

A subclass defines the feature's flags, refusals, lines in the plan, metrics, state in the
checkpoint, and hooks. Hooks are listed here in the order in which they are called. `FEATURES` in
`zerolm/features/__init__.py` lists all subclasses. Features that a run does not use are not built,
so their hooks are never called.

The settings include the flags of all features, so each feature module imports little at its top;
imports that only a hook needs are inside the hook.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from zerolm.config.part import Part

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig

    from zerolm.checkpoint.directory import Checkpoint
    from zerolm.checkpoint.manifest import Progress
    from zerolm.distributed.layout import Layout
    from zerolm.distributed.named_sums import Figures
    from zerolm.ds_config.profile import Profile
    from zerolm.engine.protocol import Engine
    from zerolm.engine.step_gate import StepGate
    from zerolm.plan.plan import Plan

Batch = dict[str, "torch.Tensor"]
Row = dict[str, float]


class Case(NamedTuple):
    """The parts of a run with which a feature may refuse to be combined.

    Attributes:
        device: type of the ranks' devices; `absent` if they are not on this machine.
        initial: the `InitialSource` of `--init_from`, if known.
    """

    settings: Any
    config: "PretrainedConfig"
    profile: "Profile"
    layout: "Layout"
    device: str
    initial: Any = None


class StepInputs(NamedTuple):
    """The inputs of a step on one rank.

    Attributes:
        batches: this rank's micro-batches, on its device; every rank has the same number.
        position: position of the global batch's first sequence in the data order.
        tokens: number of tokens in the global batch.
        learning_rate: the learning rate to set; None if the DeepSpeed scheduler has set it.
        flags: numbers to sum over ranks along with the losses.
        fault: fault to inject into this rank's passes, from `fault_point`; for tests.
    """

    number: int
    batches: Sequence[Batch]
    position: int
    tokens: int
    learning_rate: float | None
    flags: Sequence[float]
    fault: str | None


class Forward(NamedTuple):
    """The forward pass over a micro-batch on one rank.

    Attributes:
        outputs: the model's outputs; with `--loss_chunk_tokens`, `logits` contains losses (B, T,
            1).
        losses_BT: the loss of each target token; zero at positions without a target.
        targets: number of targets in the global batch.
    """

    batch: Batch
    outputs: Any
    losses_BT: "torch.Tensor"
    targets: "torch.Tensor | int"


@dataclass
class StepResult:
    """The result of a step, reduced over ranks, so it is the same on every rank.

    Attributes:
        loss: mean cross-entropy over the target tokens of the global batch.
        by_source: {name: a sum for each source}: `losses` and `tokens` of targets; if token bytes
            are known, also `text_losses` of targets that represent text, and its `text_bytes`.
        penalties: weighted losses minimized in addition to the loss (router loss and z-losses), by
            metric name.
        grad_norm: 2-norm of the gradient before clipping; infinity if not finite.
        applied: False if the optimizer step was refused or DeepSpeed skipped it.
        flags: sums over ranks of the `flags` in each rank's `StepInputs`.
        micro_losses: mean loss of each micro-batch on this rank.
    """

    loss: float
    by_source: Mapping[str, list[float]]
    penalties: dict[str, float] = field(default_factory=dict)
    grad_norm: float = 0.0
    learning_rate: float = 0.0
    applied: bool = True
    flags: list[float] = field(default_factory=list)
    micro_losses: list["torch.Tensor"] = field(default_factory=list)


class RunParts(Protocol):
    """The parts of a rank's run (`zerolm.train.run.Run`) that features use.

    Attributes:
        gate: decides whether a step is applied, and discards gradients.
        checkpointing: saves copies of the states in memory.
        journal: logs metrics and events.
    """

    engine: "Engine"
    device: "torch.device"
    gate: "StepGate"
    checkpointing: Any
    journal: Any
    layout: "Layout"
    progress: "Progress"
    rank: int
    run_dir: Path


class Feature(Part):
    """An optional part of training. Every rank must make the same calls.

    Contexts and wrappers are entered in the order of `FEATURES`, and hooks after the update are
    called in reverse order: the first feature is the outermost.

    Attributes:
        interval: number of steps between those in which the feature waits for the device; 0: never.
        state: the feature's state as JSON for the next checkpoint; replaced, never mutated.
    """

    interval = 0

    # ---- Before the run: nothing is built

    @classmethod
    def problems(cls, case: Case) -> Iterable[str]:
        """Return reasons why the run cannot use the feature; none if the feature is off."""
        return ()

    @classmethod
    def notices(cls, case: Case) -> Iterable[str]:
        """Return lines that the user should read, whether the feature is on or off."""
        return ()

    @classmethod
    def host_problems(cls, plan: "Plan", environment: Mapping[str, str]) -> Iterable[str]:
        """Return what the feature needs but this host lacks; called without other problems."""
        return ()

    @classmethod
    def flops_per_token(cls, settings: Any, config: "PretrainedConfig") -> float:
        """Return the FLOPs per training token that the feature adds to the model's."""
        return 0.0

    @classmethod
    def summary(cls, plan: "Plan") -> Mapping[str, str]:
        """Return the feature's lines in the plan; none if the feature is off."""
        return {}

    @classmethod
    def wanted(cls, plan: "Plan") -> bool:
        """Return whether the run uses the feature."""
        raise NotImplementedError

    @classmethod
    def absent(cls, run: RunParts) -> None:
        """Remove state that earlier launches with the feature left behind; called after each load
        in a run without the feature.
        """

    # ---- The start of a run

    def __init__(self, plan: "Plan"):
        self.plan, self.settings = plan, plan.settings
        self.state: dict[str, Any] = {}

    def initial_factors(self) -> Mapping[str, float]:
        """Return factors for parameters' initial values, by parameter name."""
        return {}

    def option_factors(self) -> Mapping[str, Mapping[str, float]]:
        """Return factors for optimizer options, by parameter name and then option name."""
        return {}

    def change_model(self, model: Any) -> None:
        """Change the model before `deepspeed.initialize`."""

    def change_engine(self, engine: "Engine") -> str:
        """Change or test the engine after `deepspeed.initialize`; return a line to print."""
        return ""

    def attach(self, run: RunParts) -> None:
        """Receive the engine and the other parts of the run."""

    def find_checkpoint(
        self, usable: Callable[["Checkpoint"], bool]
    ) -> tuple["Checkpoint | None", Sequence[str]]:
        """Return the feature's checkpoint if it is newer than those on disk, and the reasons why
        others are damaged.
        """
        return None, ()

    def loaded(self, state: dict[str, Any]) -> None:
        """Restore the feature's state, which is empty if the loaded checkpoint contains none."""
        self.state = state

    # ---- A step

    def passes(self, compute: Callable[[], StepResult], step: StepInputs) -> StepResult:
        """Run the passes over a batch; `compute` accumulates its gradient."""
        return compute()

    def begin(self, step: StepInputs) -> None:
        """Prepare for a pass over a batch."""

    def forward(self, batch: Batch) -> AbstractContextManager[Any]:
        """Return a context for the forward pass over a micro-batch."""
        return nullcontext()

    def block_losses(self, outputs: Any, tokens: int) -> Mapping[str, "torch.Tensor"]:
        """Observe this rank's blocks in a micro-batch, on every pipeline stage; return their share
        of weighted losses to minimize, by metric.

        Args:
            outputs: has the `router_logits` of this rank's routers, if the model returns them.
            tokens: number of tokens in the global batch.
        """
        return {}

    def losses(self, forward: Forward) -> Mapping[str, "torch.Tensor"]:
        """Observe a micro-batch where its losses are computed, so only on the last pipeline stage;
        return its share of weighted losses to minimize, by metric.
        """
        return {}

    def backward(self, batch: Batch) -> AbstractContextManager[Any]:
        """Return a context for the backward pass over a micro-batch."""
        return nullcontext()

    def sums(self, losses: Sequence["torch.Tensor"]) -> Mapping[str, "Figures"]:
        """Return this rank's figures, to be summed over ranks along with the step's own figures.

        Args:
            losses: mean loss of each micro-batch on this rank.

        Returns:
            {group: {name: float64 tensor () or (n,) on the device}}. Every rank must return the
            same groups; a name may be absent on ranks that have nothing to add to it. If a name
            joins a group later, every rank must add one in that step.
        """
        return {}

    def summed(self, figures: Mapping[str, Mapping[str, Any]]) -> None:
        """Receive the sums over ranks of the groups of `sums`, with the names of all ranks.

        Args:
            figures: {group: {name: number or list of numbers}}.
        """

    def update(self, result: StepResult) -> AbstractContextManager[Any]:
        """Return a context for the optimizer step."""
        return nullcontext()

    def after(self, step: StepInputs, result: StepResult) -> None:
        """Run after the optimizer step, whether or not it was applied."""

    # ---- Between two steps

    def row(self, result: StepResult) -> Row:
        """Return the last step's metrics; called if the step is reported. May replace `state`."""
        return {}

    def between_saves(self) -> None:
        """Run after a step without a checkpoint, once it is certain that the step will be kept."""

    def weights(self) -> Mapping[str, AbstractContextManager[Any]]:
        """Return {name: context} for other weights to evaluate; the model has these weights inside
        the context.
        """
        return {}

    def close(self) -> None:
        """Clean up after the run has finished, stopped or given up."""
