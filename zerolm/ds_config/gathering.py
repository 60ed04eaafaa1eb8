"""How ZeRO-3 gathers the weights of a decoder block: layer by layer, or all at once.

In DeepSpeed, a module whose weights are gathered all at once is called a leaf module.
"""

from collections.abc import Sequence
from typing import Any

from zerolm.common.values import shown
from zerolm.ds_config.profile import AUTO, Profile
from zerolm.engine.reduction_choice import separate_calls_pay

LEAF_KEY = "leaf_module"  # of zero_optimization: defines leaf modules explicitly


def gathers_blocks(
    profile: Profile,
    block: Sequence[int],
    *,
    hidden_size: int | None,
    ranks: int,
    compiled: bool,
) -> bool:
    """Return whether ZeRO-3 gathers each block at once.

    Compiled blocks are gathered at once, so their graphs contain no hooks. Other blocks are
    gathered at once if a collective for each layer would add much latency to the transfer time.

    Args:
        block: number of values in each parameter of the largest block; empty if the model has no
            blocks.
    """
    if compiled or profile.zero_stage != 3:
        return profile.zero_stage == 3
    if not block or profile.param_offload != "none" or profile.zero.get(LEAF_KEY):
        return False
    sizes = _gathered_sizes(profile, block, hidden_size)
    return not separate_calls_pay(profile.weight_bytes * sum(sizes), len(sizes), ranks)


def leaf_problems(profile: Profile, model: Any) -> list[str]:
    """Refuse leaf modules that contain the input embeddings.

    DeepSpeed gathers a leaf module for the backward pass by hooks on its inputs. Token ids have no
    gradient, so it would compute with weights that are not there.

    Args:
        model: on the meta device. It is marked.
    """
    if profile.zero_stage != 3 or not profile.zero.get(LEAF_KEY):
        return []
    from zerolm.engine.zero3_hooks import mark_leaf_modules

    leaves = profile.zero[LEAF_KEY]
    table = model.get_input_embeddings()
    for module in mark_leaf_modules(model, leaves):
        if module is not table and any(each is table for each in module.modules()):
            return [
                f"{profile.name}: zero_optimization.{LEAF_KEY}: {shown(leaves)} makes "
                f"{type(module).__name__} a leaf module, but DeepSpeed cannot gather one with "
                f"the input embeddings in the backward pass. Choose blocks or parts of them."
            ]
    return []


def persistence_threshold(hidden_size: int) -> int:
    """Return the value for "auto": the size up to which a parameter stays on every rank."""
    return 10 * hidden_size


def prefetch_bucket(profile: Profile, block: Sequence[int], hidden_size: int) -> int:
    """Return the value for "auto": how many weights to gather ahead, for the next layers or block.

    DeepSpeed gathers parameters ahead until their total size reaches the bucket. If blocks are
    gathered at once, a bucket smaller than a block would delay most of its weights until the block
    starts.

    Args:
        block: number of values in each parameter of the largest block; empty if blocks are not
            gathered at once.
    """
    sizes = _gathered_sizes(profile, block, hidden_size)
    return sum(sizes) or int(0.9 * hidden_size * hidden_size)


def _gathered_sizes(profile: Profile, block: Sequence[int], hidden_size: int | None) -> list[int]:
    """Return the sizes of those parameters in a block that do not stay on every rank."""
    least = profile.buckets.persistence_threshold
    if hidden_size and profile.zero.get("stage3_param_persistence_threshold") == AUTO:
        least = persistence_threshold(hidden_size)
    return [size for size in block if size > least]
