"""Sizes of what ranks with divided experts exchange, for estimates of memory and time."""

from typing import TYPE_CHECKING

from zerolm.distributed.layout import Layout
from zerolm.model.architecture import is_routed_expert, num_experts
from zerolm.model.model import hidden_size
from zerolm.plan.rank_share import IN_A_BLOCK, Shapes

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Tokens that the busiest rank of a group gets, relative to the mean: assumed unless a plan is told
# (`--rank_imbalance`). The busiest expert of 16 gets 1.2 to 2.3 times the mean (docs/experts.md); a
# rank has several.
IMBALANCE = 1.2
# Copies of the rows that a rank has received which a layer keeps for the backward pass, and further
# ones that exist during the exchange. Counted for Qwen3-MoE with equal widths: 6.0 to 6.3, as many
# as with whole experts.
KEPT_COPIES, LIVE_COPIES = 6, 3


def busiest_share(layout: Layout, imbalance: float) -> float:
    """Return the tokens of a layer that the busiest rank gets, divided by the mean over its group.

    Args:
        imbalance: this ratio in a large group, as `router/rank_imbalance` reports it; the ratio
            cannot be more than the number of ranks in a group.
    """
    return min(imbalance, layout.experts)


def num_layers(shapes: Shapes) -> int:
    """Return the number of layers with routed experts."""
    places = (IN_A_BLOCK.match(name) for name in filter(is_routed_expert, shapes))
    return len({place[0] for place in places if place})


def row_bytes(config: "PretrainedConfig", weight_bytes: int) -> int:
    """Return the bytes of a token's copies for its experts, as they are sent."""
    return (num_experts(config)[1] or 1) * (hidden_size(config) or 0) * weight_bytes


def memory_bytes(
    config: "PretrainedConfig",
    shapes: Shapes,
    layout: Layout,
    tokens: int,
    weight_bytes: int,
    recomputed: bool,
    imbalance: float = IMBALANCE,
    stored: int = 1,
) -> int:
    """Return the bytes that micro-batches take in addition to the activations of whole experts.

    Args:
        shapes: of the layers on a rank.
        tokens: number of tokens in a rank's micro-batch.
        recomputed: whether layers are recomputed, so that only one keeps its rows.
        imbalance: see `busiest_share`.
        stored: number of micro-batches whose activations the rank stores at once.
    """
    if layout.experts == 1:
        return 0
    busiest = busiest_share(layout, imbalance)
    kept = KEPT_COPIES * (busiest - 1) * (1 if recomputed else stored * num_layers(shapes))
    return int(tokens * row_bytes(config, weight_bytes) * (kept + LIVE_COPIES * busiest))
