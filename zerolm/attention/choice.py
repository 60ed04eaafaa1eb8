"""Chooses a run's attention kernel, and explains in notices why a faster one is not used."""

import warnings
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import torch

from zerolm.attention import flash, varlen
from zerolm.common.errors import ConfigError
from zerolm.config.settings import ATTENTION_IMPLEMENTATIONS, VARLEN
from zerolm.distributed.collectives import require_on_all_ranks, require_same_on_all_ranks
from zerolm.model.architecture import causal_lm_class, layer_configs
from zerolm.model.document_mask import SLIDING_ATTENTION, layer_types
from zerolm.model.document_mask import unsupported_reason as unisolated_reason

if TYPE_CHECKING:
    from transformers import PretrainedConfig

PROBE_TOKENS = 64


def agreed_attention(
    config: "PretrainedConfig",
    requested: str,
    device_type: str,
    dtype: torch.dtype,
    *,
    seq_len: int,
    document_mask: bool,
) -> str:
    """Choose the attention kernel on every rank, and check that all ranks choose the same one.

    Every rank must call this.

    The choice depends on the installed packages and the devices, which may differ between hosts.

    Raises:
        ConfigError: on every rank, if any rank cannot use the requested kernel or the ranks choose
            different kernels.
    """
    chosen, problem = "", ""
    try:
        chosen = choose_attention(
            config, requested, device_type, dtype, seq_len=seq_len, document_mask=document_mask
        )
    except ConfigError as error:
        problem = str(error)
    require_on_all_ranks(not problem, problem)
    require_same_on_all_ranks(
        chosen,
        f"--attn_implementation {requested}: {chosen} on this host, but not on rank 0's. Install "
        f"the same attention packages on all hosts, or name an implementation.",
    )
    return chosen


def choose_attention(
    config: "PretrainedConfig",
    requested: str,
    device_type: str,
    dtype: torch.dtype,
    *,
    seq_len: int = 0,
    document_mask: bool = False,
) -> str:
    """Choose the attention implementation for a model, register it if needed, and return its name.

    Args:
        requested: one of `ATTENTION_IMPLEMENTATIONS`. "auto" selects the first of
            flash_attention_3, varlen, flash_attention_2, sdpa and eager that works; varlen is tried
            only if sdpa would need a mask.
        seq_len: number of tokens in a row; 0 if no row is longer than the model's sliding windows.
    """
    if requested not in ATTENTION_IMPLEMENTATIONS:
        raise ConfigError(
            f"--attn_implementation: {requested!r} must be one of "
            f"{', '.join(ATTENTION_IMPLEMENTATIONS)}."
        )

    def problem(name: str) -> str | None:
        reason = document_mask and unisolated_reason(config, causal_lm_class(config), name)
        return reason or _unsupported_reason(config, name, device_type, dtype)

    if requested == "auto":
        masked = needs_mask(config, seq_len, document_mask=document_mask)
        requested = next((name for name in _preference(masked) if not problem(name)), "eager")
    elif reason := _unsupported_reason(config, requested, device_type, dtype):
        raise ConfigError(f"--attn_implementation: {requested!r} {reason}")
    if requested == VARLEN:
        varlen.register()
    elif requested in flash.VERSIONS:
        flash.register(requested)
    return requested


def _preference(masked: bool) -> tuple[str, ...]:
    return ("flash_attention_3", *[VARLEN] * masked, "flash_attention_2", "sdpa")


def _unsupported_reason(
    config: "PretrainedConfig", implementation: str, device_type: str, dtype: torch.dtype
) -> str | None:
    """Return why an attention implementation cannot be used here, and the fix; None if it can."""
    model_class = causal_lm_class(config)
    if implementation == "eager":
        return None
    if implementation == "sdpa":
        if model_class._supports_sdpa:
            return None
        return f"is not supported by {model_class.__name__}. Use eager."
    if implementation == "flex_attention":
        if not model_class._supports_flex_attn:
            return f"is not supported by {model_class.__name__}. Use auto."
        if device_type == "cpu":
            return "has no backward pass on a CPU. Use auto."
        return None
    if implementation == VARLEN:
        return varlen.unsupported_reason(config, device_type, dtype)
    return flash.unsupported_reason(config, implementation, device_type, dtype)


def needs_mask(config: "PretrainedConfig", seq_len: int, *, document_mask: bool) -> bool:
    """Return whether `sdpa` needs a mask: for documents, or for windows shorter than a row."""
    windows = [getattr(each, "sliding_window", None) for each in layer_configs(config)]
    narrow = any(isinstance(width, int) and width < seq_len for width in windows)
    return document_mask or (narrow and SLIDING_ATTENTION in layer_types(config))


def failed_kernels_notice(
    config: "PretrainedConfig", chosen: str, device_type: str, dtype: torch.dtype, *, masked: bool
) -> str | None:
    """Return a notice about kernels that `auto` skipped because their trial run failed, or None.

    Args:
        chosen: the implementation that `auto` chose.
        masked: result of `needs_mask`.
    """
    better = takewhile(lambda name: name != chosen, _preference(masked))
    reasons = {name: _unsupported_reason(config, name, device_type, dtype) for name in better}
    failed = [
        f"{name} {reason.removesuffix(' Use auto.').removesuffix('.')}"
        for name, reason in reasons.items()
        if reason and flash.FAILS in reason
    ]
    return f"attention: {chosen}, since {', '.join(failed)}" if failed else None


def dense_mask_notice(
    config: "PretrainedConfig", chosen: str, device_type: str, dtype: torch.dtype
) -> str | None:
    """Return a notice if a GPU would compute attention scores only to mask them, or None.

    The notice states why `varlen`, which skips these scores, cannot be used.

    Args:
        chosen: the implementation that `auto` chose for a model that needs a mask.
    """
    if chosen not in ("eager", "sdpa") or device_type != "cuda":
        return None
    reason = varlen.unsupported_reason(config, device_type, dtype) or ""
    return (
        f"attention: {chosen} needs a mask of --seq_len x --seq_len values for each row, and also "
        f"computes the masked scores, because varlen {reason.removesuffix(' Use auto.')}"
    )


def unfused_attention_notice(
    config: "PretrainedConfig", device: Any, dtype: torch.dtype, *, document_mask: bool
) -> str | None:
    """Return a notice if `sdpa` has no fused kernel for this model on this device, or None.

    Args:
        document_mask: whether the attention function receives a mask tensor.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    text = config.get_text_config()
    width = flash.head_dim(config)
    if width is None:
        return None
    dropout = float(getattr(text, "attention_dropout", 0.0) or getattr(text, "attn_pdrop", 0.0))
    shape = (1, 2, PROBE_TOKENS, width)
    query = torch.zeros(shape, device=device, dtype=dtype, requires_grad=True)
    mask = torch.ones(1, 1, PROBE_TOKENS, PROBE_TOKENS, dtype=torch.bool, device=device).tril()
    fused = [
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.CUDNN_ATTENTION,
    ]
    try:
        with sdpa_kernel(fused), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch prints its reasons on several lines
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
            f"for head dimension {width}{', with dropout' if dropout else ''}"
            f"{', with a document mask' if document_mask else ''}: it computes all scores, "
            f"whose memory grows with the square of --seq_len"
        )
    return None
