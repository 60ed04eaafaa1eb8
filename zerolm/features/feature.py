"""`Feature`: a part of training that may be off, with everything that only this part knows.

It has flags, refusals, lines of the plan, metrics, a state in the checkpoint, and hooks, which are
named here in the order in which they are called. `FEATURES` in `zerolm/features/__init__.py` lists
all of them. In a run without a feature it is not built, and none of its hooks exists.

The settings are made of the flags of all features, so a module of a feature imports little at its
top, and what its hooks need inside them.
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
    from zerolm.ds_config.profile import Profile
    from zerolm.engine.protocol import Engine
    from zerolm.engine.step_gate import StepGate
    from zerolm.plan.plan import Plan

Batch = dict[str, "torch.Tensor"]
Row = dict[str, float]


class Case(NamedTuple):
    """What a feature may refuse to be combined with.

    Attributes:
        device: kind of the ranks' devices, `absent` if they are not on this machine.
        initial: the `InitialSource` of `--init_from`, if it is known.
    """

    settings: Any
    config: "PretrainedConfig"
    profile: "Profile"
    world_size: int
    device: str
    initial: Any = None


class Step(NamedTuple):
    """A step, on one rank.

    Attributes:
        batches: this rank's micro-batches, on its device; as many as on other ranks.
        position: of the global batch's first sequence in the data order.
        tokens: tokens of the global batch.
        learning_rate: the rate to set; None: the scheduler of the ds config has set it.
        flags: numbers to sum over ranks along with the losses.
        fault: injected fault for this rank's passes, from `fault_point`; for tests.
    """

    number: int
    batches: Sequence[Batch]
    position: int
    tokens: int
    learning_rate: float | None
    flags: Sequence[float]
    fault: str | None


class Forward(NamedTuple):
    """A forward pass over a micro-batch, on one rank.

    Attributes:
        outputs: of the model; its `logits` are losses (B, T, 1) with `--loss_chunk_tokens`.
        losses_BT: the loss of each target token, 0 where there is none.
        tokens, targets: numbers of tokens and targets in the global batch.
    """

    batch: Batch
    outputs: Any
    losses_BT: "torch.Tensor"
    tokens: int
    targets: "torch.Tensor | int"


@dataclass
class StepResult:
    """The result of a step, reduced over ranks: the same on all of them.

    Attributes:
        loss: mean cross-entropy per target token of the global batch.
        source_losses, source_tokens: (S,) sum of losses and number of targets per source.
        text_losses, text_bytes: (S,) sum of the losses of targets that stand for text, and bytes of
            that text; empty if the bytes of tokens are not known.
        penalties: weighted losses that are minimized with the loss, by metric: the router loss of
            a mixture of experts, and z-losses.
        grad_norm: 2-norm of the gradient before clipping; infinite if it is not finite.
        applied: False if the optimizer step was refused, or skipped by DeepSpeed.
        flags: sums over ranks of the flags that each passed in.
        micro_losses: the mean loss of each micro-batch of this rank.
    """

    loss: float
    source_losses: list[float]
    source_tokens: list[float]
    text_losses: list[float] = field(default_factory=list)
    text_bytes: list[float] = field(default_factory=list)
    penalties: dict[str, float] = field(default_factory=dict)
    grad_norm: float = 0.0
    learning_rate: float = 0.0
    applied: bool = True
    flags: list[float] = field(default_factory=list)
    micro_losses: list["torch.Tensor"] = field(default_factory=list)


class RunParts(Protocol):
    """What features use of a run on one rank (`zerolm.train.run.Run`).

    Attributes:
        gate: decides whether a step is applied, and discards gradients.
        checkpointing, journal: save copies in memory; log.
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
    """A part of training that may be off. Every rank makes the same calls.

    Contexts and wrappers are entered in the order of `FEATURES`, and what follows the update is
    called in the reverse order: the first feature is the outermost.

    Attributes:
        interval: steps between two times at which it waits for the device after a step; 0: never.
        state: the feature's state as JSON, for the next checkpoint: replaced, never mutated.
    """

    interval = 0

    # ---- Before the run: nothing is built

    @classmethod
    def problems(cls, case: Case) -> Iterable[str]:
        """Return why the run cannot have the feature; nothing if it is off."""
        return ()

    @classmethod
    def notices(cls, case: Case) -> Iterable[str]:
        """Return what the user should know, whether the feature is on or off."""
        return ()

    @classmethod
    def host_problems(cls, plan: "Plan", environment: Mapping[str, str]) -> Iterable[str]:
        """Return what this host lacks for the feature of a run without other problems."""
        return ()

    @classmethod
    def flops_per_token(cls, settings: Any, config: "PretrainedConfig") -> float:
        """Return the FLOPs that it takes per token of training, besides those of the model."""
        return 0.0

    @classmethod
    def summary(cls, plan: "Plan") -> Mapping[str, str]:
        """Return its lines of the plan; nothing if it is off."""
        return {}

    @classmethod
    def wanted(cls, plan: "Plan") -> bool:
        """Return whether the run has the feature."""
        raise NotImplementedError

    @classmethod
    def absent(cls, run: RunParts) -> None:
        """After each load in a run without the feature: remove what earlier starts have left."""

    # ---- The start of a run

    def __init__(self, plan: "Plan"):
        self.plan, self.settings = plan, plan.settings
        self.state: dict[str, Any] = {}

    def initial_factors(self) -> Mapping[str, float]:
        """Return factors on the initial values of parameters, by name."""
        return {}

    def option_factors(self) -> Mapping[str, Mapping[str, float]]:
        """Return factors on options of the optimizer, by name of the parameter, then of option."""
        return {}

    def change_model(self, model: Any) -> None:
        """Change the model before `deepspeed.initialize`."""

    def change_engine(self, engine: "Engine") -> str:
        """Change or test the engine after `deepspeed.initialize`; return a line to print."""
        return ""

    def attach(self, run: RunParts) -> None:
        """Prepare for the engine and the other parts of the run."""

    def find_checkpoint(
        self, usable: Callable[["Checkpoint"], bool]
    ) -> tuple["Checkpoint | None", Sequence[str]]:
        """Return a checkpoint that is newer than those on disk, and why others are damaged."""
        return None, ()

    def loaded(self, state: dict[str, Any]) -> None:
        """Adopt the state that the loaded checkpoint has of the feature, empty if it has none."""
        self.state = state

    # ---- A step

    def passes(self, compute: Callable[[], StepResult], step: Step) -> StepResult:
        """Make the passes over a batch; `compute` accumulates its gradient."""
        return compute()

    def begin(self, step: Step) -> None:
        """Start each pass over a batch."""

    def forward(self, batch: Batch) -> AbstractContextManager[Any]:
        """Return a context for the forward pass over a micro-batch."""
        return nullcontext()

    def losses(self, forward: Forward) -> Mapping[str, "torch.Tensor"]:
        """Observe a micro-batch; return its part of weighted losses to minimize, by metric."""
        return {}

    def sums(self, losses: Sequence["torch.Tensor"]) -> "torch.Tensor | None":
        """Return this rank's figures, which are summed over ranks with those of the step.

        Args:
            losses: the mean loss of each micro-batch of this rank.

        Returns:
            (n,) float64 on the device, with the same n on all ranks.
        """
        return None

    def summed(self, figures: Sequence[float]) -> None:
        """Receive the sums over ranks; empty if there were none."""

    def update(self, result: StepResult) -> AbstractContextManager[Any]:
        """Return a context for the optimizer step."""
        return nullcontext()

    def after(self, step: Step, result: StepResult) -> None:
        """Act after the optimizer step, whether it was applied or not."""

    # ---- Between two steps

    def row(self, result: StepResult) -> Row:
        """Return the metrics of the last step, which is reported."""
        return {}

    def between_saves(self) -> None:
        """Act after a step without a checkpoint, once it is clear that it stays."""

    def weights(self) -> Mapping[str, AbstractContextManager[Any]]:
        """Return contexts in which the model has other weights, to evaluate them too, by name."""
        return {}

    def close(self) -> None:
        """End: the run is done, stopped, or has given up."""
