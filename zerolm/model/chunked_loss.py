"""An output head that gives the loss of each token, a few tokens' logits at a time.

It takes the place of the model's own head inside the model, and is called where that was: so the
module hooks by which ZeRO-3 gathers a weight, and the hooks on its one gradient, see what they saw.
Only `loss.token_losses` asks it for losses; whoever else calls the model gets logits. It must not
know about batches, ZeRO or DeepSpeed.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn import functional


class ChunkedHead(nn.Linear):
    """A linear output head that computes losses instead of logits, while it is told the targets.

    Made from a model's head by `install`; parameters, names and hooks stay those of the head.
    """

    chunk_tokens: int
    ignored: int
    targets: torch.Tensor | None

    @contextmanager
    def gives_losses(self, targets_BT: torch.Tensor, ignored: int) -> Iterator[None]:
        """Give losses, (B, T, 1) float32 and 0 where ignored, in place of logits (B, T, V).

        Args:
            targets_BT: int64, those of the hidden states that the head will be called with.
            ignored: the target of a position without a loss.
        """
        self.targets, self.ignored = targets_BT, ignored
        try:
            yield
        finally:
            self.targets = None

    @torch.compiler.disable  # a loop over chunks, whose graph would hold them all
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if self.targets is None:
            return super().forward(input)
        assert input.shape[:-1] == self.targets.shape, (input.shape, self.targets.shape)
        losses_N = _ChunkedLosses.apply(
            input.flatten(0, -2),
            self.weight,
            self.bias,
            self.targets.flatten(),
            self.chunk_tokens,
            self.ignored,
        )
        return losses_N.view(*self.targets.shape, 1)


def install(model: Any, chunk_tokens: int) -> None:
    """Let a model's head compute losses in chunks of so many tokens; before DeepSpeed gets it.

    Args:
        model: a causal LM without an obstacle (`obstacle`).
    """
    head = model.get_output_embeddings()
    assert type(head) is nn.Linear, type(head)
    head.__class__ = ChunkedHead  # the same parameters, hooks and name
    vars(head).update(chunk_tokens=chunk_tokens, targets=None)


def head_of(model: Any) -> ChunkedHead | None:
    """Return the chunked head of a causal LM, None if it has none."""
    find = getattr(model, "get_output_embeddings", None)
    head = find() if find else None
    return head if isinstance(head, ChunkedHead) else None


class _ChunkedLosses(torch.autograd.Function):
    """Cross-entropies of a linear head's logits, which are computed again for their gradient.

    Saves hidden states and weights alone. Products are in the dtype in which the head itself would
    make them, softmax and the sum of the weight's gradient over the chunks in float32.

    Source: the idea is that of Liger (Hsu et al. 2024, arXiv 2410.10989, 3.2), but with the chunks
        computed again instead of the gradient in the forward pass, since each token's loss has a
        gradient of its own, which is only known in the backward pass.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: torch.Tensor,
        weight_VH: torch.Tensor,
        bias_V: torch.Tensor | None,
        targets_N: torch.Tensor,
        chunk_tokens: int,
        ignored: int,
    ) -> torch.Tensor:
        kind = hidden_NH.device.type
        casts = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
        ctx.dtype = torch.get_autocast_dtype(kind) if casts else None
        ctx.chunk_tokens, ctx.ignored = chunk_tokens, ignored
        # The parameters themselves, whose values ZeRO-3 lets go and gathers again in between.
        ctx.save_for_backward(hidden_NH, weight_VH, bias_V, targets_N)
        losses_N = hidden_NH.new_empty(len(hidden_NH), dtype=torch.float32)
        with _without_autocast(kind):
            hidden_NH, weight_VH, bias_V = _cast(ctx.dtype, hidden_NH, weight_VH, bias_V)
            for chunk in _chunks(len(hidden_NH), chunk_tokens):
                losses_N[chunk] = functional.cross_entropy(
                    _logits(hidden_NH[chunk], weight_VH, bias_V).float(),
                    targets_N[chunk],
                    ignore_index=ignored,
                    reduction="none",
                )
        return losses_N

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        gradient_N = gradients[0]
        hidden_NH, weight_VH, bias_V, targets_N = ctx.saved_tensors
        own = [None if one is None else one.dtype for one in (hidden_NH, weight_VH, bias_V)]
        for_hidden, for_weight, for_bias = ctx.needs_input_grad[:3]
        with _without_autocast(hidden_NH.device.type):
            hidden_NH, weight_VH, bias_V = _cast(ctx.dtype, hidden_NH, weight_VH, bias_V)
            hidden = torch.empty_like(hidden_NH) if for_hidden else None
            weight = torch.zeros_like(weight_VH, dtype=torch.float32) if for_weight else None
            bias = torch.zeros_like(bias_V, dtype=torch.float32) if for_bias else None
            for chunk in _chunks(len(hidden_NH), ctx.chunk_tokens):
                logits_CV = _logits(hidden_NH[chunk], weight_VH, bias_V)
                dtype = logits_CV.dtype
                targets_C = targets_N[chunk]
                counted_C = targets_C != ctx.ignored
                scale_C1 = torch.where(counted_C, gradient_N[chunk], 0)[:, None]
                slope_CV = torch.softmax(logits_CV, -1, dtype=torch.float32)
                del logits_CV
                slope_CV.mul_(scale_C1)
                slope_CV.scatter_add_(1, targets_C.where(counted_C, 0)[:, None], -scale_C1)
                slope_CV = slope_CV.to(dtype)
                if hidden is not None:
                    torch.mm(slope_CV, weight_VH, out=hidden[chunk])
                if weight is not None and dtype == torch.float32:
                    weight.addmm_(slope_CV.T, hidden_NH[chunk])
                elif weight is not None:
                    weight += slope_CV.T @ hidden_NH[chunk]
                if bias is not None:
                    bias += slope_CV.sum(0, dtype=torch.float32)
                del slope_CV
        found = (hidden, weight, bias)
        cast = [None if one is None else one.to(kind) for one, kind in zip(found, own, strict=True)]
        return (*cast, None, None, None)


def _without_autocast(kind: str) -> AbstractContextManager[Any]:
    """Leave the casts to us; the meta device, on which models are looked at, has none."""
    has_it = torch.amp.is_autocast_available(kind)
    return torch.autocast(kind, enabled=False) if has_it else nullcontext()


def _cast(dtype: torch.dtype | None, *tensors: torch.Tensor | None) -> Any:
    if dtype is None:
        return tensors
    return tuple(None if one is None else one.to(dtype) for one in tensors)


def _chunks(count: int, size: int) -> list[slice]:
    return [slice(start, start + size) for start in range(0, count, size)]


def _logits(
    hidden_CH: torch.Tensor, weight_VH: torch.Tensor, bias_V: torch.Tensor | None
) -> torch.Tensor:
    """A plain product: `functional.linear` is another function under ZeRO-3."""
    if bias_V is None:
        return hidden_CH @ weight_VH.T
    return torch.addmm(bias_V, hidden_CH, weight_VH.T)
