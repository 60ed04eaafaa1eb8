"""Weight-decay groups, and the options of each group.

The optimizer itself is DeepSpeed's, named in the ds config.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from zerolm.engine.parameters import full_shape, num_values

# Layers of torch whose parameters decay if they have at least two dimensions.
MATRIX_MODULES = (nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d)
# Parameters of other modules, by the last part of their name: biases of any shape (of fused experts
# (experts, width), of the gates of Griffin (heads, width)); what state-space models exclude (A_log,
# D, dt_bias: mamba-ssm's `_no_weight_decay`), and the mixing coefficients and decays of RWKV
# (`time_*`: its own training code decays matrices only).
NOT_DECAYED = re.compile(r"bias|norm|^(A_log|D|scale)$|^time_")
SHOWN_KINDS = 12


def parameter_groups(
    model: nn.Module,
    weight_decay: float,
    options: Mapping[str, float] = MappingProxyType({}),
    factors: Mapping[str, Mapping[str, float]] = MappingProxyType({}),
) -> list[dict[str, Any]]:
    """Split the trainable parameters by the options of the optimizer that they train with.

    Without factors there are at most two groups: with weight decay, and without.

    Args:
        weight_decay: decay of the parameters that decay; others have 0.
        options: {option of the optimizer: value}.
        factors: {parameter name: {option or "weight_decay": factor}}, for all parameters or none.

    Returns:
        Groups for `deepspeed.initialize(model_parameters=...)`, first those that decay.
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
        group = groups.setdefault((not decayed, *sorted(changed.items())), {"params": []})
        group |= changed
        group["params"].append(parameter)
    return [groups[key] for key in sorted(groups, key=lambda key: key[0])]


def decays(model: nn.Module, name: str) -> bool:
    """Return whether a parameter gets weight decay: matrices and embeddings do.

    Decided by the type of its module: norms of any class are excluded. Parameters that are not the
    weight of a layer of torch decay if they are matrices, such as those of fused experts, but not
    biases of more dimensions, and not what the authors of an architecture exclude.

    Args:
        name: names a parameter of `model`.
    """
    path, _, leaf = name.rpartition(".")
    module, parameter = model.get_submodule(path), model.get_parameter(name)
    shape = full_shape(parameter)  # a partitioned parameter is one-dimensional
    if len(shape) < 2 or getattr(parameter, "_no_weight_decay", False):  # a mark of mamba-ssm
        return False
    if isinstance(module, MATRIX_MODULES) or type(module).__name__ == "Conv1D":
        return True
    if "norm" in type(module).__name__.lower() or NOT_DECAYED.search(leaf):
        return False
    return sum(size > 1 for size in shape) > 1  # a vector of shape (1, 1, N) is no matrix


def describe_groups(model: nn.Module, weight_decay: float) -> str:
    """Return one line: what decays, what does not, and what is frozen, with numbers."""
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
    """Keep options of this run, such as the weight decay, while states are loaded in this context.

    torch's `load_state_dict` replaces the options of each group by those in the checkpoint.

    Args:
        optimizer: the one inside ZeRO's optimizer.
        names: options to keep. Others may be states, which optimizers of users keep there.
    """
    kept = [
        {name: group[name] for name in names if name in group} for group in optimizer.param_groups
    ]
    yield
    for group, options in zip(optimizer.param_groups, kept, strict=True):
        group.update(options)
