"""Attention in compiled blocks on a CPU: torch's forward pass with a custom backward pass.

In 16 bits, torch's CPU backward pass takes most of the attention time, because its routine for
small products is slow. Here the products are batched over chunks of keys, and the compiler fuses
the operations between products. The backward pass needs the same saved tensors, and results differ
only by rounding.
"""

from typing import Any

import torch

MIN_CHUNK = 128  # number of keys; products with fewer keys are slower
MAX_CHUNKS = 8  # each chunk adds code to the graph
# Ratio of torch's CPU time to this function's in bf16: 1.62 for sequences of 512 tokens, 1.20 for
# 1,024, 1.07 for 2,048; longer sequences were not measured. In float32: 0.84 to 0.94 for 256 to
# 2,048. (benchmarks/README.md, an Intel Xeon at 2.8 GHz, torch 2.13, 2026-11-23)
MAX_TOKENS = 2048
DTYPES = (torch.bfloat16, torch.float16)


def install() -> None:
    """From now on, use this attention when transformers calls `sdpa` in compiled code."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS["sdpa"] = attention


def attention(
    module: Any,
    query_BHTD: torch.Tensor,
    key_BGTD: torch.Tensor,
    value_BGTD: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: torch.Tensor | None = None,
    softcap: float | None = None,
    **more: Any,
) -> tuple[torch.Tensor, None]:
    """Compute the same as transformers' function for `sdpa`, which takes the same arguments."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if not (
        # evaluations are not compiled, and their results must not change
        torch.compiler.is_compiling()
        and causal
        and attention_mask is None
        and position_bias is None
        and softcap is None
        and dropout == 0.0
        and not torch.is_autocast_enabled("cpu")  # autocast casts the inputs of torch's function
        and query_BHTD.device.type == "cpu"
        and query_BHTD.dtype in DTYPES
        and query_BHTD.shape[2] == key_BGTD.shape[2] <= MAX_TOKENS
        and query_BHTD.shape[3] == value_BGTD.shape[3]  # the kernel supports only this case
    ):
        return sdpa_attention_forward(
            module, query_BHTD, key_BGTD, value_BGTD, attention_mask,
            dropout=dropout, scaling=scaling, is_causal=is_causal, position_bias=position_bias,
            softcap=softcap, **more,
        )  # fmt: skip
    groups = query_BHTD.shape[1] // key_BGTD.shape[1]
    if groups > 1:
        key_BGTD = key_BGTD.repeat_interleave(groups, 1)
        value_BGTD = value_BGTD.repeat_interleave(groups, 1)
    scaling = query_BHTD.shape[3] ** -0.5 if scaling is None else scaling
    output_BHTD = _CausalAttention.apply(query_BHTD, key_BGTD, value_BGTD, scaling)
    return output_BHTD.transpose(1, 2).contiguous(), None


class _CausalAttention(torch.autograd.Function):
    """Softmax attention of each position to itself and earlier positions, for compiled code.

    Source: Dao et al. 2022 (FlashAttention, arXiv 2205.14135), appendix B.2.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query_BHTD: torch.Tensor,
        key_BHTD: torch.Tensor,
        value_BHTD: torch.Tensor,
        scaling: float,
    ) -> torch.Tensor:
        output_BHTD, log_sum_BHT = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query_BHTD, key_BHTD, value_BHTD, is_causal=True, scale=scaling
        )
        ctx.save_for_backward(query_BHTD, key_BHTD, value_BHTD, output_BHTD, log_sum_BHT)
        ctx.scaling = scaling
        return output_BHTD

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        grad_BHTD = gradients[0]
        query_BHTD, key_BHTD, value_BHTD, output_BHTD, log_sum_BHT = ctx.saved_tensors
        dtype, tokens = query_BHTD.dtype, query_BHTD.shape[2]
        size = max(MIN_CHUNK, -(-tokens // MAX_CHUNKS))
        mean_BHT = (grad_BHTD.float() * output_BHTD.float()).sum(-1)
        query_grad_BHTD = torch.zeros_like(query_BHTD, dtype=torch.float32)
        key_grads, value_grads = [], []
        for start in range(
            0, tokens, size
        ):  # keys of a chunk (K), and queries that attend to them (Q)
            end = min(tokens, start + size)
            query_BHQD, grad_BHQD = query_BHTD[:, :, start:], grad_BHTD[:, :, start:]
            key_BHKD, value_BHKD = key_BHTD[:, :, start:end], value_BHTD[:, :, start:end]
            # In float32: rounding large scores to 16 bits would change their weights by several
            # percent.
            scores_BHKQ = key_BHKD.float() @ query_BHQD.float().transpose(2, 3) * ctx.scaling
            allowed_KQ = torch.arange(start, tokens) >= torch.arange(start, end)[:, None]
            weights_BHKQ = (scores_BHKQ - log_sum_BHT[:, :, None, start:]).exp()
            weights_BHKQ = weights_BHKQ.where(allowed_KQ, 0.0)
            value_grads.append(weights_BHKQ.to(dtype) @ grad_BHQD)
            weight_grads_BHKQ = (value_BHKD @ grad_BHQD.transpose(2, 3)).float()
            centered_BHKQ = weight_grads_BHKQ - mean_BHT[:, :, None, start:]
            score_grads_BHKQ = (weights_BHKQ * centered_BHKQ * ctx.scaling).to(dtype)
            key_grads.append(score_grads_BHKQ @ query_BHQD)
            of_chunk_BHQD = (score_grads_BHKQ.transpose(2, 3) @ key_BHKD).float()
            padding = (0, 0, start, 0)
            query_grad_BHTD = query_grad_BHTD + torch.nn.functional.pad(of_chunk_BHQD, padding)
        return query_grad_BHTD.to(dtype), torch.cat(key_grads, 2), torch.cat(value_grads, 2), None
