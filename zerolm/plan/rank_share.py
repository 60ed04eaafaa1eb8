"""Parameter shapes and config of the part of the model that one rank has: under tensor parallelism,
with divided experts, and in pipeline stages.

Reproduces the sharding of DeepSpeed 0.19.8's AutoTP without importing it, for estimates of memory
and time.
"""

import copy
import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from zerolm.distributed.layout import Layout
from zerolm.model.architecture import is_routed_expert

if TYPE_CHECKING:
    from transformers import PretrainedConfig

Shapes = Mapping[str, tuple[int, ...]]
IN_A_BLOCK = re.compile(r"(.*?)\.(\d+)\.")  # in an outermost list of modules


def blocks_of(shapes: Shapes) -> tuple[str, int]:
    """Return the name of a model's list of blocks, and their number."""
    places = [place for name in shapes if (place := IN_A_BLOCK.match(name))]
    lists = [place[1] for place in places]
    blocks = max(set(lists), key=lists.count)
    return blocks, 1 + max(int(place[2]) for place in places if place[1] == blocks)


def shapes_of_stages(shapes: Shapes, layers: Sequence[int]) -> list[dict[str, tuple[int, ...]]]:
    """Return the parameter shapes of each pipeline stage.

    What is listed before the blocks is on the first stage, and what follows them on the last; if
    no head follows them, the last stage has a copy of the embeddings.

    Args:
        layers: number of blocks of each stage.
    """
    places = {name: IN_A_BLOCK.match(name) for name in shapes}
    blocks, _ = blocks_of(shapes)
    of_block = [stage for stage, count in enumerate(layers) for _ in range(count)]
    found: list[dict[str, tuple[int, ...]]] = [{} for _ in layers]
    before: dict[str, tuple[int, ...]] = {}
    after: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        place = places[name]
        if place and place[1] == blocks:
            found[of_block[int(place[2])]][name] = shape
        else:
            (after if any(found) else before)[name] = shape
    tables = {name: shape for name, shape in before.items() if len(shape) == 2}
    if tables and not any(len(shape) == 2 for shape in after.values()):
        name = next(iter(tables))
        after[name] = tables[name]
    found[0] |= before
    found[-1] |= after
    return found


def even_layers(shapes: Shapes, stages: int) -> list[int]:
    """Return the number of blocks of each stage if all blocks cost the same."""
    _, count = blocks_of(shapes)
    return [count // stages + (stage < count % stages) for stage in range(stages)]


def shapes_of_rank(
    shapes: Shapes, layout: Layout, layers: Sequence[int] = (), stage: int | None = None
) -> tuple[Shapes, int]:
    """Return a rank's parameter shapes, and the number of ranks over which ZeRO partitions them.

    Under tensor parallelism a rank holds a shard of every matrix except the embedding (and a head
    tied to it), and ZeRO partitions over the replicas. With divided experts a rank holds some
    experts, whose states are partitioned over fewer ranks (`shard_values`). Otherwise ZeRO
    partitions the full shapes over all ranks or over the ranks of a group.

    Args:
        layers: number of blocks of each pipeline stage; empty: divided evenly.
        stage: the pipeline stage; None: the largest.
    """
    if layout.stages > 1:
        found = [
            shapes_of_rank(each, layout._replace(stages=1))[0]
            for each in shapes_of_stages(shapes, layers or even_layers(shapes, layout.stages))
        ]
        if stage is None:
            return max(found, key=lambda each: sum(map(math.prod, each.values()))), layout.shards
        return found[stage], layout.shards
    if layout.experts > 1:
        return {
            name: (-(-shape[0] // layout.experts), *shape[1:]) if is_routed_expert(name) else shape
            for name, shape in shapes.items()
        }, layout.shards
    if layout.tensor == 1:
        return shapes, layout.shards
    sharded = {
        name: (-(-shape[0] // layout.tensor), *shape[1:])
        if len(shape) > 1 and "embed" not in name
        else shape
        for name, shape in shapes.items()
    }
    return sharded, layout.shards


def shard_values(shapes: Shapes, layout: Layout) -> int:
    """Return the number of values in a rank's shard of the optimizer states.

    Args:
        shapes: a rank's parameter shapes.
    """
    values = 0
    for part, ranks in parts_of_rank(shapes, layout):
        sizes = [math.prod(shape) for shape in part.values()]
        if not layout.partitions_weights:  # otherwise each parameter is divided separately
            sizes = [sum(sizes)]
        values += sum(-(-size // ranks) for size in sizes)
    return values


def parts_of_rank(shapes: Shapes, layout: Layout) -> list[tuple[Shapes, int]]:
    """Return a rank's parameter shapes in parts, each with the number of ranks over which ZeRO
    partitions its states: divided experts, and all others.
    """
    if layout.experts == 1:
        return [(shapes, layout.shards)]
    experts = {name: shape for name, shape in shapes.items() if is_routed_expert(name)}
    others = {name: shape for name, shape in shapes.items() if name not in experts}
    return [(others, layout.shards), (experts, layout.axis("expert_copies").size)]


def config_of_rank(config: "PretrainedConfig", layout: Layout) -> "PretrainedConfig":
    """Return the config of the model shard that a rank computes.

    Under tensor parallelism the shard has fewer heads and a narrower MLP, but the same hidden size.
    It also computes all logits, because logits are gathered.
    """
    if layout.tensor == 1:
        return config
    sharded = copy.deepcopy(config)
    text = sharded.get_text_config()
    text.head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        setattr(text, name, max(1, getattr(text, name) // layout.tensor))
    return sharded
