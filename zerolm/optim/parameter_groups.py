"""Which parameters decay, and what two of DeepSpeed's kernels need to be what they are called.

The optimizer itself is DeepSpeed's, named in the ds config. Versions: DeepSpeed 0.19.8.
"""

import math
from typing import Any

import torch
from torch import nn

LEAST_FLOAT32 = 1e-46  # below it a power is zero in float32


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Split the parameters: matrices decay, norms and biases do not.

    A parameter decays when it has at least two dimensions in the whole model. Under ZeRO-3 a
    partitioned parameter is one-dimensional in this process, so its own shape (`ds_shape`) counts.

    Args:
        weight_decay: of the first group; the second has 0.

    Returns:
        Two groups for `deepspeed.initialize(model_parameters=...)`; an empty one is left out.
    """
    decaying: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for parameter in model.parameters():  # tied weights appear once
        shape = getattr(parameter, "ds_shape", parameter.shape)
        (decaying if len(shape) >= 2 else plain).append(parameter)
    groups: list[dict[str, Any]] = [
        {"params": decaying, "weight_decay": weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def leave_untouched_values(optimizer: torch.optim.Optimizer) -> None:
    """Make DeepSpeed's Lion leave values alone that have had no gradient yet, as Lion does.

    Its step is the sign of gradient and momentum, and the sign of zero is zero (Chen et al. 2023,
    arXiv 2302.06675, algorithm 2). DeepSpeed's kernels take it for a plus on a CPU, and for a minus
    on a GPU (csrc/lion): embeddings of tokens that were not seen yet would go away by a whole step
    each time. Only the weight decay reaches them here. The optimizer's `step` is replaced for good.

    Args:
        optimizer: DeepSpeed's own, inside of ZeRO's.
    """
    original = optimizer.step

    @torch.no_grad()
    def step(*words: Any, **more: Any) -> Any:
        kept = []
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                untouched = parameter.grad == 0
                momentum = optimizer.state.get(parameter, {}).get("exp_avg")
                if momentum is not None:
                    untouched &= momentum == 0
                places = untouched.nonzero(as_tuple=True)
                decayed = parameter[places] * (1 - group["lr"] * group["weight_decay"])
                kept.append((parameter, places, decayed))
        result = original(*words, **more)
        for parameter, places, decayed in kept:
            parameter[places] = decayed
        return result

    optimizer.step = step  # type: ignore[method-assign]


def repeat_powers(optimizer: torch.optim.Optimizer) -> None:
    """Bring the CPUAdam of a resumed run to the bits that it had.

    It multiplies its powers of the betas up from step to step, in float32, but after a load takes
    them by one power, which rounds otherwise (csrc/includes/cpu_adam.h, IncrementStep). So the
    steps are counted through again, on a single value: microseconds each, and none after the powers
    are zero.

    Args:
        optimizer: inside of ZeRO's; any other than CPUAdam is left alone.
    """
    # Muon has one for the other values.
    adam: Any = getattr(optimizer, "aux_optimizer", None) or optimizer
    if not hasattr(adam, "ds_opt_adam"):
        return
    steps = max((int(state["step"]) for state in adam.state.values() if "step" in state), default=0)
    group = next(group for group in adam.param_groups if "betas" in group)
    largest = max(group["betas"])
    if largest > 0.0:
        steps = min(steps, math.ceil(math.log(LEAST_FLOAT32) / math.log(largest)))
    value, gradient, first, second = torch.zeros(4, 1)
    for step in range(1, steps + 1):
        adam.ds_opt_adam.adam_update(
            adam.opt_id, step, group["lr"], *group["betas"], group["eps"], group["weight_decay"],
            group["bias_correction"], value, gradient, first, second,
        )  # fmt: skip
