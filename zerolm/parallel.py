"""How the ranks of a run stand to each other: who has the same data, who a part of it. Arithmetic.

    replica    ranks that have one sequence of the batch between them; replicas see other sequences
    tensor     within a replica each rank has a part of every large matrix, and all of the sequence
    sequence   within a replica each rank has all weights, and a part of the sequence

Ranks of a replica are neighbours: rank r is part r % size of replica r // size, as DeepSpeed's own
groups are laid out (`_init_tp_mesh_device`, `initialize_sequence_parallel`, 0.19.8). Without either
a replica is one rank. Knows nothing of models; parallel_rules.py says what works with what.
"""

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from zerolm.ds_config import block, zero_stage

if TYPE_CHECKING:
    from transformers import PretrainedConfig

TENSOR_KEY, SEQUENCE_KEY = "tensor_parallel.autotp_size", "sequence_parallel_size"


class Layout(NamedTuple):
    """How many ranks there are, and how many of them share a sequence.

    Attributes:
        world_size: all ranks.
        tensor: ranks over which the matrices of a replica are cut.
        sequence: ranks over which the sequences of a replica are cut.
        partitions_weights: ZeRO-3.
    """

    world_size: int
    tensor: int = 1
    sequence: int = 1
    partitions_weights: bool = False

    @property
    def replica_size(self) -> int:
        """Ranks of a replica."""
        return self.tensor * self.sequence

    @property
    def replicas(self) -> int:
        """How many parts the batch is cut into by sequences."""
        return self.world_size // self.replica_size

    @property
    def averaged_over(self) -> int:
        """What DeepSpeed divides the sum of gradients by.

        Stage 1 and 2 divide by the replicas: the data-parallel group, or all ranks over the degree.
        Stage 3 does not know of sequences that are cut (`reduce_scatter_coalesced`).
        """
        return self.world_size if self.partitions_weights else self.replicas

    def replica(self, rank: int) -> int:
        """Return the replica that a rank belongs to."""
        return rank // self.replica_size

    def part(self, rank: int) -> int:
        """Return which rank of its replica a rank is."""
        return rank % self.replica_size

    def counts(self, rank: int) -> bool:
        """Whether what a rank saw is added up: of ranks that saw the same, only the first."""
        return self.tensor == 1 or self.part(rank) == 0

    def training_share(self, rank: int) -> tuple[int, int]:
        """Return (number, of how many) of the parts by sequences of the training data."""
        return self.replica(rank), self.replicas

    def evaluation_share(self, rank: int) -> tuple[int, int]:
        """Return the same of what is evaluated: there no sequence is cut, each rank has its own."""
        return self.training_share(rank) if self.tensor > 1 else (rank, self.world_size)

    def describe(self) -> str:
        """Return what stands behind the number of devices, empty without either form."""
        if self.replica_size == 1:
            return ""
        form, size = ("tensor", self.tensor) if self.tensor > 1 else ("sequence", self.sequence)
        return f"{self.replicas} data parallel x {size} {form} parallel"


def degree(ds_config: Mapping[str, Any], key: str) -> Any:
    """Return what a ds config has under one of the keys above, 1 where it has none."""
    if key == SEQUENCE_KEY:
        value = ds_config.get(SEQUENCE_KEY)
    else:
        value = block(ds_config, "tensor_parallel").get("autotp_size")
    return 1 if value in (None, 0) and not isinstance(value, bool) else value


def is_degree(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def layout_of(ds_config: Mapping[str, Any], world_size: int) -> Layout:
    """Return the layout that a ds config asks for; without either form where it cannot be had."""
    tensor, sequence = (degree(ds_config, key) for key in (TENSOR_KEY, SEQUENCE_KEY))
    if not (is_degree(tensor) and is_degree(sequence)) or world_size % (tensor * sequence):
        return Layout(world_size)
    return Layout(world_size, tensor, sequence, zero_stage(ds_config) == 3)


def parts(ds_config: Mapping[str, Any]) -> int:
    """Return over how many ranks the matrices of a replica are cut."""
    tensor = degree(ds_config, TENSOR_KEY)
    return tensor if is_degree(tensor) else 1


def held(
    shapes: Mapping[str, tuple[int, ...]], ds_config: Mapping[str, Any], world_size: int
) -> tuple[Mapping[str, tuple[int, ...]], int]:
    """Return what a replica's rank has of each parameter, and over how many ranks ZeRO cuts that.

    Where tensors are cut that is a part of every matrix but the embedding (a tied head included),
    and ZeRO cuts over the replicas; else all of it, over all ranks.

    Args:
        shapes: of every parameter by name, tied ones once.
    """
    layout = layout_of(ds_config, world_size)
    if layout.tensor == 1:
        return shapes, world_size
    cut = {
        name: (-(-shape[0] // layout.tensor), *shape[1:])
        if len(shape) > 1 and "embed" not in name
        else shape
        for name, shape in shapes.items()
    }
    return cut, layout.replicas


def part_of(config: "PretrainedConfig", layout: Layout) -> "PretrainedConfig":
    """Return the config of what a rank computes: where matrices are cut, fewer heads and a
    narrower MLP between hidden states as wide as the model's. The logits are put together."""
    if layout.tensor == 1:
        return config
    own = copy.deepcopy(config)
    text = own.get_text_config()
    text.head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        setattr(text, name, max(1, getattr(text, name) // layout.tensor))
    return own
