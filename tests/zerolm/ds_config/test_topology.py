"""Differences between a checkpoint's sharding and a run's, and which cannot be resharded."""

import pytest

from zerolm.distributed.layout import Layout
from zerolm.ds_config import topology
from zerolm.ds_config.profile import Profile

ADAMW = {"optimizer": {"type": "AdamW", "params": {}}, "zero_optimization": {"stage": 2}}


def manifest(ds_config: dict, world_size: int = 2, stage: int = 2) -> dict:
    return {
        "world_size": world_size,
        "zero_stage": stage,
        "optimizer": topology.optimizer_kind(Profile.parse(ds_config)),
        "cut": topology.sharding(Profile.parse(ds_config), Layout(world_size)),
    }


def changes(saved: dict, ds_config: dict, world_size: int = 2) -> list[str]:
    return topology.changes(saved, Profile.parse(ds_config), Layout(world_size))


def test_the_same_topology_has_no_changes() -> None:
    assert changes(manifest(ADAMW), ADAMW) == []


def test_all_changes_are_listed_together() -> None:
    offloaded = {
        **ADAMW,
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu"},
            "sub_group_size": 100,
        },
    }
    assert changes(manifest(ADAMW), offloaded, 4) == [
        "world size 2 -> 4",
        "ZeRO stage 2 -> 3",
        "optimizer AdamW, offload none -> AdamW, offload cpu",
        "sub_group_size None -> 100",
    ]
    assert topology.problems(manifest(ADAMW), "MANIFEST.json", Profile.parse(offloaded)) == []


@pytest.mark.parametrize(
    ("saved", "ours", "part"),
    [
        (ADAMW, {**ADAMW, "optimizer": {"type": "Lion"}}, "'AdamW, offload none', but --deep"),
        (
            {"optimizer": {"type": "Muon"}},
            {"optimizer": {"type": "Muon"}},
            "Muon keeps the momentum of full matrices",
        ),
        (
            ADAMW,
            {**ADAMW, "zero_optimization": {"offload_optimizer": {"device": "nvme"}}},
            "states on NVMe cannot be resharded",
        ),
    ],
)
def test_states_that_cannot_be_resharded_are_refused_with_the_reason(saved, ours, part) -> None:
    (problem,) = topology.problems(manifest(saved), "MANIFEST.json", Profile.parse(ours))
    assert problem.startswith("MANIFEST.json: optimizer: ") and part in problem
