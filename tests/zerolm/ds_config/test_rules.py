"""Refusals and notices about a DeepSpeed JSON; no value causes a traceback."""

import copy

import pytest

from tests.zerolm.ds_config.ds_cases import USER, found, notices, resolved, zero
from zerolm.ds_config import precision
from zerolm.ds_config.implied import implied_settings, implied_token_counts
from zerolm.ds_config.profile import Profile, block
from zerolm.parts.settings import RunSettings

BAD = {
    "a typo at the top": ({"zero_optimisation": {}}, "zero_optimisation", '"zero_optimization"'),
    "a typo inside": (zero(2, overlap_com=True), "zero_optimization.overlap_com", "overlap_comm"),
    "a typo two deep": (
        zero(2, offload_optimizer={"devise": "cpu"}),
        "zero_optimization.offload_optimizer.devise",
        '"device"',
    ),
    "an unread block key": (
        {"optimizer": {"type": "Adam", "param": {}}},
        "optimizer.param",
        '"params"',
    ),
    "parameters that are null": (
        {"optimizer": {"type": "AdamW", "params": None}},
        "optimizer.params: null",
        "must be an object",
    ),
    "parameters in a list": (
        {"scheduler": {"type": "WarmupLR", "params": []}},
        "scheduler.params: []",
        "must be an object",
    ),
    "a wrong type": ({"gradient_clipping": "one"}, 'gradient_clipping: "one"', "number"),
    "a wrong stage": (zero(4), "zero_optimization.stage: 4", "1, 2 or 3"),
    "delayed updates": (zero(2, zenflow={}), "zero_optimization.zenflow", "Remove the block"),
    "an inexact resume": (
        zero(2, load_from_fp32_weights=False),
        "zero_optimization.load_from_fp32_weights: false",
        "Remove the key",
    ),
    "a step on NaN": (
        {"bf16": {"enabled": True, "check_grad_overflow": False}},
        "bf16.check_grad_overflow: false",
        "Remove the key",
    ),
    "accumulation that DeepSpeed leaves to us": (
        {"managed_gradient_accumulation": False},
        "managed_gradient_accumulation: false",
        "Remove the key",
    ),
    "autocast to float16": (
        {"torch_autocast": {"enabled": True, "dtype": "float16"}},
        'torch_autocast.dtype: "float16"',
        '"bfloat16"',
    ),
    "autocast to torch's choice": (
        {"torch_autocast": {"enabled": True}},
        "torch_autocast.dtype: missing",
        '"bfloat16"',
    ),
    "autocast of float16 weights": (
        {
            "torch_autocast": {"enabled": True, "dtype": "bfloat16"},
            "bf16": {"enabled": False},
            "fp16": {"enabled": True},
        },
        "torch_autocast.enabled: true",
        "remove fp16",
    ),
    "a wrong device": (
        zero(2, offload_optimizer={"device": "gpu"}),
        'zero_optimization.offload_optimizer.device: "gpu"',
        "cpu",
    ),
    "8 bits": ({"fp8": {"enabled": True}}, "fp8", "use bf16"),
    "infinity": ({"train_batch_size": float("inf")}, "train_batch_size", "whole number"),
    "a removed block": ({"amp": {"enabled": True}}, "amp", "bf16"),
    "a removed ZeRO key": (zero(3, mics_shard_size=2), "mics_shard_size", "Remove"),
    "param offload below 3": (
        zero(2, offload_param={"device": "cpu"}),
        "zero_optimization.offload_param",
        "ds_configs/zero3_offload.json",
    ),
    "nvme at 2": (
        zero(2, offload_optimizer={"device": "nvme", "nvme_path": "/nvme"}),
        "offload_optimizer.device: nvme",
        "stage 3",
    ),
    "nvme without a path": (
        zero(3, offload_param={"device": "nvme"}),
        "offload_param.nvme_path",
        "directory",
    ),
    "both precisions": (
        {"bf16": {"enabled": True}, "fp16": {"enabled": True}},
        "fp16.enabled: true",
        "bf16.enabled",
    ),
    "fp16 on a CPU": ({"fp16": {"enabled": True}}, "fp16.enabled: true", "bf16"),
    "an unknown optimizer": ({"optimizer": {"type": "AdmW"}}, "optimizer.type: AdmW", '"AdamW"'),
    "Lion on a CPU": ({"optimizer": {"type": "Lion"}}, "optimizer.type: Lion", "AdamW"),
    "Adagrad without offload": (
        {**zero(2), "optimizer": {"type": "Adagrad"}},
        "optimizer.type: Adagrad needs zero_optimization.offload_optimizer",
        "use AdamW",
    ),
    "a class of torch's Adagrad": (
        {
            **zero(3),
            "optimizer": {"type": "torch.optim.Adagrad"},
            "zero_allow_untested_optimizer": True,
        },
        "optimizer.type: torch.optim.Adagrad derives from torch's Adagrad",
        "use AdamW",
    ),
    "an untested optimizer": (
        {**zero(2), "optimizer": {"type": "NAdam"}},
        "optimizer.type: NAdam",
        "zero_allow_untested_optimizer",
    ),
    "a typo of a parameter": (
        {"optimizer": {"type": "AdamW", "params": {"weight_deca": 0.1}}},
        "optimizer.params.weight_deca",
        '"weight_decay"',
    ),
    "max_grad_norm": (
        {"optimizer": {"type": "AdamW", "params": {"max_grad_norm": 1.0}}},
        "optimizer.params.max_grad_norm: 1.0",
        '"gradient_clipping": 1.0',
    ),
    "Muon with clipping": (
        {"optimizer": {"type": "Muon", "params": {"lr": 0.02}}, "gradient_clipping": 1.0},
        "gradient_clipping: 1.0",
        "Set it to 0",
    ),
    "betas of an optimizer without": (
        {
            **zero(2, offload_optimizer={"device": "cpu"}),
            "optimizer": {"type": "Adagrad", "params": {"betas": "auto"}},
        },
        "optimizer.params.betas",
        "Remove",
    ),
    "Muon at stage 3": (
        {
            **zero(3, reduce_scatter=True),
            "optimizer": {"type": "Muon"},
            "gradient_clipping": 0,
        },
        "zero_optimization.reduce_scatter",
        "false",
    ),
    "an unknown scheduler": (
        {"scheduler": {"type": "CosineLR"}},
        "scheduler.type: CosineLR",
        "WarmupCosineLR",
    ),
    "a scheduler without its end": (
        {"scheduler": {"type": "WarmupDecayLR", "params": {}}},
        "scheduler.params.total_num_steps",
        '"auto"',
    ),
    "a typo in the writer": (
        {"checkpoint": {"writer": {"type": "fast", "decopled": True}}},
        "checkpoint.writer.decopled",
        'Did you mean "decoupled"?',
    ),
    "a writer that is neither": (
        {"checkpoint": {"writer": {"decoupled": "maybe"}}},
        'checkpoint.writer.decoupled: "maybe"',
        "Write true or false",
    ),
    "a universal checkpoint": (
        {"checkpoint": {"load_universal": True}},
        "checkpoint.load_universal",
        "Remove the key",
    ),
    "pipelines": ({"pipeline": {"enabled": True}}, "pipeline", "must be an object"),
    "a switch for a block": ({"hybrid_engine": True}, "hybrid_engine: true", "Remove the block"),
    "a world size": ({"data_parallel_size": 1}, "data_parallel_size: 1", "Remove the key"),
    "a timer that is text": ({"timers": {"throughput": "x"}}, 'timers.throughput: "x"', "object"),
    "a typo in a timer": (
        {"timers": {"throughput": {"enable": False}}},
        "timers.throughput.enable",
        '"enabled"',
    ),
    "a switch that is text": (
        {"torch_autocast": {"enabled": "false"}},
        'torch_autocast.enabled: "false" is text, which DeepSpeed reads as true',
        "Write true or false",
    ),
    "no master weights for 16-bit states": (
        {**zero(2), "bf16": {"enabled": True, "bf16_optimizer_states": True}},
        "bf16.bf16_optimizer_states: true needs bf16.bf16_master_weights_and_grads",
        "remove the key",
    ),
    "16-bit master weights without offload": (
        {**zero(2), "bf16": {"enabled": True, "bf16_master_weights_and_grads": 1}},
        "bf16.bf16_master_weights_and_grads: true needs zero_optimization.offload_optimizer",
        "or bf16_optimizer_states",
    ),
    "16-bit master weights of other weights": (
        {**zero(2), "bf16": {"enabled": False, "bf16_master_weights_and_grads": True}},
        "bf16.bf16_master_weights_and_grads: true needs bf16, but the weights are fp32",
        "Remove the key",
    ),
    "weights of another precision": (
        {"bf16": {"enabled": True}, "data_types": {"param_dtype": "half"}},
        'data_types.param_dtype: "fp16", but the weights are bf16',
        "Remove the key",
    ),
    "checkpoints of DataStates": ({"datastates_ckpt": {}}, "datastates_ckpt", "Remove the block"),
    "SuperOffload": (
        zero(3, offload_optimizer={"device": "cpu", "super_offload": True}),
        "offload_optimizer.super_offload: true is not supported: it needs CUDA",
        "Remove the key",
    ),
    "storage without a GPU": ({"aio": {"use_gds": 1}}, "aio.use_gds: true needs a GPU", "Remove"),
    "data efficiency": ({"data_efficiency": {"enabled": True}}, "data_efficiency", "--data"),
    "a secret": ({"comet": {"api_key": "abc"}}, "comet.api_key: a secret", "COMET_API_KEY"),
    "sums of gradients": ({"gradient_allreduce_op": "sum"}, 'gradient_allreduce_op: "sum"', "mean"),
    "quantized weights on a CPU": (
        zero(3, zero_quantized_weights=True),
        "zero_quantized_weights: true",
        "GPU",
    ),
}


@pytest.mark.parametrize(("config", "key", "fix"), BAD.values(), ids=list(BAD))
def test_a_refusal_is_one_line_with_file_key_and_fix(monkeypatch, config, key, fix):
    monkeypatch.setattr(precision, "cpu_has_fp16", lambda: False)
    on_gpu = block(config, "fp16").get("enabled") and "torch_autocast" in config
    problems = found(config, on_gpu=bool(on_gpu))
    assert len(problems) == 1 and "\n" not in problems[0]
    assert problems[0].startswith("ds.json: ") and key in problems[0] and fix in problems[0]


NO_STAGE = [{}, {"zero_optimization": {"overlap_comm": True}}, zero(0), zero("0"), zero(False)]
NO_STAGE += [{"zero_optimization": False}]


@pytest.mark.parametrize("config", NO_STAGE, ids=str)
def test_a_file_without_a_stage_or_with_stage_0_runs_at_stage_1(config):
    assert found(config) == [] and Profile.parse(config).zero_stage == 1
    assert resolved(config)["zero_optimization"]["stage"] == 1
    missing = "stage" not in Profile.parse(config).zero
    told = f"stage {'is missing' if missing else 'is 0'}: using stage 1"
    assert any(told in notice for notice in notices(config))


MUON_EXAMPLE = {  # of DeepSpeed's documentation, docs/_pages/config-json.md
    "optimizer": {
        "type": "Muon",
        "params": {"lr": 0.001, "momentum": 0.9, "weight_decay": 0.0, "muon_lr": 0.001,
                   "ns_method": "gram"},
    },
    "zero_optimization": {"stage": 3, "save_muon_momentum_buffer_in_memory": True},
}  # fmt: skip


def test_deepspeeds_own_muon_example_is_accepted_with_notices_of_what_is_filled_in():
    assert found(MUON_EXAMPLE) == [] and found(MUON_EXAMPLE, on_gpu=True) == []
    told = "\n".join(notices(MUON_EXAMPLE))
    assert "gradient_clipping is missing: using 0" in told
    assert "zero_optimization.reduce_scatter is missing: using false" in told
    result = resolved(MUON_EXAMPLE)
    assert result["gradient_clipping"] == 0
    assert result["zero_optimization"]["reduce_scatter"] is False
    # With it, momentum starts again from zero in a resumed run.
    assert "save_muon_momentum_buffer_in_memory: using false" in told
    assert "save_muon_momentum_buffer_in_memory" not in result["zero_optimization"]
    second = resolved({**MUON_EXAMPLE, "zero_optimization": {"stage": 2}})
    assert "reduce_scatter" not in second["zero_optimization"]


def test_options_that_nothing_reads_are_notices_and_defaults_are_not():
    quiet = {
        "activation_checkpointing": {"partition_activations": False, "number_checkpoints": None},
        "compile": {"deepcompile": False, "offload_parameters": 0},
        "comms_logger": {"enabled": False},
        "csv_monitor": {"enabled": False},
    }
    assert notices({**zero(1), **quiet}) == found({**zero(1), **quiet}) == []
    assert "comms_logger" not in resolved(quiet), "DeepSpeed would collect without being enabled"
    loud = {
        "activation_checkpointing": {"cpu_checkpointing": 1},
        "compile": {"offload_parameters": "true"},
        "comms_logger": {"enabled": "yes"},
    }
    told = notices({**zero(1), **loud})
    assert [line.split()[1].rstrip(":") for line in told] == [
        "activation_checkpointing.cpu_checkpointing", "compile.offload_parameters", "comms_logger"
    ]  # fmt: skip


def test_a_warmup_of_zero_steps_is_no_warmup():
    config = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 0}}}
    assert found(config) == []
    implied, problems = implied_token_counts(
        Profile.parse(config), RunSettings(), lambda steps: steps * 100
    )
    assert problems == [] and implied["warmup_tokens"].value == 0
    # DeepSpeed's scheduler refuses 0.
    assert resolved(config)["scheduler"]["params"]["warmup_num_steps"] == 1
    auto = {"scheduler": {"type": "WarmupLR"}}
    assert resolved(auto, warmup_steps=0)["scheduler"]["params"]["warmup_num_steps"] == 1


MONITORS = {
    "wandb": {"enabled": 1, "project": "ours", "team": "us", "group": "g"},
    "tensorboard": {"enabled": True, "output_path": "logs"},
    "csv_monitor": {"enabled": True},
    "comet": {"enabled": True},
}


def test_deepspeeds_monitors_become_our_trackers():
    assert found(MONITORS) == []
    implied, problems = implied_settings(Profile.parse(MONITORS), seq_len=8, replicas=2)
    assert problems == []
    assert {name: one.value for name, one in implied.items()} == {
        "wandb_project": "ours", "wandb_entity": "us", "wandb_group": "g", "tensorboard": True
    }  # fmt: skip
    assert not MONITORS.keys() & resolved(MONITORS).keys(), "DeepSpeed starts none of its own"
    told = "\n".join(notices(MONITORS))
    for key, instead in (
        ("wandb", "--wandb"),
        ("tensorboard", "tensorboard/"),
        ("csv_monitor", "metrics.jsonl"),
        ("comet", "--wandb or --tensorboard"),
    ):
        assert any(key in line and instead in line for line in told.splitlines())
    off = {key: {**block, "enabled": False} for key, block in MONITORS.items()}
    assert implied_settings(Profile.parse(off), seq_len=8, replicas=2) == ({}, [])


AUTOCAST = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
BF16 = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}


def test_compute_precision_follows_autocast():
    assert Profile.parse(AUTOCAST).precision == "fp32"
    assert Profile.parse(AUTOCAST).compute_precision == "bf16"
    off = {"torch_autocast": {"enabled": False, "dtype": "bfloat16"}}
    assert Profile.parse(off).compute_precision == "fp32"
    assert Profile.parse(BF16).compute_precision == "bf16"


@pytest.mark.parametrize(
    ("config", "world_size", "expected"),
    [
        ({**zero(2), **BF16}, 2, ["reduced in bf16"]),
        ({**zero(2), **BF16}, 1, []),
        ({**zero(2), **BF16, "communication_data_type": "fp32"}, 2, []),
        (zero(2), 2, []),
        ({**zero(2), **AUTOCAST, "communication_data_type": "fp32"}, 2, ["reduced in bf16"]),
        (zero(3, zero_quantized_weights=True), 2, ["zero_quantized_weights: quantizes"]),
    ],
)
def test_inexact_communication_is_a_notice(config, world_size, expected):
    found = notices(config, on_gpu=True, world_size=world_size)
    assert len(found) == len(expected)
    assert all(part in notice for part, notice in zip(expected, found, strict=True))


@pytest.mark.parametrize(
    "value",
    [None, "x", -1, 0, 1.5, [], {}, True, [1], float("inf"), 10**400],
    ids=lambda value: repr(value)[:9],
)
def test_no_value_of_any_key_causes_a_traceback(value):
    """Each key of a large config in turn gets an odd value."""
    config = copy.deepcopy(USER)
    config |= {
        "train_batch_size": 16,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95]}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1, "warmup_num_steps": 5}},
        "checkpoint": {"writer": None, "tag_validation": "Warn"},
        "data_types": {"grad_accum_dtype": "fp32"},
        "tensor_parallel": {"autotp_size": 1},
        "fp16": {"enabled": False},
    }
    for path in leaves(config):
        odd = copy.deepcopy(config)
        parent = odd
        for key in path[:-1]:
            parent = parent[key]
        parent[path[-1]] = value
        found(odd, on_gpu=True)
        found(odd, on_gpu=False)
        implied_settings(Profile.parse(odd), seq_len=8, replicas=2)
        implied_token_counts(Profile.parse(odd), RunSettings(), lambda steps: steps)


def leaves(config, before=()):
    for key, value in config.items():
        yield (*before, key)
        if isinstance(value, dict):
            yield from leaves(value, (*before, key))
