"""The DeepSpeed JSON: its keys against DeepSpeed's source, and the settings that it fixes."""

import inspect
import itertools
import re

import deepspeed.comm
import pytest
import torch
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.constants import BFLOAT16
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.lr_schedules import WarmupDecayLR
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

from tests.zerolm.ds_config.ds_cases import USER, found, resolved, zero
from zerolm.common.errors import ConfigError
from zerolm.ds_config.implied import contradictions, implied_settings, implied_token_counts
from zerolm.ds_config.profile import Profile
from zerolm.ds_config.schema import inner_model
from zerolm.ds_config.topology import layout_of
from zerolm.engine.config_keys import known_keys
from zerolm.parts.parse import parse_settings
from zerolm.parts.settings import RunSettings


@pytest.mark.parametrize("writer", [{"type": "fast", "decoupled": True}, {"type": "python"}])
def test_the_checkpoint_writer_block_sets_async_checkpoint(writer):
    config = {**USER, "checkpoint": {"writer": writer}}
    assert found(config) == []
    implied, problems = implied_settings(Profile.parse(config), seq_len=8, replicas=2)
    assert problems == [] and implied["async_checkpoint"].value is (writer.get("decoupled") is True)
    assert "writer" not in resolved(config)["checkpoint"], "DeepSpeed's own is not used"
    settings, _ = parse_settings(["--no-async_checkpoint"])
    contradicted = contradictions(implied, settings, Profile.parse(config, "ds.json"))
    assert len(contradicted) == (1 if writer.get("decoupled") else 0)


def test_every_top_level_key_that_deepspeed_reads_is_known():
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
    blocks = filter(None, map(inner_model, known_keys().values()))
    inner = {key for block in blocks for key in block.model_fields}
    inner |= {"pipeline_stage", "max_grad_norm", None}
    assert {"train_batch_size", "gradient_clipping", "comms_logger", "hybrid_engine"} <= read
    assert read - inner <= known_keys().keys()


def test_hjson_comments_are_allowed(tmp_path):
    file = tmp_path / "ds.json"
    file.write_text('{\n  # ours\n  "zero_optimization": {"stage": 2} // and theirs\n}')
    assert Profile.read(file).json == zero(2)
    file.write_text('{"zero_optimization": {"stage": 2}')
    with pytest.raises(ConfigError, match=r"ds\.json: cannot be read as JSON"):
        Profile.read(file)


def test_bucket_sizes_are_deepspeeds_where_the_file_has_none():
    ours, theirs = Profile.parse({}).buckets, DeepSpeedZeroConfig()
    assert ours.reduce == theirs.reduce_bucket_size
    assert ours.prefetch == theirs.prefetch_bucket_size
    assert ours.persistence_threshold == theirs.param_persistence_threshold
    assert ours.persistence_limit == theirs.model_persistence_threshold
    assert ours.max_live == theirs.max_live_parameters


def engine_with(config: dict) -> DeepSpeedEngine:
    """Return an engine that has only the configuration, to ask what it decides by it."""
    engine = DeepSpeedEngine.__new__(DeepSpeedEngine)
    torch.nn.Module.__init__(engine)
    engine._config = DeepSpeedConfig({"train_micro_batch_size_per_gpu": 1, **config})
    return engine


DTYPES = ("fp32", "bf16", "fp16")


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("precision", DTYPES)
def test_the_size_of_values_and_the_optimizer_class_are_the_engines(monkeypatch, precision, stage):
    monkeypatch.setattr(deepspeed.comm, "get_rank", lambda: 0)  # for a line of its log
    base_optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])
    for accumulated, sent, device in itertools.product(
        (None, *DTYPES), (None, *DTYPES), ("none", "cpu")
    ):
        config = {
            **zero(stage, offload_optimizer={"device": device}),
            "bf16": {"enabled": precision == "bf16"},
            "fp16": {"enabled": precision == "fp16"},
            "data_types": {"grad_accum_dtype": accumulated},
            "communication_data_type": sent,
        }
        engine, profile = engine_with(config), Profile.parse(config)
        weights, gradients = engine.get_data_types()
        assert profile.weight_bytes == weights.itemsize
        assert profile.gradient_bytes == gradients.itemsize
        assert profile.communication_bytes == engine.communication_data_type.itemsize
        kind = engine._do_optimizer_sanity_check(base_optimizer)
        assert profile.uses_bf16_optimizer is (kind == BFLOAT16)


def test_gradients_of_a_micro_batch_are_kept_where_they_are_not_added_at_once():
    """DeepSpeed's BF16_Optimizer frees them as they come; another optimizer after the pass."""
    bf16, fp32_sums = {"bf16": {"enabled": True}}, {"data_types": {"grad_accum_dtype": "fp32"}}
    late = {"bf16": {"enabled": True, "immediate_grad_update": False}}
    at_once = {"bf16": {"enabled": True, "immediate_grad_update": True}}
    for config, kept in (
        ({**bf16, **fp32_sums}, False), ({**at_once, **fp32_sums}, False),
        ({**late, **fp32_sums}, True), ({"fp16": {"enabled": True}, **fp32_sums}, True),
        (late, False),  # added in the precision of the weights
        ({**late, **fp32_sums, **zero(1, offload_optimizer={"device": "cpu"})}, False),
    ):  # fmt: skip
        assert Profile.parse({**zero(1), **config}).keeps_micro_batch_gradients is kept, config


@pytest.mark.parametrize(
    ("config", "master_bytes", "moment_bytes"),
    [
        ({}, 4, 4),
        ({"bf16": {"enabled": True}}, 4, 4),
        ({"bf16": {"bf16_master_weights_and_grads": True}}, 2, 4),
        ({"bf16": {"bf16_optimizer_states": False}}, 4, 4),
        ({"bf16": {"bf16_master_weights_and_grads": 1, "bf16_optimizer_states": 1}}, 2, 2),
        ({"bfloat16": {"bf16_master_weights_and_grads": 1, "bf16_optimizer_states": 1}}, 2, 2),
        ({"fp16": {"fp16_master_weights_and_grads": True}}, 2, 4),
        ({"fp16": {"fp16_master_weights_and_grads": False}}, 4, 4),
    ],
)
def test_16_bit_master_weights_and_optimizer_states_take_two_bytes_a_value(
    config, master_bytes, moment_bytes
):
    profile = Profile.parse(config)
    assert (profile.master_bytes, profile.moment_bytes) == (master_bytes, moment_bytes)


def test_numbers_in_the_json_become_settings():
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "betas": [0.8, 0.99]}},
    }
    implied, problems = implied_settings(Profile.parse(config), seq_len=10, replicas=3)
    assert not problems
    assert {name: value for name, (value, *_) in implied.items()} == {
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
        implied, problems = implied_token_counts(
            Profile.parse(config), settings, lambda steps: steps * 100
        )
        assert len(problems) == expected
        assert implied["warmup_tokens"].value == 500


@pytest.mark.parametrize("params", [{}, {"warmup_min_lr": "auto"}, {"warmup_min_lr": 1e-5}])
def test_the_learning_rate_of_a_decay_ends_at_the_warm_ups_minimum_as_deepspeeds(params):
    config = {"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_max_lr": 1e-3, **params}}}
    implied, _ = implied_settings(Profile.parse(config), seq_len=8, replicas=2)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    given = resolved(config, total_steps=4, warmup_steps=2)["scheduler"]["params"]
    schedule = WarmupDecayLR(optimizer, **given)
    rates = []
    for _ in range(5):
        schedule.step()
        rates += schedule.get_last_lr()
    assert max(rates) == pytest.approx(implied["learning_rate"].value)
    assert rates[-1] == pytest.approx(implied["min_learning_rate"].value)


@pytest.mark.parametrize(
    ("steps", "tokens", "fits"),
    [(5, 500, True), (5, 401, True), (5, 400, False), (5, 501, False), (5, 0, False),
     (1, 0, True), (1, 100, True), (1, 101, False), (2, 100, False)],
)  # fmt: skip
def test_a_warm_up_in_tokens_must_end_within_the_last_of_its_steps(steps, tokens, fits):
    config = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": steps}}}
    settings, _ = parse_settings(["--warmup_tokens", str(tokens)])
    _, problems = implied_token_counts(Profile.parse(config), settings, lambda step: step * 100)
    assert (problems == []) is fits


def test_a_batch_that_contradicts_itself_is_refused():
    config = {
        "train_batch_size": 32,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
    }
    _, problems = implied_settings(Profile.parse(config), seq_len=1, replicas=2)
    assert len(problems) == 1 and "32" in problems[0] and "= 16" in problems[0]


@pytest.mark.parametrize(
    ("batch", "micro", "accumulation", "found"),
    [  # on three ranks
        (24, None, None, (24, None)),
        (24, 2, None, (24, 2)),
        (24, None, 4, (24, 2)),
        (24, 2, 4, (24, 2)),
        (None, 2, 4, (24, 2)),
        (None, 2, None, (None, 2)),
        (None, None, 4, (None, None)),
        (24, 2, 5, "per_gpu 2 x gradient_accumulation_steps 5 x world size 3"),
        (24, 1, 4, "= 12"),
        (24, None, 5, "must be a multiple of gradient_accumulation_steps 5 x world size 3"),
    ],
)  # fmt: skip
def test_any_two_of_the_three_batch_sizes_give_the_third(batch, micro, accumulation, found):
    given = {
        "train_batch_size": batch,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accumulation,
    }
    config = {key: value for key, value in given.items() if value is not None}
    implied, problems = implied_settings(Profile.parse(config), seq_len=10, replicas=3)
    if isinstance(found, str):
        (problem,) = problems
        assert found in problem and f"train_batch_size: {batch}" in problem
        return
    sizes = [implied[name].value if name in implied else None
             for name in ("batch_tokens", "micro_batch_size")]  # fmt: skip
    assert problems == [] and sizes == [found[0] and 10 * found[0], found[1]]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_only_stage_3_partitions_weights(stage):
    layout = layout_of(RunSettings(), Profile.parse(zero(stage)), 4)
    assert layout.partitions_weights is (stage == 3)
