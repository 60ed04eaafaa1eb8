"""How ZeRO-3 gathers the weights of a decoder block: each linear layer's, or all at once.

DeepSpeed calls a module that it gathers as a whole a leaf module.
"""

from collections.abc import Sequence

from zerolm.ds_config.profile import AUTO, Profile
from zerolm.engine.reduction_choice import separate_calls_pay

# Keys of zero_optimization with which a JSON names leaf modules itself.
LEAF_KEYS = ("leaf_module", "stage3_module_granularity_threshold")


def gathers_blocks(
    profile: Profile,
    block: Sequence[int],
    *,
    hidden_size: int | None,
    ranks: int,
    compiled: bool,
) -> bool:
    """Return whether ZeRO-3 gathers each block at once.

    A compiled block is gathered so, which leaves no hooks in its graph. So is any other where the
    latency of a collective for each layer adds much to the time of the bytes.

    Args:
        block: values of each parameter of the largest block; none if the model has no blocks.
    """
    if compiled or profile.zero_stage != 3:
        return profile.zero_stage == 3
    if (
        not block
        or profile.param_offload != "none"
        or any(profile.zero.get(key) for key in LEAF_KEYS)
    ):
        return False
    sizes = _gathered_sizes(profile, block, hidden_size)
    return not separate_calls_pay(profile.weight_bytes * sum(sizes), len(sizes), ranks)


def persistence_threshold(hidden_size: int) -> int:
    """Return the values up to which a parameter stays on every rank, where the JSON has "auto"."""
    return 10 * hidden_size


def prefetch_bucket(profile: Profile, block: Sequence[int], hidden_size: int) -> int:
    """Return the values to gather ahead where the JSON has "auto": the next layers, or block.

    DeepSpeed gathers parameters ahead until their sum reaches the bucket. Of blocks that are
    gathered at once, a smaller bucket leaves most weights until their block starts.

    Args:
        block: as for `gathers_blocks`; none if layers are gathered one by one.
    """
    sizes = _gathered_sizes(profile, block, hidden_size)
    return sum(sizes) or int(0.9 * hidden_size * hidden_size)


def _gathered_sizes(profile: Profile, block: Sequence[int], hidden_size: int | None) -> list[int]:
    """Return the sizes of the parameters of a block that do not stay on every rank."""
    least = profile.buckets.persistence_threshold
    if hidden_size and profile.zero.get("stage3_param_persistence_threshold") == AUTO:
        least = persistence_threshold(hidden_size)
    return [size for size in block if size > least]
