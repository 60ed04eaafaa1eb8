"""Valid input becomes a plan, with missing values filled in."""

import copy
import dataclasses
import json
import re

import pytest

from tests.zerolm.preflight.preflight_inputs import command
from zerolm.preflight import check


def test_a_good_command_becomes_a_plan(inputs):
    change = "--data web=3 --data code=1 --val_data val --micro_batch_size 4 --wandb off"
    plan = check.check(command(inputs, change), {"WORLD_SIZE": "2"})
    assert (plan.world_size, plan.settings.micro_batch_size, plan.ds.accumulation) == (2, 4, 2)
    assert plan.batch_schedule.batch_sequences == 16
    assert (plan.total_steps, plan.total_sequences) == (100, 1600)
    assert plan.ds.batch_size == 16 and plan.ds.zero_stage == 2
    assert plan.weights == [3, 1] and plan.source_names == ["web", "code"]
    assert plan.val_sequences == 31 and plan.val_source_names == ["val"]
    assert plan.learning_rate(51200) == pytest.approx(0.1 * plan.settings.learning_rate)
    assert plan.ds.precision == "bf16" and plan.settings.weight_decay == 0.1
    assert json.loads(json.dumps(plan.settings.to_json())) == plan.settings.to_json()
    assert f"{plan.model.num_parameters:,} parameters" in plan.summary()
    assert not (inputs / "run").exists()


def test_default_betas_depend_on_the_optimizer(inputs):
    lion = check.check(command(inputs, "--deepspeed_config lion.json --beta1 0.8"), {})
    assert lion.ds.optimizer.params["betas"] == [0.8, 0.99]
    assert (lion.settings.beta1, lion.settings.beta2) == (0.8, 0.99)
    adagrad = check.check(command(inputs, "--deepspeed_config adagrad.json"), {})
    assert (adagrad.settings.beta1, adagrad.settings.beta2) == (None, None)


def test_sources_without_weights_are_weighted_by_their_tokens(inputs):
    plan = check.check(command(inputs, "--data web --data val"), {})
    assert plan.weights == [20_000, 1000]


@pytest.mark.parametrize("world_size", [1, 2, 8])
def test_batches_and_rates_do_not_depend_on_the_world_size(inputs, world_size):
    change = "---batch_tokens ---total_tokens ---seq_len"
    plan = check.check(command(inputs, change), {"WORLD_SIZE": str(world_size)})
    alone = check.check(command(inputs, change), {})
    assert plan.batch_schedule == alone.batch_schedule
    assert plan.learning_rate == alone.learning_rate
    assert plan.settings.total_tokens == 20 * plan.model.num_parameters
    assert (
        plan.batch_schedule.batch_sequences
        == plan.settings.micro_batch_size * plan.ds.accumulation * world_size
    )


def test_check_plans_for_devices_that_are_not_here(inputs):
    change = "--check --world_size 512 ---batch_tokens --deepspeed_config ds_fixed.json"
    change += " --hardware H100"
    plan = check.check(command(inputs, change), {})
    compiled = check.check(command(inputs, f"{change} --compile"), {})
    kept = [re.search(r"about (.*) of activations", one.summary())[1] for one in (plan, compiled)]
    assert float(kept[1].split()[0]) < float(kept[0].split()[0]) and kept[1][-3:] == kept[0][-3:]
    assert plan.world_size == 512 and plan.batch_schedule.batch_sequences == 2 * 4 * 512
    assert plan.ds.optimizer.params["torch_adam"] is True
    assert "devices               512 x H100, not on this machine\n" in plan.summary()


def test_a_scheduler_in_the_json_replaces_ours(inputs):
    change = "--deepspeed_config ds_scheduler.json ---total_tokens"
    plan = check.check(command(inputs, change), {})
    assert plan.learning_rate is None
    assert (plan.settings.schedule, plan.settings.total_tokens) == ("linear", 25600)
    assert plan.total_steps == 50


def test_total_steps_include_the_batch_ramp(inputs):
    change = "--batch_ramp_start 128 --batch_ramp_tokens 5120"
    plan = check.check(command(inputs, change), {})
    position = steps = 0
    while position < 1600:
        position += plan.batch_schedule(position)
        steps += 1
    assert (plan.total_steps, plan.total_sequences) == (steps, position)


def test_document_masks_select_attention_that_supports_them(inputs):
    plan = check.check(command(inputs, "--document_mask"), {})
    assert plan.settings.attn_implementation == "sdpa"


def test_sliding_windows_work_with_document_masks(inputs):
    words = command(inputs, "--document_mask --model_config mistral.json")
    assert check.check(words, {}).settings.attn_implementation == "sdpa"


def test_a_router_loss_is_a_notice(inputs):
    plan = check.check(command(inputs, "--model_config mixtral.json"), {})
    assert any("output_router_logits is true" in notice for notice in plan.notices)


def test_hosts_with_different_inputs_have_different_fingerprints(inputs):
    plan = check.check(command(inputs, "--val_data val"), {})
    assert plan.fingerprint() == check.check(command(inputs, "--val_data val"), {}).fingerprint()
    model = copy.deepcopy(plan.model.config)
    model.rms_norm_eps *= 2
    other = dataclasses.replace(plan.model, config=model)
    for change in ({"model": other}, {"val_sources": plan.sources}):
        assert dataclasses.replace(plan, **change).fingerprint() != plan.fingerprint()
    names = ("NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe")
    gpus = [dataclasses.replace(plan, device="cuda", device_name=name) for name in names]
    assert gpus[0].fingerprint() != gpus[1].fingerprint()


def test_dropout_is_a_notice(inputs):
    plan = check.check(command(inputs, "--model_config dropout.json"), {})
    assert any("attention_dropout is 0.1" in notice for notice in plan.notices)
