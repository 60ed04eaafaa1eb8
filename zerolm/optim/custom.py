"""Finds optimizers of torch or of the user by name, and tests whether they work on shards.

ZeRO gives an optimizer flat shards that hold parts of several parameters, so only elementwise
arithmetic learns the same curve on every world size. Must not depend on DeepSpeed or settings.
"""

import importlib
from collections.abc import Mapping
from functools import cache
from inspect import signature
from typing import Any

import torch
from torch import nn

STEPS, ROWS, COLUMNS = 3, 6, 8
LEARNING_RATE = 0.01


def is_dotted(name: str) -> bool:
    """Return whether a name is a path such as `my_package.optimizers.SignSGD`."""
    return "." in name


@cache
def optimizer_class(name: str) -> type[torch.optim.Optimizer]:
    """Return the optimizer of that name: of `torch.optim`, or by its dotted path.

    Raises:
        ValueError: there is none; the text has the rule and the fix.
    """
    module_name, _, class_name = name.rpartition(".")
    try:
        module = importlib.import_module(module_name) if module_name else torch.optim
        found = getattr(module, class_name)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"cannot be imported ({error}). Put its directory on PYTHONPATH on every host, or "
            f"correct the path."
        ) from None
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        raise ValueError("is not a class derived from torch.optim.Optimizer. Name one that is.")
    return found


def parameter_names(optimizer: type[torch.optim.Optimizer]) -> list[str]:
    """Return what an optimizer's constructor takes besides the parameters to optimise."""
    return list(signature(optimizer).parameters)[1:]


def takes_betas(name: str) -> bool:
    """Return whether an optimizer has betas; True for one that does not exist."""
    try:
        return "betas" in parameter_names(optimizer_class(name))
    except ValueError:
        return True


def is_elementwise(name: str, params: Mapping[str, Any]) -> bool:
    """Return whether steps on flat shards equal steps on the complete parameter.

    Args:
        params: of the constructor; "auto" means its default.

    Raises:
        ValueError, TypeError, RuntimeError: whatever the optimizer itself raises.
    """
    unsharded, _ = _stepped(name, params, shards=1)
    sharded, _ = _stepped(name, params, shards=2)
    return torch.allclose(unsharded, sharded, rtol=1e-6, atol=1e-7)


def num_moments(name: str, params: Mapping[str, Any]) -> int:
    """Return how many values an optimizer keeps per parameter value; 2 where it cannot be tried."""
    try:
        return _stepped(name, params, shards=1)[1]
    except (ValueError, TypeError, RuntimeError):
        return 2


def _stepped(name: str, params: Mapping[str, Any], shards: int) -> tuple[torch.Tensor, int]:
    """Return a matrix after three steps, (ROWS * COLUMNS,) float32, and the states per value."""
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(ROWS, COLUMNS, generator=generator)
    parts = list(matrix.flatten().chunk(shards)) if shards > 1 else [matrix]
    parameters = [nn.Parameter(part.clone()) for part in parts]
    kind = optimizer_class(name)
    given = {key: value for key, value in params.items() if value != "auto"}
    optimizer = kind(parameters, **{"lr": LEARNING_RATE, **given})
    for _ in range(STEPS):
        gradient = torch.randn(ROWS, COLUMNS, generator=generator)
        gradient[: ROWS // 2] *= 10  # so that the shards' norms differ
        gradients = gradient.flatten().chunk(shards) if shards > 1 else [gradient]
        for parameter, part in zip(parameters, gradients, strict=True):
            parameter.grad = part.clone()
        optimizer.step()
    states = [value for state in optimizer.state.values() for value in state.values()]
    moments = sum(isinstance(value, torch.Tensor) and value.numel() > 1 for value in states)
    stepped = torch.cat([parameter.detach().flatten() for parameter in parameters])
    return stepped, moments // shards
