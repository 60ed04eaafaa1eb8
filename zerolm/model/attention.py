"""Whether a FlashAttention kernel can train a model here, with what it would not do silently.

Transformers warns, or falls back to another kernel, where this refuses. What each version takes is
read from its source: Dao-AILab/flash-attention at 0251105a (August 2026), `flash_attn/`, `hopper/`
and `flash_attn/cute/interface.py`. Used by `model`; knows nothing of settings.
"""

import warnings
from typing import TYPE_CHECKING, Any

import torch

from zerolm.model.architecture import causal_lm_class

if TYPE_CHECKING:
    from transformers import PretrainedConfig

NAMES = {f"flash_attention_{version}": version for version in (2, 3, 4)}
PACKAGES = {2: "flash-attn", 3: "flash-attn-3", 4: "flash-attn-4"}
WIDEST_HEAD = 256
# Version 4 has a forward pass for 8.x as well, but no backward pass (`_flash_attn_bwd`).
CARDS = {3: {9}, 4: {9, 10, 11, 12}}
PROBE_TOKENS = 64
DROPOUT_KEYS = ("attention_dropout", "attn_pdrop")


def obstacle(
    config: "PretrainedConfig", implementation: str, device_type: str, dtype: torch.dtype
) -> str | None:
    """Say why a FlashAttention cannot train this model here, and what would; None if it can.

    Args:
        implementation: one of `NAMES`.
    """
    version, model_class = NAMES[implementation], causal_lm_class(config)
    if not model_class._supports_flash_attn:
        return f"is not supported by {model_class.__name__}. Use auto."
    if device_type != "cuda" or not torch.cuda.is_available():
        return f"needs a CUDA device, this run is on {device_type}. Use auto."
    if dtype not in (torch.bfloat16, torch.float16):
        name = str(dtype).removeprefix("torch.")
        return (
            f"needs bf16 or fp16, this run is in {name}. Enable bf16 in the ds config, or use auto."
        )
    # ROCm's numbers of cards are others; AMD's build is of version 2.
    major = 8 if torch.version.hip else torch.cuda.get_device_capability()[0]
    if why := card_obstacle(version, major) or model_obstacle(config, implementation, major):
        return f"{why} Use sdpa or auto."
    if not _is_installed(version):
        return (
            f"needs the package {PACKAGES[version]}, which is not installed. Install it, or use "
            f"auto."
        )
    return None


def card_obstacle(version: int, major: int) -> str | None:
    """Say why a card, by the first number of its compute capability, cannot train with it."""
    if version == 2:
        return None if major >= 8 else "needs compute capability 8.0 or higher."
    if major in CARDS[version] and not torch.version.hip:
        return None
    if version == 3:
        return "needs a Hopper GPU (compute capability 9.x)."
    return "needs a Hopper or Blackwell GPU (compute capability 9.x to 12.x)."


def model_obstacle(config: "PretrainedConfig", implementation: str, major: int) -> str | None:
    """Say what of a model the kernel does not compute, or not as the model says."""
    version, text = NAMES[implementation], config.get_text_config()
    model_class: Any = causal_lm_class(config)
    # Transformers takes the first of these instead, from the hub, with a warning.
    known = getattr(model_class, "_compatible_flash_implementations", None)
    if known is not None and implementation not in known:
        return f"is not among the kernels of {model_class.__name__} ({', '.join(known)})."
    if version > 2:  # they have none, and transformers leaves it out
        for key in DROPOUT_KEYS:
            if getattr(text, key, 0.0):
                return f"has no dropout, and the model has {key} {getattr(text, key)}."
    width = head_width(text)
    if width is None:
        return None
    if width > WIDEST_HEAD:
        return f"takes heads of at most {WIDEST_HEAD}, the model's are {width} wide."
    if version == 4 and width % 8:
        return f"takes heads of a multiple of 8, the model's are {width} wide."
    if version == 4 and major >= 10:
        if width > 128 and (width != 256 or major == 12):
            also = "" if major == 12 else ", or of 256"
            return f"takes heads of at most 128{also} on this GPU, the model's are {width} wide."
        if width == 256 and getattr(text, "attn_logit_softcapping", None):
            return "has no attn_logit_softcapping for heads of 256 on this GPU."
    return None


def head_width(text: Any) -> int | None:
    """Return the width of a query's head; None where the config does not say."""
    nope, rope = (getattr(text, f"qk_{part}_head_dim", None) for part in ("nope", "rope"))
    if nope and rope:  # the parts of multi-head latent attention
        return nope + rope
    heads = getattr(text, "num_attention_heads", None)
    width = getattr(text, "head_dim", None) or (text.hidden_size // heads if heads else None)
    return width if isinstance(width, int) else None


def _is_installed(version: int) -> bool:
    from transformers.utils import import_utils

    return getattr(import_utils, f"is_flash_attn_{version}_available")()


def plain_attention_notice(
    config: "PretrainedConfig", device: Any, dtype: torch.dtype, *, document_mask: bool
) -> str | None:
    """Say that `sdpa` would have no fused kernel here, None if it has.

    Args:
        device, dtype: that the model computes on and in.
        document_mask: a mask is given, instead of none.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    text = config.get_text_config()
    heads = getattr(text, "num_attention_heads", None)
    if not heads:
        return None
    width = getattr(text, "head_dim", None) or text.hidden_size // heads
    dropout = float(getattr(text, "attention_dropout", 0.0) or getattr(text, "attn_pdrop", 0.0))
    made: dict[str, Any] = {"device": device, "dtype": dtype}
    query = torch.zeros(1, 2, PROBE_TOKENS, width, **made, requires_grad=True)
    mask = torch.ones(1, 1, PROBE_TOKENS, PROBE_TOKENS, dtype=torch.bool, device=device).tril()
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
