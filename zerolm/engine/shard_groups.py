"""Groups of ranks within which ZeRO-1 shards optimizer states; each group has a full copy.

Gradients are reduced to their owners inside each group, then each partition is summed over its
owners in all groups, and updated weights are gathered inside the group. All gradient and weight
traffic except that sum stays on fast links. While an engine is built (DeepSpeed 0.19.8), a replaced
method passes the group to the optimizer instead of all ranks.

The optimizer then partitions, gathers and names its files by group, and DeepSpeed saves only the
first group's states. All ranks have the same weights. States are bit-identical in all groups, since
all groups receive their gradients and norm from the same all-reduce: Gloo (tested) and NCCL (by its
algorithms) sum each value on one rank and copy the result to the others.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from zerolm.engine import replaced


@contextmanager
def sharding_within(size: int) -> Iterator[Any]:
    """Make an engine built in this context shard its states within groups of neighbouring ranks.

    Every rank must call this.

    Args:
        size: ranks per group; 0: a single group of all ranks.

    Yields:
        The process group of the ranks that store the same partition as this rank, one from each
        group; None if states are sharded over all ranks.
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

    with replaced.installed(DeepSpeedEngine, "_configure_bf16_optimizer", configure):
        yield across
