"""What pipeline stages are combined with, and what each stage has."""

import math

import pytest
from transformers import AutoConfig

from tests.launching import LLAMA
from zerolm.distributed.layout import Layout
from zerolm.ds_config.profile import Profile
from zerolm.ds_config.rules import rule_problems
from zerolm.model.architecture import parameter_shapes
from zerolm.model.model import Model
from zerolm.model.stages import stage_shapes
from zerolm.parts.settings import RunSettings
from zerolm.plan import memory, stage_rules, stage_share
from zerolm.plan.rank_share import even_layers, shapes_of_stages
from zerolm.plan.stage_share import divide

DEEP = {**LLAMA, "num_hidden_layers": 6}


def found(profile: dict, model: dict | None = None, **settings) -> list[str]:
    profile = {"zero_optimization": {"stage": 1}, "pipeline": {"stages": 2}, **profile}
    config = AutoConfig.for_model(**{**DEEP, **(model or {})})
    given = RunSettings(model_config="m.json", deepspeed_config="ds.json", **settings)
    return [*stage_rules.problems(given, config, Profile.parse(profile, "ds.json"))]


def test_the_accepted_combinations():
    assert found({}) == found({"zero_optimization": {"stage": 2}}) == []
    assert found({"bf16": {"enabled": True}}, gradient_checkpointing="selective") == []
    assert found({}, {"tie_word_embeddings": True}, document_mask=True, ema_tokens=100) == []
    assert found({"pipeline": {"stages": 2, "layers": [4, 2]}}) == []


@pytest.mark.parametrize(
    ("profile", "model", "settings", "words"),
    [
        ({"zero_optimization": {"stage": 3}}, {}, {}, "ZeRO stage 3"),
        ({"zero_optimization": {"stage": 2}}, {"tie_word_embeddings": True}, {}, "Use stage 1"),
        ({"fp16": {"enabled": True}}, {}, {}, "fp16"),
        ({"optimizer": {"type": "Lion"}}, {}, {}, "optimizer.type Lion"),
        (
            {
                "optimizer": {"type": "Muon"}, "bf16": {"enabled": True},
                "data_types": {"grad_accum_dtype": "fp32"},
            }, {}, {}, "Muon at stage 1 in bf16",
        ),
        ({"scheduler": {"type": "WarmupLR"}}, {}, {}, "scheduler"),
        ({"torch_autocast": {"enabled": True}}, {}, {}, "torch_autocast"),
        (
            {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}}, {}, {},
            "offload_optimizer",
        ),
        ({"pipeline": {"stages": 7}}, {}, {}, "6 blocks"),
        ({"pipeline": {"stages": 2, "layers": [4, 4]}}, {}, {}, "has 8 blocks"),
        ({}, {"attention_dropout": 0.1}, {}, "attention_dropout"),
        ({}, {"router_jitter_noise": 0.1}, {}, "router_jitter_noise"),
    ],
)  # fmt: skip
def test_everything_else_is_refused_by_name(profile, model, settings, words):
    [problem] = found(profile, model, **settings)
    assert words in problem and "pipeline.stages" in problem, problem


def test_all_problems_are_found_at_once():
    lines = found({"zero_optimization": {"stage": 3}, "fp16": {"enabled": True}}, shard_within=2)
    assert len(lines) == 3


@pytest.mark.parametrize(
    ("block", "words"),
    [
        (True, "must be an object"),
        ({"stages": 2, "partition": "type"}, "must be an object"),
        ({"stages": "two"}, "positive whole number"),
        ({"stages": 0}, "positive whole number"),
        ({"stages": 3}, "must divide the world size 8"),
        ({"stages": 2, "layers": [6]}, "must be a list of 2"),
        ({"stages": 2, "layers": [6, 0]}, "must be a list of 2"),
    ],
)
def test_a_wrong_block_is_refused(block, words):
    profile = Profile.parse({"zero_optimization": {"stage": 1}, "pipeline": block}, "ds.json")
    [problem] = [
        line for line in rule_problems(profile, on_gpu=True, world_size=8) if "pipeline" in line
    ]
    assert words in problem


def test_too_few_micro_batches_are_refused():
    profile = Profile.parse({"zero_optimization": {"stage": 1}, "pipeline": {"stages": 4}}, "d")
    sizes = {"seq_len": 32, "batch_tokens": 16 * 32}
    layout = Layout(8, stages=4)
    for micro, problems in ((4, 1), (2, 0)):
        settings = RunSettings(micro_batch_size=micro, **sizes)
        assert len([*stage_rules.batch_problems(settings, profile, layout)]) == problems


@pytest.mark.parametrize(
    ("costs", "stages", "last", "layers"),
    [
        ([1] * 8, 4, 0, [2, 2, 2, 2]),
        ([1] * 6, 2, 2, [4, 2]),
        ([1] * 4, 2, 9, [3, 1]),
        ([5, 1, 1, 1, 1, 1], 2, 0, [1, 5]),
        ([1] * 5, 3, 0, None),
    ],
)
def test_the_costliest_stage_costs_as_little_as_possible(costs, stages, last, layers):
    """Compared with all divisions."""
    from itertools import combinations

    def worst(division):
        starts = [sum(division[:n]) for n in range(stages)]
        sums = [sum(costs[a : a + n]) for a, n in zip(starts, division, strict=True)]
        return max([*sums[:-1], sums[-1] + last])

    every = [
        [b - a for a, b in zip((0, *cuts), (*cuts, len(costs)), strict=True)]
        for cuts in combinations(range(1, len(costs)), stages - 1)
    ]
    got = divide([float(cost) for cost in costs], stages, float(last))
    assert worst(got) == min(map(worst, every)) and (layers is None or got == layers)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mixtral"])
@pytest.mark.parametrize("tied", [False, True])
def test_shapes_of_stages_are_those_of_cut_models(kind, tied):
    sizes = {"n_layer": 6, "n_embd": 64, "n_head": 4} if kind == "gpt2" else {}
    values = {**DEEP, **sizes, "model_type": kind, "tie_word_embeddings": tied}
    config = AutoConfig.for_model(**values)
    shapes = parameter_shapes(config)
    for layers in ([3, 3], [1, 2, 3]):
        ours = shapes_of_stages(shapes, layers)
        assert [dict(each) for each in ours] == stage_shapes(config, shapes, layers)
    assert even_layers(shapes, 4) == [2, 2, 1, 1]


def test_states_are_those_of_a_stages_parameters():
    config = AutoConfig.for_model(**DEEP)
    model = Model("m.json", config, parameter_shapes(config))
    profile = Profile.parse({"zero_optimization": {"stage": 1}, "pipeline": {"stages": 2}}, "d")
    resolved = stage_share.with_layers(profile, model, 32, 2)
    assert sum(resolved.stage_layers) == 6
    parts = stage_shapes(config, model.shapes, resolved.stage_layers)
    for stage, own in enumerate(parts):
        states = memory.model_states(model.shapes, resolved, Layout(8, stages=2), stage=stage)
        values = sum(map(math.prod, own.values()))
        assert (states.weights, states.master) == (4 * values, 4 * -(-values // 4))
