"""`ChunkedHead`: an output head that computes token losses while storing one chunk of logits at a
time.

The class replaces that of the model's head in place and is called in the same way. So ZeRO-3's
module hooks, which gather the weight, and the hooks on its gradient work unchanged. Only
`token_losses` requests losses; any other call of the model returns logits. Must not depend on
batches, ZeRO or DeepSpeed.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from zerolm.engine import replaced


class ChunkedHead(nn.Linear):
    """A linear output head that returns losses instead of logits inside `computing_losses`.

    `install` converts a model's head in place; parameters, names and hooks do not change.
    """

    chunk_tokens: int
    ignore_index: int
    targets: torch.Tensor | None
    squares: bool

    @contextmanager
    def computing_losses(self, targets_BT: torch.Tensor, ignore_index: int) -> Iterator[None]:
        """Inside this context, the head returns float32 losses (B, T, 1), 0 where ignored, instead
        of logits (B, T, V).

        With `squares`, the result is (B, T, 2): the second value is log(Z)^2 (see
        `squared_log_partitions`).

        Args:
            targets_BT: int64 targets for the hidden states in the next call.
        """
        self.targets, self.ignore_index = targets_BT, ignore_index
        try:
            yield
        finally:
            self.targets = None

    @torch.compiler.disable  # a graph of the loop would keep all chunks in memory
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if self.targets is None:
            return super().forward(input)
        assert input.shape[:-1] == self.targets.shape, (input.shape, self.targets.shape)
        losses_NC = _ChunkedLosses.apply(
            input.flatten(0, -2),
            self.weight,
            self.bias,
            self.targets.flatten(),
            self.chunk_tokens,
            self.ignore_index,
            self.squares,
        )
        return losses_NC.view(*self.targets.shape, -1)


def install(model: Any, chunk_tokens: int, squares: bool = False) -> None:
    """Convert a model's head to a `ChunkedHead`; call before `deepspeed.initialize`.

    The model must be a causal LM for which `loss_chunks.unsupported_reason` is None. With
    `squares`, the head also returns each token's log(Z)^2.
    """
    head = model.get_output_embeddings()
    assert type(head) is nn.Linear, type(head)
    replaced.install(head, "__class__", ChunkedHead)  # keeps parameters, hooks and name
    vars(head).update(chunk_tokens=chunk_tokens, targets=None, squares=squares)


def find_chunked_head(model: Any) -> ChunkedHead | None:
    """Return a causal LM's chunked head, or None if the head is not chunked."""
    get_head = getattr(model, "get_output_embeddings", None)
    head = get_head() if get_head else None
    return head if isinstance(head, ChunkedHead) else None


class _ChunkedLosses(torch.autograd.Function):
    """Cross-entropy from a linear head's logits, which are recomputed in the backward pass.

    Saves only the hidden states and the weights. Matrix products use the unchunked head's dtype;
    softmax and the sum of weight gradients over chunks use float32.

    Source: the idea is from Liger (Hsu et al. 2024, arXiv 2410.10989, section 3.2). Liger computes
        the gradient in the forward pass; here that is impossible, because each token's loss has its
        own output gradient, known only in the backward pass.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: torch.Tensor,
        weight_VH: torch.Tensor,
        bias_V: torch.Tensor | None,
        targets_N: torch.Tensor,
        chunk_tokens: int,
        ignore_index: int,
        squares: bool,
    ) -> torch.Tensor:
        device_type = hidden_NH.device.type
        has_autocast = torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(
            device_type
        )
        ctx.dtype = torch.get_autocast_dtype(device_type) if has_autocast else None
        ctx.chunk_tokens, ctx.ignore_index = chunk_tokens, ignore_index
        # Save the parameters themselves: ZeRO-3 releases and regathers their values in between.
        losses_NC = hidden_NH.new_zeros((len(hidden_NH), 1 + squares), dtype=torch.float32)
        log_partitions_N = torch.zeros_like(losses_NC[:, 0]) if squares else None
        ctx.save_for_backward(hidden_NH, weight_VH, bias_V, targets_N, log_partitions_N)
        with _without_autocast(device_type):
            hidden_NH, weight_VH, bias_V = _cast(ctx.dtype, hidden_NH, weight_VH, bias_V)
            for chunk in _chunks(len(hidden_NH), chunk_tokens):
                logits_CV, targets_C = (
                    _logits(hidden_NH[chunk], weight_VH, bias_V),
                    targets_N[chunk],
                )
                losses_NC[chunk, 0] = functional.cross_entropy(
                    logits_CV.float(), targets_C, ignore_index=ignore_index, reduction="none"
                )
                if log_partitions_N is not None:
                    counted_C = targets_C != ignore_index
                    of_targets_C1 = logits_CV.gather(1, targets_C.where(counted_C, 0)[:, None])
                    sums_C = losses_NC[chunk, 0] + of_targets_C1[:, 0].float()
                    log_partitions_N[chunk] = sums_C.where(counted_C, 0.0)
                del logits_CV
        if log_partitions_N is not None:
            losses_NC[:, 1] = log_partitions_N.square()
        return losses_NC

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        gradient_N = gradients[0][:, 0]
        hidden_NH, weight_VH, bias_V, targets_N, log_partitions_N = ctx.saved_tensors
        softmax_grad_N = gradient_N  # for log Z, whose derivative is the softmax
        if log_partitions_N is not None:
            softmax_grad_N = gradient_N + 2 * log_partitions_N * gradients[0][:, 1]
        dtypes = [None if one is None else one.dtype for one in (hidden_NH, weight_VH, bias_V)]
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
                counted_C = targets_C != ctx.ignore_index
                loss_grad_C1 = torch.where(counted_C, gradient_N[chunk], 0)[:, None]
                logit_grad_CV = torch.softmax(logits_CV, -1, dtype=torch.float32)
                del logits_CV
                softmax_grad_C1 = torch.where(counted_C, softmax_grad_N[chunk], 0)[:, None]
                logit_grad_CV.mul_(softmax_grad_C1)
                logit_grad_CV.scatter_add_(1, targets_C.where(counted_C, 0)[:, None], -loss_grad_C1)
                logit_grad_CV = logit_grad_CV.to(dtype)
                if hidden is not None:
                    torch.mm(logit_grad_CV, weight_VH, out=hidden[chunk])
                if weight is not None and dtype == torch.float32:
                    weight.addmm_(logit_grad_CV.T, hidden_NH[chunk])
                elif weight is not None:
                    weight += logit_grad_CV.T @ hidden_NH[chunk]
                if bias is not None:
                    bias += logit_grad_CV.sum(0, dtype=torch.float32)
                del logit_grad_CV
        pairs = zip((hidden, weight, bias), dtypes, strict=True)
        cast = [None if one is None else one.to(dtype) for one, dtype in pairs]
        return (*cast, None, None, None, None)


def _without_autocast(device_type: str) -> AbstractContextManager[Any]:
    """Disable autocast, because `_cast` replaces it; the meta device has no autocast."""
    available = torch.amp.is_autocast_available(device_type)
    return torch.autocast(device_type, enabled=False) if available else nullcontext()


def _cast(dtype: torch.dtype | None, *tensors: torch.Tensor | None) -> Any:
    if dtype is None:
        return tensors
    return tuple(None if one is None else one.to(dtype) for one in tensors)


def _chunks(count: int, size: int) -> list[slice]:
    return [slice(start, start + size) for start in range(0, count, size)]


def _logits(
    hidden_CH: torch.Tensor, weight_VH: torch.Tensor, bias_V: torch.Tensor | None
) -> torch.Tensor:
    """Return the logits without `functional.linear`, which ZeRO-3 replaces."""
    if bias_V is None:
        return hidden_CH @ weight_VH.T
    return torch.addmm(bias_V, hidden_CH, weight_VH.T)
