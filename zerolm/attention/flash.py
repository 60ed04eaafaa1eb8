"""Checks whether a FlashAttention kernel can train a model on this GPU.

Where transformers only warns or falls back to another kernel, the functions here return a reason to
refuse the run. The limits of each version come from its source: Dao-AILab/flash-attention at
0251105a (August 2026), `flash_attn/`, `hopper/` and `flash_attn/cute/interface.py`. Must not depend
on settings.
"""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from zerolm.model.architecture import causal_lm_class, layer_configs
from zerolm.model.document_mask import boundary_arguments

if TYPE_CHECKING:
    from transformers import PretrainedConfig

VERSIONS = {f"flash_attention_{version}": version for version in (2, 3, 4)}
PACKAGES = {2: "flash-attn", 3: "flash-attn-3", 4: "flash-attn-4"}
MAX_HEAD_DIM = 256
# By major compute capability. On 8.x, version 4 implements the forward pass but not the backward
# pass (`_flash_attn_bwd`).
SUPPORTED_GPUS = {3: {9}, 4: {9, 10, 11, 12}}
DROPOUT_KEYS = ("attention_dropout", "attn_pdrop")
TRIAL_BOUNDARIES = (0, 40, 41, 64)
FAILS = "does not run here"


def unsupported_reason(
    config: "PretrainedConfig", implementation: str, device_type: str, dtype: torch.dtype
) -> str | None:
    """Return why this FlashAttention version cannot train the model here, and the fix, or None."""
    version, model_class = VERSIONS[implementation], causal_lm_class(config)
    if not model_class._supports_flash_attn:
        return f"is not supported by {model_class.__name__}. Use auto."
    if why := cuda_problem(device_type, dtype):
        return why
    # ROCm numbers GPUs differently, and its build supports version 2 only.
    major = 8 if torch.version.hip else torch.cuda.get_device_capability()[0]
    if why := gpu_problem(version, major) or model_problem(config, implementation, major):
        return f"{why} Use sdpa or auto."
    if not _is_installed(version):
        return (
            f"needs the package {PACKAGES[version]}, which is not installed. Install it, or use "
            f"auto."
        )
    module = SimpleNamespace(
        config=SimpleNamespace(_attn_implementation=implementation), modules=None
    )
    trial = partial(attend, module)
    return trial_problem(trial, torch.device(device_type), dtype, head_dim(config) or MAX_HEAD_DIM)


def trial_problem(
    attend: Callable[..., Any], device: torch.device, dtype: torch.dtype, width: int
) -> str | None:
    """Run a kernel's forward and backward pass on a few tokens; return the error, or None.

    A package with valid metadata may still have been built for another torch version or GPU.

    Args:
        attend: attention function with transformers' signature, but without the module argument.
        width: head dimension.
    """
    length = TRIAL_BOUNDARIES[-1]
    try:
        boundaries = torch.tensor(TRIAL_BOUNDARIES, dtype=torch.int32, device=device)
        query, key = (
            torch.zeros(1, heads, length, width, dtype=dtype, device=device, requires_grad=True)
            for heads in (2, 1)
        )
        output, _ = attend(query, key, key, None, **boundary_arguments(boundaries, length))
        output.sum().backward()
        torch.cuda.synchronize(device)
    except Exception as error:  # any class: loading a library runs its code
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return f"{FAILS} ({lines[0]}). Use auto."
    return None


def register(implementation: str) -> None:
    """Replace transformers' attention function of this name with `attend`. May be called again."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(implementation, attend)


class _AnyLayer:
    """The attributes of a layer that transformers' function reads, except the layer index."""

    def __init__(self, module: Any):
        self.config, self.is_causal = module.config, getattr(module, "is_causal", True)
        self.modules = module.modules


def attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *mask: Any,
    position_ids: Any = None,
    **arguments: Any,
) -> Any:
    """Call transformers' FlashAttention function, which imports the package.

    The function receives document boundaries, but no positions and no layer index. With positions,
    every layer would search them for documents, which synchronises with the device and breaks a
    compiled graph; with a layer index, each layer would be compiled to its own graph. Queries and
    keys that a float32 rotary table has promoted to float32 are cast here, because a cast inside
    the function would also break the graph.
    """
    from transformers.integrations.flash_attention import flash_attention_forward

    query, key = query.to(value.dtype), key.to(value.dtype)
    layer: Any = _AnyLayer(module)
    return flash_attention_forward(layer, query, key, value, *mask, **arguments)


def cuda_problem(device_type: str, dtype: torch.dtype) -> str | None:
    """Return why no FlashAttention version can run on this device, and the fix; None if one may."""
    if device_type != "cuda" or not torch.cuda.is_available():
        return f"needs a CUDA device, but this run is on {device_type}. Use auto."
    if dtype not in (torch.bfloat16, torch.float16):
        name = str(dtype).removeprefix("torch.")
        return (
            f"needs bf16 or fp16, but this run is in {name}. Enable bf16 in the ds config, or use "
            "auto."
        )
    return None


def gpu_problem(version: int, major: int) -> str | None:
    """Return why a FlashAttention version cannot train on GPUs of this major compute capability."""
    if version == 2:
        return None if major >= 8 else "needs compute capability 8.0 or higher."
    if major in SUPPORTED_GPUS[version] and not torch.version.hip:
        return None
    if version == 3:
        return "needs a Hopper GPU (compute capability 9.x)."
    return "needs a Hopper or Blackwell GPU (compute capability 9.x to 12.x)."


def model_problem(config: "PretrainedConfig", implementation: str, major: int) -> str | None:
    """Return why the kernel does not support a model, or None if it does."""
    version, text = VERSIONS[implementation], config.get_text_config()
    model_class: Any = causal_lm_class(config)
    # Transformers would only warn, and download the first compatible kernel from the hub.
    known = getattr(model_class, "_compatible_flash_implementations", None)
    if known is not None and implementation not in known:
        return f"is not among the kernels of {model_class.__name__} ({', '.join(known)})."
    if version > 2:  # no dropout; transformers drops the argument, mostly without a warning
        for key in DROPOUT_KEYS:
            if getattr(text, key, 0.0):
                return f"does not support dropout, but the model has {key} {getattr(text, key)}."
    width = head_dim(config)
    if width is None:
        return None
    if width > MAX_HEAD_DIM:
        return f"supports head dimensions up to {MAX_HEAD_DIM}, but the model has {width}."
    if version == 4 and width % 8:
        return f"supports only multiples of 8 as head dimensions, but the model has {width}."
    if version == 4 and major >= 10:
        if width > 128 and (width != 256 or major == 12):
            also = "" if major == 12 else ", and 256,"
            return f"supports head dimensions up to 128{also} on this GPU, the model has {width}."
        if width == 256 and getattr(text, "attn_logit_softcapping", None):
            return "does not support attn_logit_softcapping with head dimension 256 on this GPU."
    return None


def head_dim(config: "PretrainedConfig") -> int | None:
    """Return the largest attention head dimension of all layers; None if there are no heads."""
    widths = [_head_dim(layer) for layer in layer_configs(config)]
    return max((width for width in widths if width), default=None)


def _head_dim(layer: Any) -> int | None:
    nope, rope = (getattr(layer, f"qk_{part}_head_dim", None) for part in ("nope", "rope"))
    if nope and rope:  # multi-head latent attention
        return nope + rope
    heads = getattr(layer, "num_attention_heads", None)
    width = getattr(layer, "head_dim", None) or (layer.hidden_size // heads if heads else None)
    return width if isinstance(width, int) else None


def _is_installed(version: int) -> bool:
    from transformers.utils import import_utils

    return getattr(import_utils, f"is_flash_attn_{version}_available")()
