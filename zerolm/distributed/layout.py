"""The parallel layout: the axes on which ranks differ, and what each rank has and counts.

    tensor     inside a replica each rank has a slice of every large matrix, and all of the sequence
    sequence   inside a replica each rank has all weights, and a slice of the sequence
    data       replicas, which train on other sequences; the ranks of one share each sequence
    zero       ranks with the same matrices, over which ZeRO may divide weights and states
    shards     the ranks on `zero` that together have one copy of the optimizer states
    copies     the ranks on `zero` with the same shard of the states, one for each copy
    experts    neighbouring ranks with the same layers that together have all experts of these,
               each its share
    expert_copies  the ranks with the same experts, over which ZeRO divides the states of these
    stages     inside a replica each rank has some of the layers, and computes them in turn
    all        all ranks

The ranks of a replica are consecutive: rank r is number r % size in replica r // size, as in
DeepSpeed's own groups (`_init_tp_mesh_device`, `initialize_sequence_parallel`, 0.19.8). Stages are
the exception: the ranks of a stage are consecutive, so that gradients are reduced inside hosts and
only activations are sent between them. Without any of these, a replica is one rank. Pure
arithmetic; `zerolm.ds_config.topology` builds a run's layout, and `parallel_rules` beside it
contains the rules for combinations.
"""

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Axis:
    """A rank's place among the ranks that differ from it on one axis only.

    Attributes:
        size: number of these ranks.
        index: the rank's index among them.
        ranks: these ranks, in order.
    """

    size: int
    index: int
    ranks: range


class Layout(NamedTuple):
    """The number of ranks, and how sequences, weights and states are divided among them.

    Attributes:
        tensor: degree of tensor parallelism, the number of ranks over which a replica's matrices
            are sharded.
        sequence: degree of sequence parallelism, the number of ranks over which a replica's
            sequences are sharded.
        experts: number of ranks over which the experts of a mixture are divided.
        stages: number of ranks over which a replica's layers are divided.
        partitions_weights: whether weights are partitioned over ranks (ZeRO-3).
        shard_within: number of ranks in each group that together hold all optimizer states; 0: all
            ranks form one group.
    """

    world_size: int
    tensor: int = 1
    sequence: int = 1
    partitions_weights: bool = False
    shard_within: int = 0
    experts: int = 1
    stages: int = 1

    def axis(self, name: str, rank: int = 0) -> Axis:
        """Return a rank's place on an axis."""
        alike = self.world_size // self.tensor // self.stages  # ranks with the same matrices
        replicas = self.world_size // self.replica_size
        shards = self.shard_within or alike
        stride, size = {  # between neighbours; number of ranks
            "tensor": (1, self.tensor),
            "sequence": (1, self.sequence),
            "stages": (replicas, self.stages),
            "data": (self.replica_size // self.stages, replicas),
            "zero": (self.tensor, alike),
            "shards": (self.tensor, shards),
            "copies": (self.tensor * shards, alike // shards),
            "experts": (1, self.experts),
            "expert_copies": (self.experts, alike // self.experts),
            "all": (1, self.world_size),
        }[name]
        index = rank // stride % size
        first = rank - index * stride
        return Axis(size, index, range(first, first + size * stride, stride))

    @property
    def copies(self) -> int:
        """Number of groups that each hold a copy of all optimizer states."""
        return self.axis("copies").size

    @property
    def shards(self) -> int:
        """Number of ranks over which ZeRO partitions one copy of the states."""
        return self.axis("shards").size

    @property
    def ranks_per_copy(self) -> int:
        """Number of ranks that together hold one copy of all optimizer states."""
        return self.world_size // self.copies

    @property
    def replica_size(self) -> int:
        """Number of ranks in a replica."""
        return self.tensor * self.sequence * self.stages

    @property
    def replicas(self) -> int:
        """Number of replicas among which the sequences of a batch are divided."""
        return self.axis("data").size

    @property
    def forms(self) -> list[str]:
        """The axes on which the ranks of a replica divide its matrices or sequences."""
        return [name for name in ("tensor", "sequence") if self.axis(name).size > 1]

    @property
    def gradient_divisor(self) -> int:
        """The number by which DeepSpeed divides the sum of all ranks' gradients.

        Stages 1 and 2 divide by the number of replicas (the size of the data-parallel group, or the
        number of ranks divided by the degree of sequence parallelism). Stage 3 ignores sequence
        parallelism and divides by the number of ranks (`reduce_scatter_coalesced`).
        """
        return self.world_size if self.partitions_weights else self.replicas

    def stage_of(self, rank: int) -> str:
        """Return which pipeline stage a rank is, `1 of 2` for the first; "" without stages."""
        stage = self.axis("stages", rank)
        return f"{stage.index + 1} of {stage.size}" if stage.size > 1 else ""

    def leads_replica(self, rank: int) -> bool:
        """Return whether a rank is the first of its replica, whose sequences it counts."""
        names = ("tensor", "sequence", "stages")
        return all(self.axis(name, rank).index == 0 for name in names)

    def counts_losses(self, rank: int) -> bool:
        """Return whether a rank's losses count towards the totals over all ranks.

        The tensor-parallel ranks of a replica compute the same losses, which count once. Of stages,
        only the last computes losses.
        """
        is_last = self.axis("stages", rank).index == self.stages - 1
        return is_last and self.axis("tensor", rank).index == 0

    def counts_parameter(self, rank: int, is_divided: bool) -> bool:
        """Return whether a rank's values of a parameter count towards the totals over all ranks.

        Args:
            is_divided: whether the parameter is divided over ranks, so that each counts its part.
        """
        return is_divided or self.axis("tensor", rank).index == 0

    def weight_copies(self, divided_over: str | None, rank: int) -> Axis:
        """Return a rank's place among the ranks that store the same values of a parameter.

        Args:
            divided_over: the axis over which the parameter is divided; None if it is complete.
        """
        complete = "all" if self.stages == 1 else "zero"
        copies = {None: complete, "tensor": "zero", "experts": "expert_copies"}
        return self.axis(copies[divided_over], rank)

    def weights_have_copies(self) -> bool:
        """Return whether all ranks store the same weights, except for experts that are divided, or
        all ranks of a pipeline stage.
        """
        return not self.partitions_weights and self.tensor == 1

    def training_shard(self, rank: int) -> tuple[int, int]:
        """Return (index, number of shards) for a rank's share of the training sequences."""
        replicas = self.axis("data", rank)
        return replicas.index, replicas.size

    def evaluation_shard(self, rank: int) -> tuple[int, int]:
        """Return (index, number of shards) for a rank's share of the evaluation sequences.

        Evaluation does not shard sequences: sequence-parallel ranks process different sequences.
        """
        complete = self.axis("zero", rank)
        return complete.index, complete.size

    def describe(self) -> str:
        """Describe the layout for a line with the device count; "" for plain data parallelism."""
        if self.shard_within:
            return f"{self.copies} groups of {self.shards} with all optimizer states"
        parts = "".join(f" x {self.axis(form).size} {form} parallel" for form in self.forms)
        if self.stages > 1:
            parts = f" x {self.stages} stages"
        if self.experts > 1:
            parts += f", experts divided over {self.experts} ranks each"
        return f"{self.replicas} data parallel{parts}" if parts else ""
