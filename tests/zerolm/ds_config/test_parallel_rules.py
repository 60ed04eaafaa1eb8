"""Which rank has what, and what tensor and sequence parallelism are refused with."""

import dataclasses

import pytest
import torch
from transformers import AutoConfig

from tests.launching import LLAMA
from zerolm import memory, topology
from zerolm.ds_rules import rule_problems
from zerolm.parallel import Layout, held, layout_of
from zerolm.parallel_rules import model_problems
from zerolm.settings import Settings
from zerolm.ulysses import own_part

TENSOR = {"tensor_parallel": {"autotp_size": 2}}
SEQUENCE = {"sequence_parallel_size": 2}


@pytest.mark.parametrize(("form", "size"), [("tensor", 2), ("sequence", 2), ("sequence", 4)])
def test_ranks_of_a_replica_are_neighbours_and_every_sequence_is_read_by_one_replica(form, size):
    """The groups of DeepSpeed: a mesh of (replicas, size), row by row."""
    layout = Layout(8, **{form: size})
    mesh = torch.arange(8).view(8 // size, size)
    for rank in range(8):
        row, column = (mesh == rank).nonzero()[0].tolist()
        assert (layout.replica(rank), layout.part(rank)) == (row, column)
        assert layout.training_share(rank) == (row, 8 // size)
        assert layout.counts(rank) == (form == "sequence" or column == 0)
        whole = (rank, 8) if form == "sequence" else (row, 8 // size)
        assert layout.evaluation_share(rank) == whole
    assert layout.replicas == layout.averaged_over == 8 // size
    assert layout._replace(partitions_weights=True).averaged_over == 8, "stage 3"


def test_without_either_form_every_rank_is_a_replica():
    layout = layout_of({"tensor_parallel": {"autotp_size": 0}, "sequence_parallel_size": 1}, 4)
    assert layout == Layout(4) and layout.describe() == ""
    assert [layout.training_share(rank) for rank in range(4)] == [(rank, 4) for rank in range(4)]


def test_the_parts_of_a_micro_batch_are_the_micro_batch():
    ids = torch.arange(24).view(2, 12)
    batch = {"input_ids": ids, "targets": ids + 1, "sources": torch.zeros(2, dtype=torch.long)}
    parts = [own_part(batch, Layout(8, sequence=4), rank) for rank in range(4, 8)]
    for name in ("input_ids", "targets"):
        assert torch.equal(torch.cat([part[name] for part in parts], 1), batch[name])
    places = torch.cat([part["position_ids"] for part in parts], 1)
    assert torch.equal(places, torch.arange(12).expand(2, 12))
    assert all(torch.equal(part["sources"], batch["sources"]) for part in parts)
    assert own_part(batch, Layout(8, tensor=4), 5) is batch


def test_memory_counts_the_parts_of_matrices():
    shapes = {"model.embed_tokens.weight": (512, 64), "q_proj.weight": (64, 64), "norm": (64,)}
    ds = {"zero_optimization": {"stage": 1}, "bf16": {"enabled": False}}
    cut, replicas = held(shapes, {**ds, **TENSOR}, 4)
    assert replicas == 2
    assert cut == {**shapes, "q_proj.weight": (32, 64)}
    own = memory.model_states(shapes, {**ds, **TENSOR}, 4)
    assert own == memory.model_states(cut, ds, 2)
    sequences = memory.model_states(shapes, {**ds, **SEQUENCE}, 4)
    assert sequences == memory.model_states(shapes, ds, 4), "ZeRO cuts over all ranks"


def test_a_checkpoint_of_cut_matrices_says_so_and_is_not_cut_anew():
    ds = {"zero_optimization": {"stage": 2}}
    plain = {"world_size": 4, "zero_stage": 2, "optimizer": topology.optimizer_kind(ds)}
    for form in (TENSOR, SEQUENCE):
        saved = {**plain, "cut": topology.cut({**ds, **form})}
        same = {"world_size": 4, "zero_stage": 2, "ds_config": {**ds, **form}}
        assert topology.changes(saved, **same) == []
        changed = topology.changes(saved, **{**same, "ds_config": ds})
        found = topology.problems(saved, "M", ds)
        assert len(changed) == len(found) == (1 if form is TENSOR else 0)
    old = {**plain, "cut": topology.cut(ds)}
    [problem] = topology.problems(old, "M", {**ds, **TENSOR})
    assert "tensor_parallel.autotp_size: 1" in problem and "export" in problem


BAD_DS = {
    "no object": ({"tensor_parallel": 2}, "must be an object"),
    "no number": ({"tensor_parallel": {"autotp_size": "2"}}, "positive whole number"),
    "true": ({"sequence_parallel_size": True}, "positive whole number"),
    "does not divide": ({"sequence_parallel_size": 3}, "must divide the world size 4"),
    "both": ({**TENSOR, **SEQUENCE}, "one set of groups"),
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
    "stages": ({"pipeline": {"stages": 2}}, "pipeline"),
}  # fmt: skip


@pytest.mark.parametrize(("config", "said"), BAD_DS.values(), ids=list(BAD_DS))
def test_what_a_ds_config_cannot_have_is_one_line_with_a_fix(config, said):
    [problem] = rule_problems(config, "ds.json", on_gpu=False, world_size=4)
    assert problem.startswith("ds.json: ") and said in problem and "\n" not in problem


def test_all_that_is_not_supported_beside_it_is_said_at_once():
    config = {
        **SEQUENCE, "optimizer": {"type": "Lion"}, "scheduler": {"type": "WarmupLR"},
        "torch_autocast": {"enabled": True, "dtype": "bfloat16"},
        "zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2},
    }  # fmt: skip
    found = [line for line in rule_problems(config, "ds.json", on_gpu=True, world_size=4)
             if "not supported together" in line]  # fmt: skip
    assert len(found) == 4


MISTRAL = {**LLAMA, "model_type": "mistral", "sliding_window": 16}
BAD_FLAGS = {
    "an architecture": (TENSOR, {"model_type": "gpt2"}, {}, "not supported for gpt2"),
    "heads": (SEQUENCE, {**LLAMA, "num_key_value_heads": 1}, {}, "num_key_value_heads 1"),
    "a width": (TENSOR, {**LLAMA, "vocab_size": 511}, {}, "must divide vocab_size 511"),
    "compile": (TENSOR, LLAMA, {"compile": True}, "--compile"),
    "selective": (SEQUENCE, LLAMA, {"gradient_checkpointing": "selective"}, "Use full"),
    "chunks": (TENSOR, LLAMA, {"loss_chunk_tokens": 8}, "--loss_chunk_tokens"),
    "samples": (TENSOR, LLAMA, {"prompts": "x.txt"}, "evaluate an export"),
    "HellaSwag": (TENSOR, LLAMA, {"hellaswag": "x.jsonl"}, "evaluate an export"),
    "tasks": (TENSOR, LLAMA, {"eval_tasks": ("arc_easy",)}, "evaluate an export"),
    "documents": (SEQUENCE, LLAMA, {"document_mask": True}, "would not be kept apart"),
    "a window": (SEQUENCE, MISTRAL, {}, "sliding_window 16"),
    "eager": (SEQUENCE, LLAMA, {"attn_implementation": "eager"}, "Use sdpa"),
    "odd lengths": (SEQUENCE, LLAMA, {"seq_len": 31}, "must divide"),
}


@pytest.mark.parametrize(("form", "model", "flags", "said"), BAD_FLAGS.values(), ids=BAD_FLAGS)
def test_what_a_model_or_a_flag_cannot_have_is_one_line(form, model, flags, said):
    settings = dict(model)
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    given = dataclasses.replace(Settings(deepspeed_config="ds.json", seq_len=32), **flags)
    [problem] = model_problems(given, config, form, 4)
    assert said in problem and "\n" not in problem and problem.endswith(".")
    assert model_problems(given, config, {}, 4) == []
