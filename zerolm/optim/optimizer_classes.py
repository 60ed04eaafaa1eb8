"""Finds optimizers from torch or the user by name, and keeps the dtype of their states.

Must not depend on DeepSpeed or settings.
"""

import importlib
from functools import cache
from inspect import signature
from typing import Any

import torch


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


# -------------------------------------------------------------------------------------------------
# The dtype of states


def preserve_state_dtypes(optimizer: torch.optim.Optimizer) -> None:
    """Make an optimizer keep the dtype of each state that it loads, permanently.

    torch 2.13 casts every loaded state but `step` to the parameter's dtype, so a bfloat16 momentum
    would go on as float32 after a resume, and a float64 or integer state would lose bits.
    """
    saved: dict[str, Any] = {}

    def before(_: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        saved.update(state_dict)

    def after(loaded: torch.optim.Optimizer) -> None:
        numbers = [number for group in saved["param_groups"] for number in group["params"]]
        parameters = [each for group in loaded.param_groups for each in group["params"]]
        for number, parameter in zip(numbers, parameters, strict=True):
            for key, value in saved["state"].get(number, {}).items():
                loaded.state[parameter][key] = _as_saved(loaded.state[parameter][key], value)
        saved.clear()

    try:
        optimizer.register_load_state_dict_pre_hook(before)
        optimizer.register_load_state_dict_post_hook(after)
    except AttributeError:  # of the dictionaries of hooks
        raise TypeError(
            "its constructor does not call torch.optim.Optimizer.__init__(), as wrappers of another"
            " optimizer do not; name the optimizer that it wraps, or call it"
        ) from None


def _as_saved(loaded: Any, saved: Any) -> Any:
    """Return a loaded state with the dtypes that it was saved with."""
    if isinstance(saved, torch.Tensor):
        return loaded if loaded.dtype == saved.dtype else saved.to(loaded.device)
    if isinstance(saved, dict):
        return {key: _as_saved(loaded[key], value) for key, value in saved.items()}
    if isinstance(saved, (list, tuple)):
        return type(saved)(map(_as_saved, loaded, saved))
    return loaded
