"""Which results of a block are kept for the backward pass, and which are computed again there.

`--gradient_checkpointing` keeps only what goes into a block. `selective` also keeps what is dear to
compute, the outputs of matrix products and of fused attention: computed again are norms, rotations
and activation functions, which take memory but no time. The gradients are the same in every bit.

Source: Korthikanti et al. 2022 (arXiv 2205.05198), section 5, for the idea;
`torch.utils.checkpoint.create_selective_checkpoint_contexts` does the work.
"""

from typing import Any

from zerolm.config.settings import SELECTIVE, Recompute

# Of the scores of attention that is not fused (bmm) nothing is kept: they grow with the square of
# the sequence.
KEPT = frozenset(
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
    }
)
FLASH = ("flash_attn::", "flash_attn_3::")  # the packages' own operators, which forward as they say


def flag_words(recompute: Recompute) -> list[str]:
    """Return the words of a command line that ask for it."""
    flag = "--gradient_checkpointing"
    return [] if not recompute else [flag if recompute is True else f"{flag}={recompute}"]


def title(recompute: Recompute) -> str:
    """Return what to call it in a line of figures; nothing where all is kept."""
    if not recompute:
        return ""
    return f"{'' if recompute is True else f'{recompute} '}gradient checkpointing"


def is_kept(operator: Any) -> bool:
    """Tell whether the output of a torch operator is kept."""
    name = operator._schema.name
    return name in KEPT or (name.startswith(FLASH) and "backward" not in name)


def checkpoint_words(recompute: Recompute) -> dict[str, Any]:
    """Return what `torch.utils.checkpoint.checkpoint` is to be called with."""
    words: dict[str, Any] = {"use_reentrant": False}
    return words | ({"context_fn": _contexts} if recompute == SELECTIVE else {})


def _contexts() -> Any:
    from torch.utils.checkpoint import create_selective_checkpoint_contexts

    return create_selective_checkpoint_contexts(_policy)


def _policy(context: Any, operator: Any, *words: Any, **more: Any) -> Any:
    from torch.utils.checkpoint import CheckpointPolicy

    kept = is_kept(operator)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
