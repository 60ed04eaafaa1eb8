"""Fixes to DeepSpeed's Lion and CPUAdam kernels. Checked with DeepSpeed 0.19.8."""

import math
from typing import Any

import torch

from zerolm.engine import replaced

LION_CHUNK = 1 << 26  # number of values compared with zero at a time, to limit memory use
FLOAT32_UNDERFLOW = 1e-46  # rounds to zero in float32


def fix_lion_zero_updates(optimizer: torch.optim.Optimizer) -> None:
    """Make DeepSpeed's Lion leave values unchanged until their first gradient, as Lion should.

    Lion's update is the sign of an interpolation of gradient and momentum, and the sign of zero is
    zero (Chen et al. 2023, arXiv 2302.06675, algorithm 2). DeepSpeed's kernels (csrc/lion) treat
    the sign of zero as plus on a CPU and as minus on a GPU, so the embeddings of tokens that have
    not occurred yet would move by a full step each time. With this fix only weight decay changes
    them. Replaces the optimizer's `step` permanently.

    Args:
        optimizer: DeepSpeed's Lion, as wrapped by ZeRO's optimizer.
    """
    original = optimizer.step

    @torch.no_grad()
    def step(*args: Any, **kwargs: Any) -> Any:
        restored = []
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                momentum = optimizer.state.get(parameter, {}).get("exp_avg", parameter.grad)
                tensors = (parameter, parameter.grad, momentum)
                chunks = (tensor.detach().view(-1).split(LION_CHUNK) for tensor in tensors)
                for values, gradient, average in zip(*chunks, strict=True):
                    indices = ((gradient == 0) & (average == 0)).nonzero()[:, 0].int()
                    decayed = values[indices] * (1 - group["lr"] * group["weight_decay"])
                    restored.append((values, indices, decayed))
        result = original(*args, **kwargs)
        for values, indices, decayed in restored:
            values[indices] = decayed
        return result

    replaced.install(optimizer, "step", step)


def restore_beta_powers(optimizer: torch.optim.Optimizer) -> None:
    """Restore CPUAdam's powers of the betas bit for bit after loading a checkpoint.

    CPUAdam multiplies these float32 powers by beta at each step, but after a load it computes them
    with one `pow`, which rounds differently (csrc/includes/cpu_adam.h, IncrementStep). So this
    function replays the steps on a single value until the powers underflow to zero, which takes
    microseconds per step.

    Args:
        optimizer: the optimizer that ZeRO wraps; ignored unless it is CPUAdam.
    """
    # With Muon, a second optimizer updates the parameters that are not matrices.
    adam: Any = getattr(optimizer, "aux_optimizer", None) or optimizer
    if not hasattr(adam, "ds_opt_adam"):
        return
    steps = max((int(state["step"]) for state in adam.state.values() if "step" in state), default=0)
    group = next(group for group in adam.param_groups if "betas" in group)
    largest = max(group["betas"])
    if largest > 0.0:
        steps = min(steps, math.ceil(math.log(FLOAT32_UNDERFLOW) / math.log(largest)))
    value, gradient, first, second = torch.zeros(4, 1)
    for step in range(1, steps + 1):
        adam.ds_opt_adam.adam_update(
            adam.opt_id, step, group["lr"], *group["betas"], group["eps"], group["weight_decay"],
            group["bias_correction"], value, gradient, first, second,
        )  # fmt: skip
