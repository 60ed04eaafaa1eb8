"""What `--shard_within` cannot be combined with, and the memory and layout that it gives."""

import json

import pytest

from tests import ROOT
from zerolm.distributed.layout import Layout
from zerolm.ds_config import topology
from zerolm.ds_config.parallel_rules import group_problems
from zerolm.ds_config.profile import Profile
from zerolm.ds_config.topology import layout_of
from zerolm.parts.settings import RunSettings
from zerolm.plan import memory

BF16 = {"bf16": {"enabled": True}}
ZERO1 = json.loads((ROOT / "ds_configs" / "zero1.json").read_text()) | BF16


def grouped(config: dict, size: int | None, world_size: int = 4) -> tuple[Layout, list[str]]:
    settings, profile = RunSettings(shard_within=size), Profile.parse(config, "ds.json")
    problems = group_problems(profile, settings, world_size)
    return layout_of(settings, profile, world_size), problems


def test_groups_of_neighbours_have_a_copy_of_all_states_each():
    layout, problems = grouped(ZERO1, 2, world_size=8)
    assert not problems
    assert layout == Layout(8, shard_within=2)
    assert (layout.shards, layout.copies, layout.replicas) == (2, 4, 8)
    assert layout.describe() == "4 groups of 2 with all optimizer states"
    shapes, profile = {"weight": (512, 64)}, Profile.parse(ZERO1)
    of_pair = memory.model_states(shapes, profile, Layout(2))
    assert memory.model_states(shapes, profile, layout) == of_pair


@pytest.mark.parametrize("size", [None, 4])
def test_one_group_of_all_ranks_is_the_ordinary_case(size):
    layout, problems = grouped(ZERO1, size)
    assert not problems and layout == Layout(4)
    assert (layout.shards, layout.copies) == (4, 1)


def zero(**keys) -> dict:
    return {**ZERO1, "zero_optimization": {"stage": 1, **keys}}


REFUSED = {
    "stage": ({**ZERO1, "zero_optimization": {"stage": 2}}, "needs ZeRO stage 1, but ds.json"),
    "tensor": ({**ZERO1, "tensor_parallel": {"autotp_size": 2}}, "autotp_size. Remove the key"),
    "sequence": ({**ZERO1, "sequence_parallel_size": 2}, "sequence_parallel_size"),
    "fp32": ({**ZERO1, "bf16": {"enabled": False}}, "has the precision fp32"),
    "bf16 sums": ({**ZERO1, "data_types": {}}, "data_types.grad_accum_dtype bf16"),
    "bf16 sent": ({**ZERO1, "communication_data_type": "bf16"}, "communication_data_type bf16"),
    "offload": (zero(offload_optimizer={"device": "cpu"}), "offload_optimizer: cpu"),
    "Muon": ({**ZERO1, "optimizer": {"type": "Muon"}}, "Muon needs complete matrices"),
    "all-reduce": (zero(use_multi_rank_bucket_allreduce=True), "allreduce: true"),
    "scaling": ({**ZERO1, "prescale_gradients": True}, "prescale_gradients"),
}


@pytest.mark.parametrize(("config", "part"), REFUSED.values(), ids=list(REFUSED))
def test_a_refusal_takes_one_line(config, part):
    _, problems = grouped(config, 2)
    [problem] = problems
    assert "--shard_within: 2 " in problem and part in problem and "\n" not in problem
    assert "emove" in problem


def test_a_group_must_divide_the_ranks():
    for size in (3, 8):
        _, [problem] = grouped(ZERO1, size)
        assert problem.endswith(
            f"--shard_within: {size} does not divide the world size 4. Change one of them."
        )


def test_only_another_number_of_shards_is_resharded():
    plain = Profile.parse(ZERO1, "ds.json")
    manifest = {
        "world_size": 4, "zero_stage": 1, "optimizer": topology.optimizer_kind(plain),
        "cut": topology.sharding(plain, Layout(4)),
    }  # fmt: skip
    in_groups = {**manifest, "shards": 2}
    pairs, more_pairs = Layout(4, shard_within=2), Layout(8, shard_within=2)
    assert topology.changes(in_groups, plain, pairs) == []
    assert topology.changes(in_groups, plain, more_pairs) == []
    assert topology.changes(in_groups, plain, Layout(2)) == [], "one of its groups"
    assert topology.changes(in_groups, plain, Layout(4)) == ["shards 2 -> 4"]
    assert topology.changes(manifest, plain, pairs) == ["shards 4 -> 2"]
    assert topology.changes(manifest, plain, Layout(2)) == ["world size 4 -> 2"]
