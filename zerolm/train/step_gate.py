"""A step that is refused or clipped after its gradient norm is known, before anything is changed.

The norm of the global batch's gradient is known only inside DeepSpeed's `optimizer.step()`: ZeRO
sums the ranks' shares there, and goes on to the weights at once. DeepSpeed itself can still turn
back at that point, when the norm is not finite: it clears the gradients, touches neither weights
nor moments nor its scheduler, and `engine.was_step_applied()` is False. A step is refused by
showing it an infinite norm, so that the way back is DeepSpeed's own, in every ZeRO stage, precision
and offload. Only its fp16 loss scale must not hear of it.

DeepSpeed 0.19.8: `scaled_global_norm` in ZeRO-1 and 2, `_get_norm_groups` in ZeRO-3. Its
BF16_Optimizer, which is ZeRO-1 with bf16 and float32 gradients, has no such method; the gradients
that it takes the norm of are replaced there.

In each of them `clip_grad` is read after the norm, so that what a gradient is clipped to may depend
on its norm. It is DeepSpeed's own again after the step, which checkpoints have with them: a resume
would bring back that of the last step.
"""

import math
from collections.abc import Callable
from typing import Any

import torch

Judge = Callable[[float], bool]
Clip = Callable[[float], float]
# At stage 3, and with offload, Muon's momentum is advanced before its norm is known. A step that is
# refused before it begins leaves that out; one that is refused for its norm could not, but Muon's
# norm is not that of the gradient, and is not judged.
MUON_UPDATES = ("_apply_muon_to_accumulated_grads", "_apply_muon_updates_cpu_offload")


class StepGate:
    """Stands between the gradient norm and the weights of an engine.

    Args:
        engine: a DeepSpeed engine of ZeRO stage 1, 2 or 3. Two methods of its optimizer are
            replaced for good.

    Attributes:
        grad_norm: of the step, unscaled; None until DeepSpeed has found it to be computable.
        refused: the step was refused here.
        clipped_to: norm to which the gradient was clipped if it was larger; 0: it was not.
    """

    def __init__(self, engine: Any):
        self._optimizer = engine.optimizer
        self._fixed = float(engine.gradient_clipping())
        self.grad_norm: float | None = None
        self.refused = False
        self.clipped_to = 0.0
        self._judge: Judge = _accept
        self._clip: Clip = self._as_configured
        if engine.zero_optimization_stage() == 3:
            self._wrap("_get_norm_groups", self._norm)
        elif hasattr(self._optimizer, "scaled_global_norm"):
            self._wrap("scaled_global_norm", self._norm)
        else:
            self._wrap("get_grads_for_norm", self._gradients)
        for name in ("_update_scale", *MUON_UPDATES):
            if hasattr(self._optimizer, name):
                self._wrap(name, self._unless_refused)

    def step(self, engine: Any, refused: bool, judge: Judge, clip: Clip | None = None) -> None:
        """Take the optimizer step, or only clear its gradients. Every rank must call.

        Args:
            refused: do not take it, whatever its norm is.
            judge: is given the norm, which all ranks share, and returns whether to refuse.
            clip: is given the norm as well, and returns what to clip to, 0 for not at all; None:
                as the ds config says.
        """
        self.grad_norm, self.refused, self._judge = None, refused, judge
        self._clip = clip or self._as_configured
        self.clipped_to = 0.0
        try:
            engine.step()
        finally:
            self._optimizer.clip_grad = self._fixed
        assert not (self.refused and engine.was_step_applied()), "DeepSpeed took a refused step"

    def _wrap(self, name: str, replacement: Callable[..., Any]) -> None:
        original = getattr(self._optimizer, name)
        setattr(self._optimizer, name, lambda *words, **more: replacement(original, *words, **more))

    def _norm(self, original: Callable[..., Any], *words: Any, **more: Any) -> Any:
        """Return DeepSpeed's norm, or norms of groups; or infinity in their place."""
        # Here and not above: it takes seconds to import.
        from deepspeed.runtime.utils import combine_grad_norm_groups

        found = original(*words, **more)
        groups = found if isinstance(found, list) else [found]
        # It is infinite for a group's -1, which is DeepSpeed's NaN.
        if not self._refuses(float(combine_grad_norm_groups(groups))):
            return found
        infinite = [
            torch.full_like(norm, math.inf) if torch.is_tensor(norm) else math.inf
            for norm in groups
        ]
        return infinite if isinstance(found, list) else infinite[0]

    def _gradients(
        self, original: Callable[..., Any], *words: Any, for_clipping: bool = False
    ) -> Any:
        """Return DeepSpeed's gradients, those of experts apart; or infinity in their place."""
        from deepspeed.runtime.utils import get_global_norm_of_tensors

        found = original(*words, for_clipping=for_clipping)
        if for_clipping:
            return found
        dense, experts = found
        assert not experts, "experts of DeepSpeed's own kind are not built here"
        mpu = self._optimizer.mpu  # of which a rank may have a part of every gradient only
        if not self._refuses(float(get_global_norm_of_tensors(dense, mpu=mpu))):
            return found
        return [torch.full_like(dense[0][:1], math.inf)], experts

    def _refuses(self, scaled_norm: float) -> bool:
        """Keep the norm, and tell whether the step is refused, now that it is known."""
        scale = float(getattr(self._optimizer, "loss_scale", 1.0))
        self.grad_norm = scaled_norm / scale
        if math.isfinite(scaled_norm) and not self.refused:
            self.refused = self._judge(self.grad_norm)
            if not self.refused:
                self.clipped_to = self._optimizer.clip_grad = self._clip(self.grad_norm)
        return self.refused

    def _as_configured(self, grad_norm: float) -> float:
        return self._fixed

    def _unless_refused(self, original: Callable[..., Any], *words: Any, **more: Any) -> Any:
        return None if self.refused else original(*words, **more)


def _accept(grad_norm: float) -> bool:
    return False
