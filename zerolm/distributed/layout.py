"""The parallel layout: which ranks share a sequence, and what each of these ranks processes.

    replica    the ranks that share one sequence of the batch; replicas train on other sequences
    tensor     inside a replica each rank has a slice of every large matrix, and all of the sequence
    sequence   inside a replica each rank has all weights, and a slice of the sequence
    shards     ZeRO shards optimizer states over all ranks with the same weights, or over groups of
               neighbours, each of which has a copy of all states

The ranks of a replica are consecutive: rank r is number r % size in replica r // size, as in
DeepSpeed's own groups (`_init_tp_mesh_device`, `initialize_sequence_parallel`, 0.19.8). Without
tensor or sequence parallelism, a replica is one rank. Pure arithmetic;
`zerolm.ds_config.parallel_rules` contains the rules for combinations.
"""

from typing import NamedTuple


class Layout(NamedTuple):
    """The number of ranks, and how sequences, weights and states are divided among them.

    Attributes:
        tensor: degree of tensor parallelism, the number of ranks over which a replica's matrices
            are sharded.
        sequence: degree of sequence parallelism, the number of ranks over which a replica's
            sequences are sharded.
        partitions_weights: whether weights are partitioned over ranks (ZeRO-3).
        shard_within: number of ranks in each group that together hold all optimizer states; 0: all
            ranks form one group.
    """

    world_size: int
    tensor: int = 1
    sequence: int = 1
    partitions_weights: bool = False
    shard_within: int = 0

    @property
    def copies(self) -> int:
        """Number of groups that each hold a copy of all optimizer states."""
        return self.world_size // self.shard_within if self.shard_within else 1

    @property
    def shards(self) -> int:
        """Number of ranks over which ZeRO partitions one copy of the states."""
        return self.world_size // self.tensor // self.copies

    @property
    def replica_size(self) -> int:
        """Number of ranks in a replica."""
        return self.tensor * self.sequence

    @property
    def replicas(self) -> int:
        """Number of replicas among which the sequences of a batch are divided."""
        return self.world_size // self.replica_size

    @property
    def gradient_divisor(self) -> int:
        """The number by which DeepSpeed divides the sum of all ranks' gradients.

        Stages 1 and 2 divide by the number of replicas (the size of the data-parallel group, or the
        number of ranks divided by the degree of sequence parallelism). Stage 3 ignores sequence
        parallelism and divides by the number of ranks (`reduce_scatter_coalesced`).
        """
        return self.world_size if self.partitions_weights else self.replicas

    def replica_of(self, rank: int) -> int:
        """Return the index of the replica that a rank belongs to."""
        return rank // self.replica_size

    def rank_in_replica(self, rank: int) -> int:
        """Return a rank's index within its replica."""
        return rank % self.replica_size

    def contributes(self, rank: int) -> bool:
        """Return whether a rank's sums count towards the totals over all ranks.

        The tensor-parallel ranks of a replica process the same tokens, so only the first rank's
        sums count.
        """
        return self.tensor == 1 or self.rank_in_replica(rank) == 0

    def training_shard(self, rank: int) -> tuple[int, int]:
        """Return (index, number of shards) for a rank's share of the training sequences."""
        return self.replica_of(rank), self.replicas

    def evaluation_shard(self, rank: int) -> tuple[int, int]:
        """Return (index, number of shards) for a rank's share of the evaluation sequences.

        Evaluation does not shard sequences: sequence-parallel ranks process different sequences.
        """
        return self.training_shard(rank) if self.tensor > 1 else (rank, self.world_size)

    def describe(self) -> str:
        """Describe the layout for a line with the device count; "" for plain data parallelism."""
        if self.shard_within:
            return f"{self.copies} groups of {self.shards} with all optimizer states"
        if self.replica_size == 1:
            return ""
        form, size = ("tensor", self.tensor) if self.tensor > 1 else ("sequence", self.sequence)
        return f"{self.replicas} data parallel x {size} {form} parallel"
