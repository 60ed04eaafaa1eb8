"""Which parameters decay. The optimizer itself is DeepSpeed's, named in the ds config."""

from typing import Any

from torch import nn


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
