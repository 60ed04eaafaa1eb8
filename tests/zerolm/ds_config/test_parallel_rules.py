"""What tensor and sequence parallelism cannot be combined with, and the memory they save."""

import dataclasses

import pytest
from transformers import AutoConfig

from tests.launching import LLAMA
from zerolm.distributed.layout import Layout
from zerolm.ds_config import topology
from zerolm.ds_config.parallel_rules import ds_problems, model_problems
from zerolm.ds_config.profile import Profile
from zerolm.ds_config.rules import rule_problems
from zerolm.ds_config.topology import layout_of
from zerolm.parts.settings import RunSettings
from zerolm.plan import memory
from zerolm.plan.rank_share import shapes_of_rank

TENSOR = {"tensor_parallel": {"autotp_size": 2}}
SEQUENCE = {"sequence_parallel_size": 2}


def test_without_parallel_groups_every_rank_is_a_replica():
    profile = Profile.parse({"tensor_parallel": {"autotp_size": 0}, "sequence_parallel_size": 1})
    assert ds_problems(profile, 4) == []
    layout = layout_of(RunSettings(), profile, 4)
    assert layout == Layout(4) and layout.describe() == ""
    assert [layout.training_shard(rank) for rank in range(4)] == [(rank, 4) for rank in range(4)]


def test_memory_counts_only_a_ranks_shard_of_each_matrix():
    shapes = {"model.embed_tokens.weight": (512, 64), "q_proj.weight": (64, 64), "norm": (64,)}
    ds = {"zero_optimization": {"stage": 1}, "bf16": {"enabled": False}}
    plain, tensor, sequence = (Profile.parse({**ds, **form}) for form in ({}, TENSOR, SEQUENCE))
    sharded, replicas = shapes_of_rank(shapes, Layout(4, tensor=2))
    assert replicas == 2
    assert sharded == {**shapes, "q_proj.weight": (32, 64)}
    own = memory.model_states(shapes, tensor, Layout(4, tensor=2))
    assert own == memory.model_states(sharded, plain, Layout(2))
    sequences = memory.model_states(shapes, sequence, Layout(4, sequence=2))
    whole = memory.model_states(shapes, plain, Layout(4))
    assert sequences == whole, "ZeRO partitions over all ranks"


def test_tensor_parallel_checkpoints_are_not_resharded():
    ds = {"zero_optimization": {"stage": 2}}
    plain = Profile.parse(ds)
    manifest = {"world_size": 4, "zero_stage": 2, "optimizer": topology.optimizer_kind(plain)}
    for form in (TENSOR, SEQUENCE):
        profile = Profile.parse({**ds, **form})
        layout = layout_of(RunSettings(), profile, 4)
        saved = {**manifest, "cut": topology.sharding(profile, layout)}
        assert topology.changes(saved, profile, layout) == []
        changed = topology.changes(saved, plain, Layout(4))
        found = topology.problems(saved, "M", plain)
        assert len(changed) == len(found) == (1 if form is TENSOR else 0)
    old = {**manifest, "cut": topology.sharding(plain, Layout(4))}
    [problem] = topology.problems(old, "M", Profile.parse({**ds, **TENSOR}))
    assert "tensor_parallel.autotp_size: 1" in problem and problem.endswith("was written with.")


BAD_DS = {
    "no object": ({"tensor_parallel": 2}, "must be an object"),
    "no number": ({"tensor_parallel": {"autotp_size": "two"}}, "positive whole number"),
    "true": ({"sequence_parallel_size": True}, "positive whole number"),
    "does not divide": ({"sequence_parallel_size": 3}, "must divide the world size 4"),
    "both": ({**TENSOR, **SEQUENCE}, "only one set of groups"),
    "stage 3": ({**TENSOR, "zero_optimization": {"stage": 3}}, "needs ZeRO stage 1 or 2, got 3"),
    "other keys": ({"tensor_parallel": {"autotp_size": 2, "tp_overlap_comm": True}}, "tp_overlap"),
    "offload": (
        {**SEQUENCE, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
        "offload_optimizer",
    ),
    "gradients averaged in two ways": (
        {**SEQUENCE, "zero_optimization": {"stage": 3, "reduce_scatter": False}},
        "reduce_scatter, got false",
    ),
    "stage 1 in bf16": (
        {
            **SEQUENCE, "zero_optimization": {"stage": 1}, "bf16": {"enabled": True},
            "data_types": {"grad_accum_dtype": "fp32"},
        },
        "BF16_Optimizer",
    ),
    "an expert group": ({"expert_parallel": {"enabled": True}}, "expert_parallel"),
    "stages": ({"pipeline": {"stages": 3}}, "pipeline.stages: 3 must divide the world size 4"),
    "stages and shards": ({"pipeline": {"stages": 2}, **TENSOR}, "Remove one of them"),
}  # fmt: skip


@pytest.mark.parametrize(("config", "part"), BAD_DS.values(), ids=list(BAD_DS))
def test_refusing_a_ds_config_takes_one_line(config, part):
    [problem] = rule_problems(Profile.parse(config, "ds.json"), on_gpu=False, world_size=4)
    assert problem.startswith("ds.json: ") and part in problem and "\n" not in problem


@pytest.mark.parametrize(
    ("stage", "precision", "accumulation"),
    [(2, "bf16", "fp32"), (1, "bf16", "bf16"), (1, "fp32", "fp32")],
)
def test_sequence_parallelism_is_refused_for_deepspeeds_bf16_optimizer_only(
    stage, precision, accumulation
):
    config = {
        **SEQUENCE, "zero_optimization": {"stage": stage}, precision: {"enabled": True},
        "data_types": {"grad_accum_dtype": accumulation},
    }  # fmt: skip
    config.pop("fp32", None)
    found = rule_problems(Profile.parse(config, "ds.json"), on_gpu=False, world_size=4)
    assert not any("sequence_parallel_size" in problem for problem in found)


def test_all_unsupported_combinations_are_reported_together():
    config = {
        **SEQUENCE, "optimizer": {"type": "Lion"}, "scheduler": {"type": "WarmupLR"},
        "torch_autocast": {"enabled": True, "dtype": "bfloat16"},
        "zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2},
    }  # fmt: skip
    problems = rule_problems(Profile.parse(config, "ds.json"), on_gpu=True, world_size=4)
    found = [line for line in problems if "not supported together" in line]
    assert len(found) == 4
    stage = {"zero_optimization": {"stage": 2}}
    for key, values in (
        ("prescale_gradients", (True, False, None)),
        ("gradient_predivide_factor", (2.0, 1, None)),
    ):
        for value in values:
            profile = Profile.parse({**SEQUENCE, **stage, key: value}, "ds.json")
            problems = rule_problems(profile, on_gpu=False, world_size=4)
            assert any(key in problem for problem in problems) is (value == values[0])


MISTRAL = {**LLAMA, "model_type": "mistral", "sliding_window": 16}
BAD_FLAGS = {
    "an architecture": (TENSOR, {"model_type": "gpt2"}, {}, "not supported for gpt2"),
    "heads": (SEQUENCE, {**LLAMA, "num_key_value_heads": 1}, {}, "num_key_value_heads 1"),
    "a width": (TENSOR, {**LLAMA, "vocab_size": 511}, {}, "must divide vocab_size 511"),
    "compile": (TENSOR, LLAMA, {"compile": True}, "--compile"),
    "AGC": (TENSOR, LLAMA, {"agc": 0.01}, "norms are summed over the ranks"),
    "AGC of slices": (SEQUENCE, LLAMA, {"agc": 0.01}, "norms are summed over the ranks"),
    "qk-clip": (TENSOR, LLAMA, {"qk_clip": 100.0}, "the logits of all heads and tokens"),
    "qk-clip of slices": (SEQUENCE, LLAMA, {"qk_clip": 100.0}, "the logits of all heads"),
    "selective": (SEQUENCE, LLAMA, {"gradient_checkpointing": "selective"}, "Use full"),
    "chunks": (TENSOR, LLAMA, {"loss_chunk_tokens": 8}, "--loss_chunk_tokens"),
    "8 bits": (TENSOR, LLAMA, {"fp8": True}, "replaces the linear layers"),
    "samples": (TENSOR, LLAMA, {"prompts": "x.txt"}, "evaluate an export"),
    "HellaSwag": (TENSOR, LLAMA, {"hellaswag": "x.jsonl"}, "evaluate an export"),
    "CORE": (TENSOR, LLAMA, {"core": "eval_bundle"}, "evaluate an export"),
    "tasks": (TENSOR, LLAMA, {"eval_tasks": ("arc_easy",)}, "evaluate an export"),
    "documents": (SEQUENCE, LLAMA, {"document_mask": True}, "attend across documents"),
    "a window": (SEQUENCE, MISTRAL, {}, "sliding_window 16"),
    "eager": (SEQUENCE, LLAMA, {"attn_implementation": "eager"}, "Use sdpa"),
    "varlen": (SEQUENCE, LLAMA, {"attn_implementation": "varlen"}, "Use sdpa"),
    "odd lengths": (SEQUENCE, LLAMA, {"seq_len": 31}, "must divide"),
}


@pytest.mark.parametrize(("form", "model", "flags", "part"), BAD_FLAGS.values(), ids=BAD_FLAGS)
def test_refusing_a_model_or_a_flag_takes_one_line(form, model, flags, part):
    settings = dict(model)
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    given = dataclasses.replace(RunSettings(deepspeed_config="ds.json", seq_len=32), **flags)

    def found(profile):
        return model_problems(given, config, layout_of(given, profile, 4))

    [problem] = found(Profile.parse(form))
    assert part in problem and "\n" not in problem and problem.endswith(".")
    assert (
        "tensor_parallel.autotp_size" if form is TENSOR else "sequence_parallel_size"
    ) in problem
    assert found(Profile.parse({})) == []
