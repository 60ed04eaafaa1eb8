"""Which sequences each rank has under tensor and sequence parallelism."""

import pytest
import torch

from zerolm.distributed.layout import Axis, Layout
from zerolm.distributed.ulysses import shard_batch


@pytest.mark.parametrize(("form", "size"), [("tensor", 2), ("sequence", 2), ("sequence", 4)])
def test_ranks_of_a_replica_are_neighbours_and_every_sequence_is_read_by_one_replica(form, size):
    """The groups of DeepSpeed: a mesh of (replicas, size), row by row."""
    layout = Layout(8, **{form: size})
    mesh = torch.arange(8).view(8 // size, size)
    for rank in range(8):
        row, column = (mesh == rank).nonzero()[0].tolist()
        assert layout.axis(form, rank) == Axis(size, column, range(row * size, row * size + size))
        assert layout.axis("data", rank) == Axis(8 // size, row, range(column, 8, size))
        assert layout.leads_replica(rank) == (column == 0)
        assert layout.training_shard(rank) == (row, 8 // size)
        assert layout.counts_losses(rank) == (form == "sequence" or column == 0)
        assert layout.counts_parameter(rank, is_divided=True)
        assert layout.counts_parameter(rank, is_divided=False) == layout.counts_losses(rank)
        whole = (rank, 8) if form == "sequence" else (row, 8 // size)
        assert layout.evaluation_shard(rank) == whole
    assert layout.replicas == layout.gradient_divisor == 8 // size
    assert layout._replace(partitions_weights=True).gradient_divisor == 8, "stage 3"


def test_ranks_with_equal_weights_and_with_equal_states():
    plain, tensor, groups = Layout(8), Layout(8, tensor=2), Layout(8, shard_within=2)
    for rank in range(8):
        assert plain.axis("zero", rank).ranks == plain.axis("shards", rank).ranks == range(8)
        assert tensor.axis("zero", rank).ranks == range(rank % 2, 8, 2)
        pair = range(rank // 2 * 2, rank // 2 * 2 + 2)
        assert groups.axis("shards", rank) == Axis(2, rank % 2, pair)
        assert groups.axis("copies", rank) == Axis(4, rank // 2, range(rank % 2, 8, 2))
        assert list(plain.axis("copies", rank).ranks) == [rank]
    assert [each.weights_have_copies() for each in (plain, tensor, groups)] == [True, False, True]
    assert not Layout(8, partitions_weights=True).weights_have_copies()
    assert [each.ranks_per_copy for each in (plain, tensor, groups)] == [8, 8, 2]
    assert plain.weight_copies(None, 3) == tensor.weight_copies(None, 3) == Axis(8, 3, range(8))
    assert tensor.weight_copies("tensor", 3) == Axis(4, 1, range(1, 8, 2))


def test_ranks_of_a_stage_are_neighbours_and_the_last_stage_counts_losses():
    """A mesh of (stages, replicas), row by row."""
    layout = Layout(8, stages=4)
    mesh = torch.arange(8).view(4, 2)
    for rank in range(8):
        stage, replica = (mesh == rank).nonzero()[0].tolist()
        row = range(stage * 2, stage * 2 + 2)
        assert layout.axis("stages", rank) == Axis(4, stage, range(replica, 8, 2))
        for name in ("data", "zero", "shards"):
            assert layout.axis(name, rank) == Axis(2, replica, row), name
        assert list(layout.axis("copies", rank).ranks) == [rank]
        assert layout.weight_copies(None, rank) == Axis(2, replica, row)
        assert layout.training_shard(rank) == layout.evaluation_shard(rank) == (replica, 2)
        assert layout.leads_replica(rank) == (stage == 0)
        assert layout.counts_losses(rank) == (stage == 3)
        assert layout.stage_of(rank) == f"{stage + 1} of 4" and Layout(8).stage_of(rank) == ""
        assert layout.counts_parameter(rank, is_divided=False), "each stage has its own"
    assert layout.replicas == layout.gradient_divisor == layout.shards == 2
    assert (layout.copies, layout.ranks_per_copy, layout.replica_size) == (1, 8, 4)
    assert layout.weights_have_copies() and layout.forms == []
    assert layout.describe() == "2 data parallel x 4 stages"


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
