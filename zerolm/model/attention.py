"""Whether a FlashAttention kernel can train a model here, with what it would not do silently.

Transformers warns, or falls back to another kernel, where this refuses. What each version takes is
read from its source: Dao-AILab/flash-attention at 0251105a (August 2026), `flash_attn/`, `hopper/`
and `flash_attn/cute/interface.py`. Used by `model`; knows nothing of settings.
"""

from typing import TYPE_CHECKING, Any

import torch

from zerolm.architecture import causal_lm_class

if TYPE_CHECKING:
    from transformers import PretrainedConfig

NAMES = {f"flash_attention_{version}": version for version in (2, 3, 4)}
PACKAGES = {2: "flash-attn", 3: "flash-attn-3", 4: "flash-attn-4"}
WIDEST_HEAD = 256
# Version 4 has a forward pass for 8.x as well, but no backward pass (`_flash_attn_bwd`).
CARDS = {3: {9}, 4: {9, 10, 11, 12}}
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
