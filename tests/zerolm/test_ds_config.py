"""DeepSpeed's JSON: its keys against DeepSpeed's source, "auto" against Hugging Face's Trainer."""

import copy
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.launching import environment, free_port, write_json
from zerolm import ds_config, ds_rules
from zerolm.ds_config import (
    block,
    contradictions,
    fixed_settings,
    fixed_tokens,
    load_ds_config,
)
from zerolm.ds_resolve import resolve
from zerolm.ds_rules import rule_notices, rule_problems
from zerolm.ds_schema import BLOCKS, known_keys, schema_problems
from zerolm.errors import ConfigError
from zerolm.flags import parse_settings
from zerolm.settings import Settings

SHIPPED = Path(__file__).parent.parent.parent / "ds_configs"
# Those for a GPU's kernels and for a disk are in test_nvme.py.
PROFILES = sorted(
    {*SHIPPED.glob("*.json")} - {SHIPPED / "zeropp.json", SHIPPED / "zero3_nvme.json"}
)
# The file of a user that must work as it is.
USER = json.loads(
    """{"zero_optimization": {"stage": 3, "overlap_comm": true, "contiguous_gradients": true,
    "sub_group_size": 1e9, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto", "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9, "gather_16bit_weights_on_model_save": true},
    "bf16": {"enabled": true}, "gradient_clipping": 1.0, "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto", "steps_per_print": 100, "wall_clock_breakdown": false}"""
)
SETTINGS = Settings(
    learning_rate=3e-4, min_learning_rate=3e-5, weight_decay=0.1, beta1=0.9, beta2=0.95
)


def found(config, on_gpu=False, world_size=2):
    problems = schema_problems(config, "ds.json")
    return problems + rule_problems(config, "ds.json", on_gpu=on_gpu, world_size=world_size)


def resolved(config, settings=SETTINGS, **more):
    sizes = {"hidden_size": 64, "micro_batch_size": 2, "accumulation": 4, "replicas": 2}
    steps = {"warmup_steps": 5, "total_steps": 100}
    return resolve(config, settings, **{**sizes, **steps, "on_gpu": True, **more})


def zero(stage, **more):
    return {"zero_optimization": {"stage": stage, **more}}


@pytest.mark.parametrize("writer", [{"type": "fast", "decoupled": True}, {"type": "python"}])
def test_the_checkpoint_writer_decides_what_training_waits_for(writer):
    config = {**USER, "checkpoint": {"writer": writer}}
    assert found(config) == []
    fixed, problems = fixed_settings(config, seq_len=8, world_size=2)
    assert problems == [] and fixed["async_checkpoint"].value is (writer.get("decoupled") is True)
    assert "writer" not in resolved(config)["checkpoint"], "DeepSpeed's own is not used"
    settings, _ = parse_settings(["--no-async_checkpoint"])
    contradicted = contradictions(fixed, settings, "ds.json")
    assert len(contradicted) == (1 if writer.get("decoupled") else 0)


def test_every_key_that_deepspeed_reads_at_the_top_is_known():
    from deepspeed.comm import config as comm
    from deepspeed.monitor import config as monitor
    from deepspeed.runtime import config as runtime

    read = set()
    for module in (runtime, comm, monitor):
        source = inspect.getsource(module)
        for name in re.findall(r"(?:_param|param_dict\.get)\((?:param_dict, )?([A-Z_]+)\b", source):
            read.add(getattr(module, name, None))
        read |= set(re.findall(r"(?:param_dict|ds_config)\.get\([\"'](\w+)", source))
        read |= set(re.findall(r"[\"'](\w+)[\"'] in (?:param_dict|ds_config)", source))
    inner = {key for keys in BLOCKS.values() for key in keys} | {"pipeline_stage", "max_grad_norm"}
    inner |= {"writer", "enabled", "dtype", "lower_precision_safe_modules", None}
    assert {"train_batch_size", "gradient_clipping", "comms_logger", "hybrid_engine"} <= read
    assert read - inner <= known_keys()


@pytest.mark.parametrize("path", PROFILES, ids=lambda path: path.stem)
def test_shipped_profiles_have_no_problems_and_resolve(path):
    config = load_ds_config(path)
    assert found(config) == [] and found(config, on_gpu=True) == []
    assert '"auto"' not in json.dumps(resolved(config))
    clipping = 0.0 if ds_config.optimizer_type(config) == "Muon" else 1.0
    assert ds_config.precision(config) == "bf16" and config["gradient_clipping"] == clipping
    assert notices(config, on_gpu=True) == []
    assert str(ds_config.zero_stage(config)) in path.stem
    assert (ds_config.optimizer_offload(config) == "cpu") == ("offload" in path.stem)


def test_shipped_profiles_add_up_gradients_exactly(tmp_path):
    """Two real ranks; in bf16 the sum would differ from torch's by 5e-6."""
    files = []
    for path in PROFILES:
        sizes = {"micro_batch_size": 8, "accumulation": 1, "on_gpu": False}
        config = resolved(load_ds_config(path), **sizes)
        config["zero_optimization"].update(reduce_bucket_size=10_000, sub_group_size=10_000)
        files.append(write_json(tmp_path / path.name, config))
    report, port = tmp_path / "report.json", str(free_port())
    worker = Path(__file__).with_name("reduction_worker.py")
    addresses = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [
        subprocess.Popen(
            [sys.executable, worker, report, *files],
            env=environment(RANK=str(rank), LOCAL_RANK=str(rank), **addresses),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=240)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], outputs[0][-2000:]
    differences = json.loads(report.read_text())
    assert len(differences) == len(PROFILES) and max(differences.values()) < 1e-6, differences


def test_a_users_file_works_as_it_is():
    assert found(USER) == []
    result = resolved(USER)
    assert result["zero_optimization"]["gather_16bit_weights_on_model_save"] is True
    assert result["train_batch_size"] == 16
    assert result["optimizer"]["type"] == "AdamW"


def test_auto_is_resolved_as_the_trainer_of_hugging_face_does():
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    auto = copy.deepcopy(USER)
    auto |= {
        "train_batch_size": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto"},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
        },
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {
                "warmup_min_lr": "auto",
                "warmup_max_lr": "auto",
                "warmup_num_steps": "auto",
                "total_num_steps": "auto",
            },
        },
    }
    trainer = HfTrainerDeepSpeedConfig(copy.deepcopy(auto))
    arguments = SimpleNamespace(
        world_size=2,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4,
        max_grad_norm=1.0,
        learning_rate=3e-4,
        adam_beta1=0.9,
        adam_beta2=0.95,
        adam_epsilon=1e-8,
        weight_decay=0.1,
        save_on_each_node=False,
        fp16=False,
        fp16_full_eval=False,
        bf16=True,
        bf16_full_eval=False,
        get_warmup_steps=lambda steps: 5,
    )
    trainer.trainer_config_process(arguments)
    model = SimpleNamespace(config=SimpleNamespace(hidden_size=64))
    trainer.trainer_config_finalize(arguments, model, num_training_steps=100)
    assert resolved(auto) == trainer.config


def test_adamw_is_torchs_only_on_a_plain_cpu():
    offload = zero(2, offload_optimizer={"device": "cpu"})
    assert resolved(zero(2), on_gpu=False)["optimizer"]["params"]["torch_adam"] is True
    assert "torch_adam" not in resolved(zero(2), on_gpu=True)["optimizer"]["params"]
    assert "torch_adam" not in resolved(offload, on_gpu=False)["optimizer"]["params"]
    chosen = {"optimizer": {"type": "AdamW", "params": {"torch_adam": False}}}
    assert resolved(chosen, on_gpu=False)["optimizer"]["params"]["torch_adam"] is False


@pytest.mark.parametrize(
    ("kind", "takes"),
    [("Lion", True), ("Muon", True), ("NAdam", True), ("Adagrad", False), ("SGD", False)],
)
def test_betas_reach_every_optimizer_that_takes_them(kind, takes):
    params = resolved({"optimizer": {"type": kind}})["optimizer"]["params"]
    assert params.get("betas") == ([0.9, 0.95] if takes else None)
    given = {"optimizer": {"type": kind, "params": {"betas": [0.5, 0.6]}}}
    assert resolved(given)["optimizer"]["params"]["betas"] == [0.5, 0.6]


def test_clipping_that_deepspeed_defaults_in_silence_is_written_down():
    assert resolved({})["gradient_clipping"] == 1.0
    assert resolved({"gradient_clipping": 0})["gradient_clipping"] == 0


def test_resolving_does_not_change_the_input():
    before = copy.deepcopy(USER)
    resolved(USER, on_gpu=False)
    assert before == USER


def test_comments_are_allowed_as_deepspeed_allows_them(tmp_path):
    file = tmp_path / "ds.json"
    file.write_text('{\n  # ours\n  "zero_optimization": {"stage": 2} // and theirs\n}')
    assert load_ds_config(file) == zero(2)
    file.write_text('{"zero_optimization": {"stage": 2}')
    with pytest.raises(ConfigError, match=r"ds\.json: cannot be read as JSON"):
        load_ds_config(file)


def test_numbers_of_the_json_become_settings():
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "betas": [0.8, 0.99]}},
    }
    fixed, problems = fixed_settings(config, seq_len=10, world_size=3)
    assert not problems
    assert {name: value for name, (value, *_) in fixed.items()} == {
        "batch_tokens": 240,
        "micro_batch_size": 2,
        "learning_rate": 1e-3,
        "beta1": 0.8,
        "beta2": 0.99,
    }


def test_step_counts_of_a_scheduler_are_compared_with_tokens():
    params = {"warmup_num_steps": 5, "total_num_steps": 100}
    config = {"scheduler": {"type": "WarmupCosineLR", "params": params}}
    for words, expected in (("--total_tokens 10k", 0), ("--total_tokens 11k", 1), ("", 0)):
        settings, _ = parse_settings(words.split())
        fixed, problems = fixed_tokens(config, settings, lambda steps: steps * 100)
        assert len(problems) == expected
        assert fixed["warmup_tokens"].value == 500


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
    "a wrong type": ({"gradient_clipping": "one"}, "gradient_clipping: one", "number"),
    "a wrong stage": (zero(4), "zero_optimization.stage: 4", "1, 2 or 3"),
    "stage 0": (zero(0), "zero_optimization.stage: 0", "Use 1"),
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
        "torch_autocast.dtype: float16",
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
        "zero_optimization.offload_optimizer.device: gpu",
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
        {"optimizer": {"type": "Adagrad", "params": {"betas": "auto"}}},
        "optimizer.params.betas",
        "Remove",
    ),
    "Muon at stage 3": (
        {**zero(3), "optimizer": {"type": "Muon"}, "gradient_clipping": 0},
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
        {"checkpoint": {"writer": {"decoupled": "yes"}}},
        "checkpoint.writer.decoupled",
        "must be true",
    ),
    "a universal checkpoint": (
        {"checkpoint": {"load_universal": True}},
        "checkpoint.load_universal",
        "Remove the key",
    ),
    "pipelines": ({"pipeline": {"stages": 2}}, "pipeline", "not supported"),
    "data efficiency": ({"data_efficiency": {"enabled": True}}, "data_efficiency", "--data"),
    "a secret": ({"comet": {"api_key": "abc"}}, "comet.api_key: a secret", "COMET_API_KEY"),
    "sums of gradients": ({"gradient_allreduce_op": "sum"}, "gradient_allreduce_op: sum", "mean"),
    "quantized weights on a CPU": (
        zero(3, zero_quantized_weights=True),
        "zero_quantized_weights: true",
        "GPU",
    ),
}


@pytest.mark.parametrize(("config", "key", "fix"), BAD.values(), ids=list(BAD))
def test_what_cannot_run_is_one_line_with_file_key_and_fix(monkeypatch, config, key, fix):
    monkeypatch.setattr(ds_rules, "cpu_has_fp16", lambda: False)
    on_gpu = block(config, "fp16").get("enabled") and "torch_autocast" in config
    problems = found(config, on_gpu=bool(on_gpu))
    assert len(problems) == 1 and "\n" not in problems[0]
    assert problems[0].startswith("ds.json: ") and key in problems[0] and fix in problems[0]


@pytest.mark.parametrize("config", [{}, {"zero_optimization": {"overlap_comm": True}}])
def test_a_file_without_a_stage_is_run_at_stage_1(config):
    assert found(config) == [] and ds_config.zero_stage(config) == 1
    assert resolved(config)["zero_optimization"]["stage"] == 1
    assert any("stage 1" in notice for notice in notices(config))


def notices(config, on_gpu=False, world_size=2):
    return rule_notices(config, "ds.json", on_gpu=on_gpu, world_size=world_size)


AUTOCAST = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
BF16 = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}


def test_arithmetic_is_that_of_autocast():
    assert ds_config.precision(AUTOCAST) == "fp32"
    assert ds_config.compute_precision(AUTOCAST) == "bf16"
    off = {"torch_autocast": {"enabled": False, "dtype": "bfloat16"}}
    assert ds_config.compute_precision(off) == "fp32"
    assert ds_config.compute_precision(BF16) == "bf16"


@pytest.mark.parametrize(
    ("config", "world_size", "said"),
    [
        ({**zero(2), **BF16}, 2, ["in bf16, so the curve"]),
        ({**zero(2), **BF16}, 1, []),
        ({**zero(2), **BF16, "communication_data_type": "fp32"}, 2, []),
        (zero(2), 2, []),
        ({**zero(2), **AUTOCAST, "communication_data_type": "fp32"}, 2, ["in bf16, so the curve"]),
        (zero(3, zero_quantized_weights=True), 2, ["zero_quantized_weights: rounds"]),
    ],
)
def test_what_depends_on_the_world_size_is_a_notice(config, world_size, said):
    heard = notices(config, on_gpu=True, world_size=world_size)
    assert len(heard) == len(said)
    assert all(part in notice for part, notice in zip(said, heard, strict=True))


def test_a_batch_that_contradicts_itself_is_refused():
    config = {
        "train_batch_size": 32,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
    }
    _, problems = fixed_settings(config, seq_len=1, world_size=2)
    assert len(problems) == 1 and "32" in problems[0] and "= 16" in problems[0]


@pytest.mark.parametrize(
    "value",
    [None, "x", -1, 0, 1.5, [], {}, True, [1], float("inf"), 10**400],
    ids=lambda value: repr(value)[:9],
)
def test_no_value_of_any_key_is_a_traceback(value):
    """Each leaf of a large config in turn is replaced by something odd."""
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
        fixed_settings(odd, seq_len=8, world_size=2)
        fixed_tokens(odd, Settings(), lambda steps: steps)


def leaves(config, before=()):
    for key, value in config.items():
        yield (*before, key)
        if isinstance(value, dict):
            yield from leaves(value, (*before, key))
