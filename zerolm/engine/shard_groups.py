"""Groups of ranks inside which ZeRO-1 shards optimizer states; each group has all of them.

Gradients are reduced to the owner inside each group, then the owned partition is summed over the
ranks that have the same one, and updated weights are gathered inside the group: all but that one
sum stays on fast links. Replaced while an engine is built (DeepSpeed 0.19.8):

    DeepSpeedEngine._configure_bf16_optimizer    gives the optimizer the group instead of all ranks

The optimizer's partitions, its gathering and the names of its files are then those of the group,
and DeepSpeed saves the states of the first group only. All ranks have the same weights. A state has
the same bits in all groups: its gradient is one all-reduce's result, and so is the norm. An
all-reduce of Gloo (tested) or NCCL (by its algorithms) sums each value on one rank and copies it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def sharding_within(size: int) -> Iterator[Any]:
    """Let an engine that is built in this context shard its states inside groups of neighbours.

    Every rank must call this.

    Args:
        size: of a group; 0: one group of all ranks.

    Yields:
        The process group of the ranks with the same partition as this one, one of each group; None
        if states are sharded over all ranks.
    """
    if not size:
        yield None
        return
    from deepspeed.runtime.engine import DeepSpeedEngine
    from torch import distributed

    ranks = list(range(distributed.get_world_size()))
    neighbours = [ranks[first : first + size] for first in ranks[::size]]
    inside, _ = distributed.new_subgroups_by_enumeration(neighbours)
    across, _ = distributed.new_subgroups_by_enumeration([ranks[n::size] for n in range(size)])
    usual = DeepSpeedEngine._configure_bf16_optimizer

    def configure(engine: Any, optimizer: Any) -> Any:
        engine.seq_data_parallel_group, engine.seq_dp_world_size = inside, size
        return usual(engine, optimizer)

    DeepSpeedEngine._configure_bf16_optimizer = configure
    try:
        yield across
    finally:
        DeepSpeedEngine._configure_bf16_optimizer = usual
