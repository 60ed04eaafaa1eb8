"""Whether torch's own attention finds a fused kernel, or computes every score of a sequence.

`scaled_dot_product_attention` chooses by device, precision, width of a head, mask and dropout, and
falls back to plain products without a word: memory and time then grow with the square of the
sequence. So it is tried with the fused kernels alone, on a few tokens, before a run begins.
"""

import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig

TOKENS = 64


def plain_attention_notice(
    config: "PretrainedConfig", device: Any, dtype: "torch.dtype", *, document_mask: bool
) -> str | None:
    """Say that `sdpa` would have no fused kernel here, None if it has.

    Args:
        device, dtype: that the model computes on and in.
        document_mask: a mask is given, instead of none.
    """
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    text = config.get_text_config()
    heads = getattr(text, "num_attention_heads", None)
    if not heads:
        return None
    width = getattr(text, "head_dim", None) or text.hidden_size // heads
    dropout = float(getattr(text, "attention_dropout", 0.0) or getattr(text, "attn_pdrop", 0.0))
    made: dict[str, Any] = {"device": device, "dtype": dtype}
    query = torch.zeros(1, 2, TOKENS, width, **made, requires_grad=True)
    mask = torch.ones(1, 1, TOKENS, TOKENS, dtype=torch.bool, device=device).tril()
    fused = [
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.CUDNN_ATTENTION,
    ]
    try:
        with sdpa_kernel(fused), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's reasons, in several lines
            scaled_dot_product_attention(
                query,
                query,
                query,
                attn_mask=mask if document_mask else None,
                dropout_p=dropout,
                is_causal=not document_mask,
            )
    except RuntimeError:
        return (
            f"attention: sdpa has no fused kernel on {device} in {str(dtype).partition('.')[2]} "
            f"for heads {width} wide{', with dropout' if dropout else ''}"
            f"{', with a mask of documents' if document_mask else ''}: it computes all scores, "
            f"whose memory grows with the square of --seq_len"
        )
    return None
