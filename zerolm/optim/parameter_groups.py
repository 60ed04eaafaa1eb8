"""Splits parameters into optimizer groups with and without weight decay, and sets their options.

The optimizer itself is DeepSpeed's, named in the DeepSpeed JSON.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from zerolm.engine.experts import group_options, is_divided
from zerolm.engine.parameters import full_shape, num_values

# Torch layers whose parameters decay if they have at least two dimensions.
MATRIX_MODULES = (nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d)
# Parameters in other modules, by the last part of their name: biases of any shape (fused experts:
# (experts, width); Griffin's gates: (heads, width)); parameters that state-space models exclude
# (A_log, D, dt_bias: mamba-ssm's `_no_weight_decay`); and RWKV's mixing coefficients and decays
# (`time_*`: its own training code decays only matrices).
NOT_DECAYED = re.compile(r"bias|norm|^(A_log|D|scale)$|^time_")
SHOWN_KINDS = 12


def parameter_groups(
    model: nn.Module,
    weight_decay: float,
    options: Mapping[str, float] = MappingProxyType({}),
    factors: Mapping[str, Mapping[str, float]] = MappingProxyType({}),
) -> list[dict[str, Any]]:
    """Split the trainable parameters into groups by their optimizer options.

    Without factors, there are at most two groups: with and without weight decay; if experts are
    divided over ranks, they have groups of their own.

    Args:
        weight_decay: weight decay of the parameters that decay; it is 0 for the others.
        options: {optimizer option: value}.
        factors: {parameter name: {option or "weight_decay": factor}}, given for all parameters or
            none.

    Returns:
        Groups for `deepspeed.initialize(model_parameters=...)`; groups with weight decay come
        first.
    """
    base = {**options, "weight_decay": weight_decay}
    groups: dict[Any, dict[str, Any]] = {}
    for name, parameter in model.named_parameters():  # tied weights appear once
        if not parameter.requires_grad:
            continue
        scaled = factors[name] if factors else {}
        own = {key: base[key] * factor for key, factor in scaled.items()}
        changed = {key: value for key, value in own.items() if value != base[key]}
        decayed = decays(model, name)
        changed["weight_decay"] = own.get("weight_decay", weight_decay) if decayed else 0.0
        if is_divided(parameter):  # DeepSpeed reduces these over other ranks
            changed |= group_options(parameter)
        group = groups.setdefault((not decayed, *sorted(changed.items())), {"params": []})
        group |= changed
        group["params"].append(parameter)
    return [groups[key] for key in sorted(groups, key=lambda key: key[0])]


def decays(model: nn.Module, name: str) -> bool:
    """Return whether weight decay applies to a parameter; it applies to matrices and embeddings.

    The module's type decides: norms of all classes are excluded. Parameters outside torch layers,
    such as fused experts, decay if they are matrices. Multi-dimensional biases and parameters that
    an architecture's authors exclude do not.

    Args:
        name: name of a parameter in `model`.
    """
    path, _, leaf = name.rpartition(".")
    module, parameter = model.get_submodule(path), model.get_parameter(name)
    shape = full_shape(parameter)  # a partitioned parameter is one-dimensional
    if len(shape) < 2 or getattr(parameter, "_no_weight_decay", False):  # set by mamba-ssm
        return False
    if isinstance(module, MATRIX_MODULES) or type(module).__name__ == "Conv1D":
        return True
    if "norm" in type(module).__name__.lower() or NOT_DECAYED.search(leaf):
        return False
    return sum(size > 1 for size in shape) > 1  # a vector with shape (1, 1, N) is not a matrix


def describe_groups(model: nn.Module, weight_decay: float) -> str:
    """Return a line with the numbers of decayed, undecayed and frozen parameters."""
    tensors: dict[str, int] = {}
    values: dict[str, int] = {}
    kinds: dict[str, None] = {}
    for name, parameter in model.named_parameters():
        group = "decayed" if decays(model, name) else "not decayed"
        if not parameter.requires_grad:
            group = "frozen"
        tensors[group] = tensors.get(group, 0) + 1
        values[group] = values.get(group, 0) + num_values(parameter)
        if group == "not decayed":
            parts = [part for part in name.split(".") if not part.isdigit()]
            kinds[".".join(parts[-2:])] = None

    def count(group: str) -> str:
        return f"{tensors.get(group, 0)} tensors with {values.get(group, 0):,} values"

    names = ", ".join(list(kinds)[:SHOWN_KINDS])
    more = f", and {len(kinds) - SHOWN_KINDS} more" if len(kinds) > SHOWN_KINDS else ""
    line = f"weight decay {weight_decay:g}: {count('decayed')}; none: {count('not decayed')}"
    line += f" ({names}{more})" if kinds else ""
    return line + (f"; frozen: {count('frozen')}" if "frozen" in tensors else "")


@contextmanager
def keeping_options(optimizer: torch.optim.Optimizer, names: Collection[str]) -> Iterator[None]:
    """Inside this context, in which states are loaded, preserve this run's options, such as weight
    decay.

    torch's `load_state_dict` replaces each group's options with those in the checkpoint.

    Args:
        optimizer: the optimizer that ZeRO wraps.
        names: options to keep. Other options may be states that a custom optimizer stores among its
            options.
    """
    kept = [
        {name: group[name] for name in names if name in group} for group in optimizer.param_groups
    ]
    yield
    for group, options in zip(optimizer.param_groups, kept, strict=True):
        group.update(options)
