"""Divides the experts of a mixture over neighbouring ranks, which exchange tokens.

transformers stores a layer's experts in fused tensors, whose first dimension is the expert. Each
rank keeps its slice of these tensors under their names, and everything else of the model. In each
layer a rank sends every token to the ranks that have its experts, which multiply all tokens that
they receive and send the results back. transformers' public table of experts functions gets one
entry, so the model's own code routes tokens and calls it.

The exchange is ours and not `AllToAllEP` of `transformers.distributed.expert_parallel`, which needs
that model's parallel plan (DTensors, which DeepSpeed 0.19.8 refuses) to be applied and is newer
than the oldest transformers that this project supports. The product is transformers' own grouped
one, and results are summed in its order, so losses differ only by rounding. Must not depend on
DeepSpeed's engine or on the training loop.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import distributed as dist
from torch import nn

from zerolm.common.values import shown_bytes
from zerolm.engine import experts
from zerolm.engine.parameters import full_shape, replace
from zerolm.model.compile import UNCOMPILED

IMPLEMENTATION = "zerolm_expert_parallel"  # in transformers' table of experts functions
# Sends rows, given their numbers for each rank of the group and those arriving from each; without
# numbers, as many to each as from each. Returns the rows that arrive, by source.
Exchange = Callable[[torch.Tensor, Sequence[int], Sequence[int]], torch.Tensor]


def expert_modules(model: nn.Module) -> dict[str, Any]:
    """Return {name: module} for the modules of fused experts that transformers can dispatch."""
    return {
        name: module
        for name, module in model.named_modules()
        if hasattr(module, "_is_expert_parallel") and _fused(module)
    }


def expert_parameters(model: nn.Module) -> list[str]:
    """Return the names of the parameters that are divided."""
    found = expert_modules(model).items()
    return [f"{path}.{leaf}" for path, module in found for leaf in module._parameters]


def _fused(module: Any) -> bool:
    """Return whether the first dimension of each of a module's parameters is the expert."""
    number = getattr(module, "num_experts", 0) * getattr(module, "zerolm_degree", 1)
    shapes = [full_shape(each) for each in module._parameters.values() if each is not None]
    return bool(shapes) and all(each[0] == number for each in shapes)


def divide(model: Any, degree: int, exchange: Exchange | None = None) -> None:
    """Keep a slice of the experts, uninitialized, and exchange tokens from now on.

    The tensors of all experts, which are uninitialized too, are never touched, so that on a CPU
    they never take memory. Every rank must call this before values are set.

    Args:
        degree: number of ranks in an expert group, which divides the number of experts.
        exchange: used in place of this rank's expert group.
    """
    _register()
    for module in expert_modules(model).values():
        module.num_experts //= degree
        module.zerolm_degree, module.zerolm_rows = degree, 0  # rows of the last forward pass
        module.zerolm_exchange = exchange or partial(_all_to_all, degree)
        module.config._experts_implementation = IMPLEMENTATION
        for leaf, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            number, *others = full_shape(parameter)
            values = parameter.new_empty((number // degree, *others))
            own = nn.Parameter(values, requires_grad=parameter.requires_grad)
            experts.mark(own, degree)
            replace(parameter, own)
            module._parameters[leaf] = own


def _register() -> None:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, exchanged)


def _all_to_all(
    degree: int, rows: torch.Tensor, sent: Sequence[int] = (), received: Sequence[int] = ()
) -> torch.Tensor:
    found = rows.new_empty((sum(received) if received else len(rows), *rows.shape[1:]))
    group = experts.expert_group(degree)
    dist.all_to_all_single(found, rows, [*received], [*sent], group=group)
    return found


class _Exchanged(torch.autograd.Function):
    """Sends rows to the ranks of a group, and their gradients back."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, sent: list[int], received: list[int], exchange: Exchange
    ) -> torch.Tensor:
        ctx.arguments = received, sent, exchange
        return exchange(rows.contiguous(), sent, received)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        received, sent, exchange = ctx.arguments
        return exchange(gradient.contiguous(), received, sent), None, None, None


@partial(torch.compiler.disable, reason=UNCOMPILED)
def exchanged(
    self: Any, hidden_NH: torch.Tensor, chosen_NK: torch.Tensor, weights_NK: torch.Tensor
) -> torch.Tensor:
    """Return the weighted sum of each token's experts, as transformers' own experts functions do.

    Called by a module of experts as its `forward`. Every rank of the expert group must call this;
    each has its own number of tokens N. Waits for the device twice, for the numbers of rows. With
    `--compile`, a block is compiled in two parts, before and after this function.
    """
    from transformers.integrations.moe import grouped_mm_experts_forward

    degree, local, exchange = self.zerolm_degree, self.num_experts, self.zerolm_exchange
    flat = chosen_NK.reshape(-1)
    order = torch.argsort(flat, stable=True)
    numbers = torch.arange(degree * local, device=flat.device)
    counts = torch.searchsorted(flat[order], numbers, right=True).diff(prepend=numbers[:1])
    arriving = exchange(counts, (), ())  # by source, then by local expert
    sent, received = torch.stack([counts, arriving]).view(2, degree, local).sum(2).tolist()
    self.zerolm_rows = sum(received)
    try:
        rows = _Exchanged.apply(hidden_NH[order // chosen_NK.shape[1]], sent, received, exchange)
        experts_of_rows = numbers[:local].repeat(degree).repeat_interleave(arriving)
        ones = rows.new_ones(len(rows), 1)
        products = grouped_mm_experts_forward(self, rows, experts_of_rows[:, None], ones)
    except torch.OutOfMemoryError as error:
        vars(error)["__notes__"] = [_load(self.zerolm_rows, hidden_NH, len(flat))]
        raise
    returned = _Exchanged.apply(products, received, sent, exchange)
    of_slots = torch.empty_like(order)
    of_slots[order] = torch.arange(len(order), device=order.device)
    each_NKH = returned[of_slots].view(*chosen_NK.shape, -1)
    return (each_NKH * weights_NK[..., None]).sum(1).to(hidden_NH.dtype)


def _load(rows: int, hidden_NH: torch.Tensor, usual: int) -> str:
    """Describe the rows that this rank got in a layer in which it ran out of memory."""
    size = rows * hidden_NH.shape[1] * hidden_NH.element_size()
    return (
        f"In a layer with divided experts, this rank's experts got {rows:,} tokens of "
        f"{shown_bytes(size)}, {rows / max(1, usual):.2f} times as many as its own sequences have "
        f"there: a smaller micro-batch or better balanced experts need less"
    )
