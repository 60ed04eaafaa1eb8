"""Selects which activations are saved for the backward pass and which are recomputed there.

`--gradient_checkpointing` saves only the inputs of each decoder block. `selective` also saves what
is expensive to recompute: the outputs of matrix products and fused attention (SDPA, varlen, and
FlashAttention 2 and 3). Norms, rotary embeddings and activation functions, which are large but
cheap to compute, are recomputed. On a CPU, gradients are bit-identical with and without
checkpointing.

Source: Korthikanti et al. 2022 (arXiv 2205.05198), section 5, for the idea;
`torch.utils.checkpoint.create_selective_checkpoint_contexts` for the implementation.
"""

from typing import Any

from zerolm.config.settings import SELECTIVE, Recompute

# Scores of unfused attention (bmm) are not saved, since they are quadratic in the sequence length.
SAVED_OPERATORS = frozenset(
    {
        "aten::mm",
        "aten::addmm",
        "aten::_scaled_mm",
        "aten::_grouped_mm",
        "aten::_scaled_grouped_mm",
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
        "torch_attn::_varlen_attn",
    }
)
FLASH_ATTENTION_PREFIXES = ("flash_attn::", "flash_attn_3::")  # operators of these packages


def command_line_arguments(recompute: Recompute) -> list[str]:
    """Return the command-line arguments that select this mode."""
    flag = "--gradient_checkpointing"
    return [] if not recompute else [flag if recompute is True else f"{flag}={recompute}"]


def describe(recompute: Recompute) -> str:
    """Describe the mode for display; return an empty string without checkpointing."""
    if not recompute:
        return ""
    return f"{'' if recompute is True else f'{recompute} '}gradient checkpointing"


def is_saved(operator: Any) -> bool:
    """Return whether `selective` saves the output of a torch operator."""
    name = operator._schema.name
    is_flash = name.startswith(FLASH_ATTENTION_PREFIXES) and "backward" not in name
    return name in SAVED_OPERATORS or is_flash


def checkpoint_kwargs(recompute: Recompute) -> dict[str, Any]:
    """Return the keyword arguments for `torch.utils.checkpoint.checkpoint`."""
    kwargs: dict[str, Any] = {"use_reentrant": False}
    return kwargs | ({"context_fn": _contexts} if recompute == SELECTIVE else {})


def _contexts() -> Any:
    from torch.utils.checkpoint import create_selective_checkpoint_contexts

    return create_selective_checkpoint_contexts(_policy)


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> Any:
    from torch.utils.checkpoint import CheckpointPolicy

    saved = is_saved(operator)
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE
