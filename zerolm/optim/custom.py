"""Finds optimizers from torch or the user by name, and tests whether they work on shards.

ZeRO passes an optimizer flat shards that contain parts of several parameters, so only elementwise
updates produce the same loss curve at every world size. Must not depend on DeepSpeed or settings.
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
GRADIENT_SCALES = (1e-4, 1.0, 1e4)
TOLERANCE = 1e-5  # relative to the largest update; elementwise updates do not differ at all


def is_dotted(name: str) -> bool:
    """Return whether a name is a dotted path such as `my_package.optimizers.SignSGD`."""
    return "." in name


@cache
def optimizer_class(name: str) -> type[torch.optim.Optimizer]:
    """Return the optimizer class with a given name in `torch.optim`, or at a dotted path.

    Raises:
        ValueError: there is no such optimizer class; the message states the rule and the fix.
    """
    module_name, _, class_name = name.rpartition(".")
    try:
        module = importlib.import_module(module_name) if module_name else torch.optim
        found = getattr(module, class_name)
    except Exception as error:  # the user's module may raise any exception
        raise ValueError(
            f"cannot be imported ({type(error).__name__}: {error}). Correct it, or put its "
            f"directory on PYTHONPATH on every host."
        ) from None
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        raise ValueError("is not a class derived from torch.optim.Optimizer. Name one that is.")
    return found


def parameter_names(optimizer: type[torch.optim.Optimizer]) -> list[str] | None:
    """Return the names of an optimizer's constructor arguments after the first, or None if the
    constructor accepts any keyword.
    """
    parameters = list(signature(optimizer).parameters.values())[1:]
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return [parameter.name for parameter in parameters]


def takes_betas(name: str) -> bool:
    """Return whether an optimizer takes `betas`; True if the optimizer cannot be found."""
    try:
        names = parameter_names(optimizer_class(name))
        return names is not None and "betas" in names
    except ValueError:
        return True


def is_elementwise(name: str, params: Mapping[str, Any]) -> bool:
    """Return whether a few trial steps on flat shards match steps on the complete parameter.

    The trial uses tiny, typical and huge gradients, since some update rules behave
    differently beyond a threshold. A successful trial is not a proof.

    Args:
        params: constructor arguments; "auto" means the default.

    Raises:
        ValueError, TypeError, RuntimeError: whatever the optimizer itself raises.
    """
    for scale in GRADIENT_SCALES:
        unsharded, _ = _updates(name, params, shards=1, scale=scale)
        sharded, _ = _updates(name, params, shards=2, scale=scale)
        if not torch.all((unsharded - sharded).abs() <= TOLERANCE * unsharded.abs().max()):
            return False
    return True


def num_moments(name: str, params: Mapping[str, Any]) -> int:
    """Return how many values an optimizer stores per parameter value; 2 if a trial fails."""
    try:
        return _updates(name, params, shards=1)[1]
    except (ValueError, TypeError, RuntimeError):
        return 2


def _updates(
    name: str, params: Mapping[str, Any], shards: int, scale: float = 1.0
) -> tuple[torch.Tensor, int]:
    """Return the change of the values after a few steps, as float32 of shape (ROWS * COLUMNS,), and
    the number of state values per parameter value.
    """
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(ROWS, COLUMNS, generator=generator)
    parts = list(matrix.flatten().chunk(shards)) if shards > 1 else [matrix]
    parameters = [nn.Parameter(part.clone()) for part in parts]
    kind = optimizer_class(name)
    given = {key: value for key, value in params.items() if value != "auto"}
    # The JSON's learning rate may be too small for visible updates.
    optimizer = kind(parameters, **{**given, "lr": LEARNING_RATE})
    for _ in range(STEPS):
        gradient = scale * torch.randn(ROWS, COLUMNS, generator=generator)
        gradient[: ROWS // 2] *= 10  # so the shards' norms differ
        gradients = gradient.flatten().chunk(shards) if shards > 1 else [gradient]
        for parameter, part in zip(parameters, gradients, strict=True):
            parameter.grad = part.clone()
        optimizer.step()
    states = [value for state in optimizer.state.values() for value in state.values()]
    moments = sum(isinstance(value, torch.Tensor) and value.numel() > 1 for value in states)
    stepped = torch.cat([parameter.detach().flatten() for parameter in parameters])
    return stepped - matrix.flatten(), moments // shards
