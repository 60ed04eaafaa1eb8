"""What one rank holds of a model under tensor parallelism: shapes of its parameters, its config.

Must not import DeepSpeed; describes what its AutoTP 0.19.8 does.
"""

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING

from zerolm.distributed.layout import Layout

if TYPE_CHECKING:
    from transformers import PretrainedConfig

Shapes = Mapping[str, tuple[int, ...]]


def shapes_of_rank(shapes: Shapes, layout: Layout) -> tuple[Shapes, int]:
    """Return the shapes that a rank holds, and over how many ranks ZeRO partitions them.

    Under tensor parallelism a rank holds a part of every matrix but the embedding (a tied head
    included), and ZeRO partitions over the replicas; else it holds all, partitioned over all ranks.

    Args:
        shapes: of every parameter by name, tied ones once.
    """
    if layout.tensor == 1:
        return shapes, layout.world_size
    sharded = {
        name: (-(-shape[0] // layout.tensor), *shape[1:])
        if len(shape) > 1 and "embed" not in name
        else shape
        for name, shape in shapes.items()
    }
    return sharded, layout.replicas


def config_of_rank(config: "PretrainedConfig", layout: Layout) -> "PretrainedConfig":
    """Return the config of what a rank computes.

    Under tensor parallelism: fewer heads and a narrower MLP, between hidden states as wide as the
    model's. The logits are gathered.
    """
    if layout.tensor == 1:
        return config
    own = copy.deepcopy(config)
    text = own.get_text_config()
    text.head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        setattr(text, name, max(1, getattr(text, name) // layout.tensor))
    return own
