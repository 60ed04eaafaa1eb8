"""Resolving a DeepSpeed JSON: "auto" as in the Hugging Face Trainer, and the shipped profiles."""

import copy
import inspect
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import ROOT, tracked
from tests.ds_config_checks import check_in_ranks
from tests.zerolm.ds_config.ds_cases import USER, found, notices, resolved, zero
from zerolm.ds_config.profile import Profile

SHIPPED = ROOT / "ds_configs"
# test_host.py has those that need GPU kernels or a disk.
PROFILES = sorted(
    {*tracked("ds_configs/*.json")} - {SHIPPED / "zeropp.json", SHIPPED / "zero3_nvme.json"}
)


@pytest.mark.parametrize("path", PROFILES, ids=lambda path: path.stem)
def test_shipped_profiles_have_no_problems_and_resolve(path):
    profile = Profile.read(path)
    config = profile.json
    assert found(config) == [] and found(config, on_gpu=True) == []
    assert '"auto"' not in json.dumps(resolved(config))
    clipping = 0.0 if profile.uses_muon else 1.0
    assert profile.precision == "bf16" and profile.gradient_clipping == clipping
    assert notices(config, on_gpu=True) == []
    assert str(profile.zero_stage) in path.stem
    assert (profile.optimizer_offload == "cpu") == ("offload" in path.stem)


def test_shipped_profiles_reduce_gradients_exactly(tmp_path):
    """Two real ranks; in bf16 the sum would differ from torch's by 5e-6."""
    configs = {}
    for path in PROFILES:
        sizes = {"micro_batch_size": 8, "accumulation": 1}
        configs[path.stem] = resolved(Profile.read(path).json, **sizes)
        configs[path.stem]["zero_optimization"].update(
            reduce_bucket_size=10_000, sub_group_size=10_000
        )
    worker = Path(__file__).with_name("reduction_worker.py")
    differences = check_in_ranks(worker, tmp_path, configs)
    assert len(differences) == len(PROFILES) and max(differences.values()) < 1e-6, differences


def test_a_users_file_works_unchanged():
    assert found(USER) == []
    result = resolved(USER)
    assert result["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] is True
    assert result["train_batch_size"] == 16
    assert result["optimizer"]["type"] == "AdamW"


def test_auto_is_resolved_as_by_the_hugging_face_trainer():
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
    ours = resolved(auto)
    assert ours.pop("timers") == {"throughput": {"enabled": False}}
    for key in ("torch_adam", "fused"):
        assert ours["optimizer"]["params"].pop(key) is True
    theirs, key = trainer.config["zero_optimization"], "gather_16bit_weights_on_model_save"
    theirs[f"stage3_{key}"] = theirs.pop(key)  # the other name of the key
    assert ours == trainer.config


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_single_rank_does_not_wait_for_communication_that_it_has_not(stage):
    overlapping = zero(stage, overlap_comm=True)
    alone = resolved(overlapping, replicas=1)["zero_optimization"]["overlap_comm"]
    assert alone is (stage == 3)
    assert resolved(overlapping, replicas=2)["zero_optimization"]["overlap_comm"] is True
    converting = overlapping | {"bf16": {"enabled": True}, "communication_data_type": "fp32"}
    exact = resolved(converting, replicas=1)
    assert exact["communication_data_type"] == ("bf16" if stage == 2 else "fp32")
    timed = overlapping | {"timers": {"throughput": {"enabled": True}}}
    assert resolved(timed)["timers"] == {"throughput": {"enabled": True}}


@pytest.mark.parametrize("kind", ["AdamW", "Muon"])
def test_torchs_adam_which_needs_no_compiler_is_used_without_offload(kind):
    def params(config=(), **given):
        optimizer = {"optimizer": {"type": kind, "params": given}}
        return resolved(optimizer | dict(config))["optimizer"]["params"]

    assert params()["torch_adam"] is True and params().get("fused") == (True, None)[kind == "Muon"]
    assert "torch_adam" not in params(zero(2, offload_optimizer={"device": "cpu"}))
    chosen = params(torch_adam=False)
    assert chosen["torch_adam"] is False and "fused" not in chosen


@pytest.mark.parametrize(
    ("kind", "takes"),
    [("Lion", True), ("Muon", True), ("NAdam", True), ("Adagrad", False), ("SGD", False)],
)
def test_every_optimizer_with_betas_gets_them(kind, takes):
    params = resolved({"optimizer": {"type": kind}})["optimizer"]["params"]
    assert params.get("betas") == ([0.9, 0.95] if takes else None)
    given = {"optimizer": {"type": kind, "params": {"betas": [0.5, 0.6]}}}
    assert resolved(given)["optimizer"]["params"]["betas"] == [0.5, 0.6]


def test_the_default_of_gradient_clipping_is_written_out():
    assert resolved({})["gradient_clipping"] == 1.0
    assert resolved({"gradient_clipping": 0})["gradient_clipping"] == 0
    assert resolved(json.loads('{"gradient_clipping": "auto"}'))["gradient_clipping"] == 1.0


def test_an_auto_that_nothing_resolves_is_left_to_deepspeeds_default():
    config = {
        **zero(2, stage3_prefetch_bucket_size="auto", reduce_bucket_size="auto"),
        "data_types": {"keep_in_fp32_modules": "auto"},
    }
    result = resolved(config)
    assert result["zero_optimization"] == {"stage": 2, "reduce_bucket_size": 64 * 64}
    assert result["data_types"] == {"keep_in_fp32_modules": "auto"}, "a value of DeepSpeed's own"
    assert resolved(config, hidden_size=None)["zero_optimization"] == {"stage": 2}


def test_resolving_does_not_change_the_input():
    before = copy.deepcopy(USER)
    resolved(USER)
    assert before == USER


@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        ("WarmupLR", {"warmup_num_steps", "warmup_min_lr", "warmup_max_lr"}),
        (
            "WarmupDecayLR",
            {"warmup_num_steps", "total_num_steps", "warmup_min_lr", "warmup_max_lr"},
        ),
        ("WarmupCosineLR", {"warmup_num_steps", "total_num_steps", "cos_min_ratio"}),
    ],
)
def test_a_scheduler_gets_the_parameters_that_deepspeeds_class_takes(kind, keys):
    from deepspeed.runtime import lr_schedules

    values = resolved({"scheduler": {"type": kind}})["scheduler"]["params"]
    assert set(values) == keys
    assert values.get("cos_min_ratio", 0.1) == pytest.approx(0.1)
    assert keys <= set(inspect.signature(getattr(lr_schedules, kind)).parameters)
