"""Which sequences each rank has under tensor and sequence parallelism."""

import pytest
import torch

from zerolm.distributed.layout import Layout
from zerolm.distributed.ulysses import shard_batch


@pytest.mark.parametrize(("form", "size"), [("tensor", 2), ("sequence", 2), ("sequence", 4)])
def test_ranks_of_a_replica_are_neighbours_and_every_sequence_is_read_by_one_replica(form, size):
    """The groups of DeepSpeed: a mesh of (replicas, size), row by row."""
    layout = Layout(8, **{form: size})
    mesh = torch.arange(8).view(8 // size, size)
    for rank in range(8):
        row, column = (mesh == rank).nonzero()[0].tolist()
        assert (layout.replica_of(rank), layout.rank_in_replica(rank)) == (row, column)
        assert layout.training_shard(rank) == (row, 8 // size)
        assert layout.contributes(rank) == (form == "sequence" or column == 0)
        whole = (rank, 8) if form == "sequence" else (row, 8 // size)
        assert layout.evaluation_shard(rank) == whole
    assert layout.replicas == layout.gradient_divisor == 8 // size
    assert layout._replace(partitions_weights=True).gradient_divisor == 8, "stage 3"


def test_the_shards_of_a_micro_batch_join_to_the_micro_batch():
    ids = torch.arange(24).view(2, 12)
    batch = {"input_ids": ids, "targets": ids + 1, "sources": torch.zeros(2, dtype=torch.long)}
    shards = [shard_batch(batch, Layout(8, sequence=4), rank) for rank in range(4, 8)]
    for name in ("input_ids", "targets"):
        assert torch.equal(torch.cat([shard[name] for shard in shards], 1), batch[name])
    positions = torch.cat([shard["position_ids"] for shard in shards], 1)
    assert torch.equal(positions, torch.arange(12).expand(2, 12))
    assert all(torch.equal(shard["sources"], batch["sources"]) for shard in shards)
    assert shard_batch(batch, Layout(8, tensor=4), 5) is batch
