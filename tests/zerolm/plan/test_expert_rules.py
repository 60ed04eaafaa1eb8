"""What `--expert_parallel` cannot be combined with, and the layout and memory that it gives."""

import json

import pytest
from transformers import AutoConfig

from tests import ROOT
from tests.launching import LLAMA
from zerolm.distributed.layout import Axis, Layout
from zerolm.ds_config.profile import Profile
from zerolm.ds_config.topology import layout_of
from zerolm.parts.settings import RunSettings
from zerolm.plan import memory
from zerolm.plan.expert_rules import host_problems, problems

ZERO1 = json.loads((ROOT / "ds_configs" / "zero1.json").read_text()) | {"bf16": {"enabled": True}}
MIXTRAL = {
    **LLAMA, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip
JETMOE = {"model_type": "jetmoe", "num_local_experts": 8, "num_experts_per_tok": 2}


def found(config: dict, degree: int = 2, model: dict = MIXTRAL, world_size: int = 4, **flags):
    settings = RunSettings(expert_parallel=degree, model_config="m.json", **flags)
    profile = Profile.parse(config, "ds.json")
    model_config = AutoConfig.for_model(**model)
    lines = list(problems(settings, model_config, profile, world_size))
    return layout_of(settings, profile, world_size), lines


def test_neighbours_have_all_experts_and_strided_ranks_the_same():
    layout, lines = found(ZERO1, 2, world_size=8)
    assert not lines and layout == Layout(8, experts=2)
    assert layout.axis("experts", 5) == Axis(2, 1, range(4, 6))
    assert layout.axis("expert_copies", 5) == Axis(4, 2, range(1, 8, 2))
    assert layout.weight_copies("experts", 5) == layout.axis("expert_copies", 5)
    assert layout.replicas == 8, "each rank has its own sequences"
    assert layout.describe() == "8 data parallel, experts divided over 2 ranks each"


def test_a_rank_has_its_experts_and_a_share_of_the_states_of_both_kinds():
    shapes = {"embed.weight": (80, 10), "layers.0.mlp.experts.gate_up_proj": (8, 10, 10)}
    profile = Profile.parse(ZERO1 | {"gradient_accumulation_steps": 1})
    states = memory.model_states(shapes, profile, Layout(8, experts=4))
    assert states.weights == 2 * (800 + 200)
    assert states.master == 4 * (800 // 8 + 200 // 2)
    profile_3 = Profile.parse({**zero(3), "gradient_accumulation_steps": 1})
    states = memory.model_states(shapes, profile_3, Layout(8, experts=4))
    persistent = 2 * (800 + 200)
    assert states.weights == 2 * (800 // 8 + 200 // 2) + persistent
    assert states.master == 4 * (800 // 8 + 200 // 2)
    muon = Profile.parse({**zero(3), "optimizer": {"type": "Muon"}})
    states = memory.model_states(shapes, muon, Layout(8, experts=4))
    assert states.optimizer == 8 * (800 // 8) + 4 * (200 // 2), "moments, momentum"
    sizes = [memory.checkpoint_bytes(shapes, profile, experts=degree) for degree in (1, 4)]
    assert sizes[0] - sizes[1] == 2 * 600, "the weights of other ranks' experts"


def test_each_pipeline_stage_divides_the_experts_of_its_layers():
    staged = {**ZERO1, "pipeline": {"stages": 2}}
    layout, lines = found(staged, 2, world_size=8)
    assert not lines and layout == Layout(8, stages=2, experts=2)
    assert layout.axis("experts", 5) == Axis(2, 1, range(4, 6)), "replicas of a stage"
    assert layout.weight_copies("experts", 5) == Axis(2, 0, range(5, 9, 2))
    assert layout.weight_copies(None, 5) == Axis(4, 1, range(4, 8))
    described = "4 data parallel x 2 stages, experts divided over 2 ranks each"
    assert layout.describe() == described
    layout, [line] = found(staged, 4, world_size=4)
    assert layout == Layout(4, stages=2) and "divided into 2 pipeline stages" in line
    shapes = {
        "embed.weight": (80, 10),
        "layers.0.mlp.experts.gate_up_proj": (8, 10, 10),
        "layers.1.mlp.experts.gate_up_proj": (8, 10, 10),
    }
    profile = Profile.parse({**staged, "gradient_accumulation_steps": 1})
    for stage, dense in ((0, 800), (1, 800)):  # the embeddings are tied
        states = memory.model_states(shapes, profile, Layout(8, stages=2, experts=2), stage=stage)
        assert states.weights == 2 * (dense + 400)
        assert states.master == 4 * (dense // 4 + 400 // 2)
    sizes = [memory.checkpoint_bytes(shapes, profile, experts=degree) for degree in (1, 2)]
    assert sizes[0] - sizes[1] == 2 * 800, "the weights of other ranks' experts"


def zero(stage: int = 1, **keys) -> dict:
    return {**ZERO1, "zero_optimization": {"stage": stage, **keys}}


REFUSED = {
    "hpZ": (zero(3, zero_hpz_partition_size=2), {}, "zero_hpz_partition_size. Remove it"),
    "offload": (zero(2, offload_optimizer={"device": "cpu"}), {}, "offload_optimizer"),
    "fp16": ({**ZERO1, "bf16": {}, "fp16": {"enabled": True}}, {}, "fp16. Use bf16"),
    "Lion": ({**ZERO1, "optimizer": {"type": "Lion"}}, {}, "optimizer.type Lion. Use AdamW"),
    "scheduler": ({**ZERO1, "scheduler": {"type": "WarmupLR"}}, {}, "scheduler. Use --schedule"),
    "scaling": ({**ZERO1, "prescale_gradients": True}, {}, "prescale_gradients. Remove it"),
    "alignment": (zero(parameter_alignment=8), {}, "parameter_alignment. Remove it"),
    "groups": (ZERO1, {"shard_within": 2}, "--shard_within: not supported with"),
    "dense": (ZERO1, {"model": LLAMA}, "m.json: llama is not a mixture of experts"),
    "own loop": (ZERO1, {"model": JETMOE}, "the experts of jetmoe in fused tensors. Use ZeRO-3"),
    "experts": (ZERO1, {"degree": 3, "world_size": 3}, "experts 8 is not divisible by 3"),
    "ranks": (ZERO1, {"world_size": 5}, "does not divide the world size 5"),
}


@pytest.mark.parametrize(("config", "more", "part"), REFUSED.values(), ids=list(REFUSED))
def test_a_refusal_takes_one_line(config, more, part):
    _, lines = found(config, **more)
    [line] = lines
    assert "--expert_parallel" in line and part in line and "\n" not in line


def test_a_group_of_ranks_is_on_one_host():
    settings = RunSettings(expert_parallel=4)
    assert host_problems(settings, 8) == []
    [line] = host_problems(settings, 6)
    assert "--expert_parallel: 4 does not divide the 6 rank(s) of a host" in line
