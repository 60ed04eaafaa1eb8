"""`--attn_implementation varlen`: torch's own FlashAttention 2, `torch.nn.attention.varlen`.

The kernel computes full or sliding-window attention within the documents of a micro-batch, without
a mask. `register` adds it to transformers; `zerolm.model.document_mask` passes its arguments, the
document boundaries, to the model. `unsupported_reason` returns why a model cannot use the kernel.
Must not depend on settings.
"""

from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from zerolm.attention.flash import TRIAL_BOUNDARIES, cuda_problem, head_dim, trial_problem
from zerolm.config.settings import VARLEN
from zerolm.model.activation_memory import fused_kernels
from zerolm.model.architecture import ConfigKey, meta_model
from zerolm.model.attention_logits import intercepted_attention
from zerolm.model.document_mask import (
    FULL_ATTENTION,
    SLIDING_ATTENTION,
    boundary_arguments,
    layer_types,
    told_documents,
)

if TYPE_CHECKING:
    from transformers import PretrainedConfig

MULTIPLE = 8  # head dimensions are padded to a multiple of this
MAX_HEAD_DIM = 256
# Arguments of transformers' attention functions that change the result and that torch's function
# does not accept.
EXTRAS = ("softcap", "s_aux", "position_bias", "head_mask")


def register() -> None:
    """Register the kernel with transformers as `varlen`. May be called again."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(VARLEN, partial(attend, torch_kernel()))
    ALL_MASK_ATTENTION_FUNCTIONS.register(VARLEN, sdpa_mask)  # without boundaries


def torch_kernel() -> Callable[..., Any]:
    """Return torch's `varlen_attn`, with grouped-query attention enabled.

    Raises:
        ImportError: this torch version has no `varlen_attn`, or one without sliding windows.
    """
    from torch.nn.attention.varlen import varlen_attn

    parameters = signature(varlen_attn).parameters
    if "window_size" not in parameters:
        raise ImportError("varlen_attn has no window_size")
    if "enable_gqa" not in parameters:  # torch 2.11 allows it by default
        return varlen_attn
    return partial(varlen_attn, enable_gqa=True)


def attend(
    kernel: Callable[..., Any],
    module: Any,
    query_BHTD: torch.Tensor,
    key_BKTD: torch.Tensor,
    value_BKTE: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention within documents; has the signature of transformers' attention functions.

    If no document boundaries are passed, as in text generation and scoring, call transformers'
    `sdpa` function instead.

    Args:
        sliding_window: number of keys that each query attends to, including its own; None: all keys
            in the document up to its own.
        cu_seq_lens_q, max_length_q: see `document_mask.boundary_arguments`.

    Returns:
        (B, T, H, E)
    """
    if cu_seq_lens_q is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(
            module,
            query_BHTD,
            key_BKTD,
            value_BKTE,
            attention_mask,
            dropout=dropout,
            scaling=scaling,
            **others,
        )
    assert attention_mask is None and not dropout, "preflight refuses both"
    rows, heads, length, width = query_BHTD.shape
    # Rotary tables in float32 promote queries and keys to float32.
    flat = [
        _flat(each, _padded(width)).to(value_BKTE.dtype)
        for each in (query_BHTD, key_BKTD, value_BKTE)
    ]
    output = kernel(
        *flat,
        cu_seq_lens_q,
        cu_seq_lens_q,
        max_length_q,
        max_length_q,
        scale=width**-0.5 if scaling is None else scaling,
        window_size=(-1 if sliding_window is None else sliding_window - 1, 0),  # causal
    )
    return output[..., : value_BKTE.shape[-1]].view(rows, length, heads, -1), None


def _flat(values_BHTD: torch.Tensor, width: int) -> torch.Tensor:
    """Flatten batch and time, and pad the last dimension with zeros to `width`: (B T, H, width)."""
    values_NHD = values_BHTD.transpose(1, 2).flatten(0, 1)
    missing = width - values_NHD.shape[-1]
    return functional.pad(values_NHD, (0, missing)) if missing else values_NHD


def _padded(width: int) -> int:
    return -(-width // MULTIPLE) * MULTIPLE


def unsupported_reason(
    config: "PretrainedConfig", device_type: str, dtype: torch.dtype
) -> str | None:
    """Return why `varlen` cannot train this model on this device, and the fix; None if it can."""
    if why := model_problem(config):
        return f"{why} Use auto."
    return device_problem(device_type, dtype, head_dim(config) or MAX_HEAD_DIM)


def model_problem(config: "PretrainedConfig") -> str | None:
    """Return why `varlen` cannot compute a model's attention, or None if it can.

    Runs a forward pass on the meta device and inspects the arguments of each attention call.
    """
    return _model_problem(ConfigKey.of(config))


@lru_cache(maxsize=16)
def _model_problem(key: ConfigKey) -> str | None:
    config, types = key.config, layer_types(key.config)
    if others := types - {FULL_ATTENTION, SLIDING_ATTENTION}:
        return f"does not support {', '.join(sorted(others))}."
    found: set[str] = set()
    windows: list[int | None] = []

    def observe(module: Any, query: Any, key: Any, mask: Any, given: Mapping[str, Any]) -> None:
        windows.append(given.get("sliding_window"))
        if (width := query.shape[-1]) > MAX_HEAD_DIM:
            limit = MAX_HEAD_DIM
            found.add(f"supports head dimensions up to {limit}, but the model has {width}.")
        if mask is not None or given.get("is_causal") is False:
            found.add("accepts no mask, but the model builds its own.")
        if given.get("cu_seq_lens_q") is None:
            found.add("receives no document boundaries from the model.")
        if dropout := given.get("dropout"):
            found.add(f"does not support dropout, but the model has {dropout}.")
        found.update(f"does not support {name}." for name in EXTRAS if given.get(name) is not None)

    try:
        model = meta_model(config).train()
        with torch.no_grad(), fused_kernels(model, False), intercepted_attention(model, observe):
            _forward_with_boundaries(model)
    except Exception as error:  # any class: it depends on the config's values
        return f"could not be tested with {config.model_type} ({type(error).__name__})."
    if not windows:
        return (
            f"needs a model with the attention functions of transformers, not {config.model_type}."
        )
    if SLIDING_ATTENTION in types and not any(windows):
        found.add("receives no sliding window from the model.")
    return min(found, default=None)


def _forward_with_boundaries(model: Any) -> None:
    if hasattr(model.config, "output_router_logits"):
        model.config.output_router_logits = False
    ids = torch.empty((1, TRIAL_BOUNDARIES[-1]), dtype=torch.long, device="meta")
    boundaries = torch.empty(3, dtype=torch.int32, device="meta")
    arguments = boundary_arguments(boundaries, TRIAL_BOUNDARIES[-1])
    with told_documents(None):
        model(input_ids=ids, position_ids=ids, use_cache=False, **arguments)


def device_problem(device_type: str, dtype: torch.dtype, width: int) -> str | None:
    """Return why the kernel cannot run on this device, and the fix; None if it can.

    Args:
        width: the model's largest head dimension.
    """
    if why := cuda_problem(device_type, dtype):
        return why
    if torch.version.hip:
        return "needs an NVIDIA GPU. Use auto."
    if torch.cuda.get_device_capability()[0] < 8:
        return "needs compute capability 8.0 or higher. Use auto."
    try:
        kernel = torch_kernel()
    except ImportError:
        return "needs torch 2.11 or newer. Update torch, or use auto."
    trial = partial(attend, kernel, None)
    return trial_problem(trial, torch.device(device_type), dtype, width)
