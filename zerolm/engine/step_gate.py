"""`StepGate`: refuses an optimizer step because of its gradient norm, before the weights change.

The norm of the global gradient is known only inside DeepSpeed's `optimizer.step()`, which reduces
it over ranks and then updates the weights. At that point DeepSpeed itself skips a step whose norm
is not finite: it clears the gradients, leaves weights, moments and its scheduler unchanged, and
`engine.was_step_applied()` returns False. The gate refuses a step by returning an infinite norm, so
DeepSpeed itself skips the step, at every ZeRO stage, in every precision and with any offload. The
fp16 loss scaler must not treat that norm as an overflow.

`REPLACED` lists the methods (DeepSpeed 0.19.8). BF16_Optimizer, which implements ZeRO-1 with bf16
weights and float32 gradients, has no method that returns the norm, but one that returns the
gradients for it.
"""

import math
from collections.abc import Callable
from typing import Any

import torch

from zerolm.common.errors import GaveUp
from zerolm.engine import replaced
from zerolm.engine.gradients import parts
from zerolm.engine.muon import uses_muon
from zerolm.engine.stages import groups_of, is_copy
from zerolm.engine.states import partitions_of

RefusalRule = Callable[[float], bool]  # takes the gradient norm; returns whether to refuse the step
# At stage 3, and with offload, these methods update Muon's momentum before the norm is known. They
# are skipped in a step that is refused before it starts. A refusal based on the norm would come
# too late, but with Muon no step is refused by its norm, which is not the gradient's.
MUON_UPDATES = ("_apply_muon_to_accumulated_grads", "_apply_muon_updates_cpu_offload")
SCALE_AT_MINIMUM = "loss scale already at minimum"  # DeepSpeed raises a bare Exception
COUNTERS = ("global_steps", "global_samples", "skipped_steps", "micro_steps")


class StepGate:
    """Decides whether an engine takes a step, after computing the gradient norm and before updating
    weights.

    Args:
        engine: a DeepSpeed engine of ZeRO stage 1, 2 or 3. The methods of its optimizer are
            replaced permanently.

    Attributes:
        grad_norm: unscaled gradient norm of the last step; None if DeepSpeed found an overflow.
        refused: whether the gate refused the last step.
        clip_norm: `gradient_clipping` from the DeepSpeed config; 0: no clipping.
        clip_parameters: called after the norm of a step is known, unless the step is refused or
            skipped: may scale the gradients of parameters, and returns the new norm of the whole
            gradient relative to the old one.
    """

    def __init__(self, engine: Any):
        self._optimizer = engine.optimizer
        self.clip_norm = float(engine.gradient_clipping())
        self.grad_norm: float | None = None
        self.refused = False
        self.clip_parameters: Callable[[], float] = _unclipped
        self._should_refuse: RefusalRule = _never
        if engine.zero_optimization_stage() == 3:
            self._wrap("_get_norm_groups", self._norm)
        elif hasattr(self._optimizer, "scaled_global_norm"):
            self._wrap("scaled_global_norm", self._norm)
        else:
            self._wrap("get_grads_for_norm", self._gradients)
        for name in ("_update_scale", *MUON_UPDATES):
            if hasattr(self._optimizer, name):
                self._wrap(name, self._unless_refused)

    def step(
        self,
        engine: Any,
        refused: bool,
        should_refuse: RefusalRule,
    ) -> None:
        """Take the optimizer step, or refuse it and only clear the gradients. Every rank must call
        this.

        Args:
            refused: whether to skip the step regardless of its norm.
            should_refuse: takes the gradient norm, which is the same on all ranks; returns whether
                to refuse the step.

        Raises:
            GaveUp: fp16 found no loss scale at which the gradients are finite.
        """
        self.grad_norm, self.refused, self._should_refuse = None, refused, should_refuse
        self._optimizer.clip_grad = self.clip_norm  # loading a checkpoint overwrites this value
        try:
            engine.step()
        except Exception as error:
            if SCALE_AT_MINIMUM in str(error):
                raise GaveUp(f"fp16: {error}") from error
            raise
        if not engine.was_step_applied():
            self._clear_offloaded_sums()
        assert not (self.refused and engine.was_step_applied()), "DeepSpeed took a refused step"

    def discard(self, engine: Any) -> None:
        """Clear the accumulated gradient, as if its backward passes had not been run.

        Makes DeepSpeed skip a step, and restores its counters. Every rank must call this.
        """
        counters = {name: getattr(engine, name) for name in COUNTERS}
        self.step(engine, True, _never)
        for name, count in counters.items():
            setattr(engine, name, count)

    def _clear_offloaded_sums(self) -> None:
        """Drop a skipped step's float32 gradient sums, which DeepSpeed would add to those of the
        next step.

        DeepSpeed 0.19.8 adds them at stage 2 if the optimizer is on the host and gradients have
        another dtype.
        """
        if getattr(self._optimizer, "cpu_offload", False):
            sums = self._optimizer.averaged_gradients
            sums.update(dict.fromkeys(sums))

    def _wrap(self, name: str, replacement: Callable[..., Any]) -> None:
        original = getattr(self._optimizer, name)
        replaced.install(
            self._optimizer, name, lambda *args, **kwargs: replacement(original, *args, **kwargs)
        )

    def _norm(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return DeepSpeed's norm or list of norms per group, made infinite to refuse the step.

        DeepSpeed sums the norms of pipeline stages group by group, but their groups may differ.
        """
        # Imported here because it takes seconds.
        from deepspeed.runtime.utils import combine_grad_norm_groups

        is_stage = groups_of(self._optimizer) is not None
        norms = _global_norm(self._optimizer) if is_stage else original(*args, **kwargs)
        groups = norms if isinstance(norms, list) else [norms]
        # A group's norm of -1 is DeepSpeed's NaN; the combined norm is then infinite.
        total = float(combine_grad_norm_groups(groups))
        if not self._decide(total):
            ratio = self.clip_parameters() if math.isfinite(total) else 1.0
            clipped = [norm * ratio for norm in groups]
            return norms if ratio == 1.0 else clipped if isinstance(norms, list) else clipped[0]
        infinite = [
            torch.full_like(norm, math.inf) if torch.is_tensor(norm) else math.inf
            for norm in groups
        ]
        return infinite if isinstance(norms, list) else infinite[0]

    def _gradients(
        self, original: Callable[..., Any], *args: Any, for_clipping: bool = False
    ) -> Any:
        """Return DeepSpeed's (gradients, expert gradients), with an infinite gradient to refuse the
        step.

        Without tensor parallelism, each rank reads its own partition once to compute the norm. The
        norm is returned to DeepSpeed as a gradient with one value, and DeepSpeed clips only this
        rank's partitions.
        """
        from deepspeed.runtime.utils import get_global_norm_of_tensors

        optimizer = self._optimizer
        stages = groups_of(optimizer)
        # set with tensor parallelism: a rank has only gradient shards
        mpu = optimizer.mpu if stages is None else None
        partitions = optimizer.fp32_groups_gradient_flat_partition
        if for_clipping:  # Muon reads complete matrices, even if the rank owns only a part
            is_complete = mpu or uses_muon(optimizer)
            return original(*args, for_clipping=True) if is_complete else partitions
        if mpu:
            gradients, experts = original(*args, for_clipping=False)
            assert not experts, "DeepSpeed's own MoE layers are not used here"
            norm = get_global_norm_of_tensors(gradients, mpu=mpu)  # `--agc` is refused here
        else:
            norm = _global_norm(optimizer)
            # DeepSpeed sums the squares of what the stages of a replica return.
            counts = stages is None or stages.stage == 0
            gradients = [norm[None] if counts else torch.zeros_like(norm)[None]]
        total = float(norm)  # the step's only wait for this value
        if not self._decide(total):
            if math.isfinite(total) and (ratio := self.clip_parameters()) != 1.0:
                gradients = [each * ratio for each in gradients]
            return gradients, {}
        return [torch.full_like(gradients[0][:1], math.inf)], {}

    def _decide(self, scaled_norm: float) -> bool:
        """Record the norm, and return whether the step is refused."""
        scale = float(getattr(self._optimizer, "loss_scale", 1.0))
        self.grad_norm = scaled_norm / scale
        if math.isfinite(scaled_norm) and not self.refused:
            self.refused = self._should_refuse(self.grad_norm)
        return self.refused

    def _unless_refused(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return None if self.refused else original(*args, **kwargs)


def _global_norm(optimizer: Any) -> torch.Tensor:
    """Return the float32 norm of the gradient, without tensor parallelism. Every rank must call
    this.

    Squares are summed in float64: torch's float32 sum on a CPU is 1% off for 1e8 values.
    """
    stages = groups_of(optimizer)
    if stages is None:
        counted = optimizer.fp32_groups_gradient_flat_partition
    else:
        counted = [each for parameter, each in parts(optimizer) if not is_copy(parameter)]
    norms = [torch.linalg.vector_norm(each, dtype=torch.float64) for each in counted]
    device = partitions_of(optimizer)[0].device
    square = torch.stack([*norms, torch.zeros((), dtype=torch.float64, device=device)])
    square = square.square().sum()
    if (ranks := torch.distributed.get_world_size()) > 1:
        # over all copies, so that all get identical bits
        torch.distributed.all_reduce(square)
        shards = torch.distributed.get_world_size(optimizer.dp_process_group)
        square /= ranks // shards if stages is None else 1
    return square.sqrt().float()


def _never(grad_norm: float) -> bool:
    return False


def _unclipped() -> float:
    return 1.0
