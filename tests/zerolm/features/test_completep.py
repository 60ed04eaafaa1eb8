"""CompleteP in each family equals multipliers in the forward pass; and what is refused."""

import copy
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.end_to_end import test_completep as end_to_end
from tests.launching import LLAMA, write_json
from tests.zerolm.preflight.preflight_inputs import command, refusal, write_inputs
from zerolm.features import completep
from zerolm.features.completep import FAMILIES, Completep
from zerolm.model.model import Model
from zerolm.optim.parameter_groups import parameter_groups
from zerolm.preflight import check

SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 128, "max_position_embeddings": 64,
    "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MORE = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mixtral": {"num_local_experts": 4},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 32},
    "qwen3_moe": EXPERTS,
    "olmoe": EXPERTS,
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
}
RATE, DECAY = 1e-2, 0.1
FLAGS = "--parametrization completep --base_hidden_size 32 --base_layers 1 --learning_rate 1e-3"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    directory = write_inputs(tmp_path_factory.mktemp("inputs"))
    write_json(directory / "tied.json", {**LLAMA, "tie_word_embeddings": True})
    write_json(directory / "gemma2.json", {**LLAMA, "model_type": "gemma2", "head_dim": 16})
    write_json(directory / "opt.json", {"model_type": "opt", **SIZES, "do_layer_norm_before": False,
        "ffn_dim": 96, "word_embed_proj_dim": 64})  # fmt: skip
    write_json(directory / "narrow.json", {"model_type": "opt", **SIZES, "word_embed_proj_dim": 32,
        "ffn_dim": 96})  # fmt: skip
    write_json(directory / "l2.json", {"optimizer": {"type": "Adam", "params": {
        "adam_w_mode": False}}})  # fmt: skip
    return directory


def model_of(family: str) -> torch.nn.Module:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SIZES, **MORE.get(family, {}))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # also biases and norms
            parameter.add_(torch.randn(parameter.shape) * 0.02)
    return model


def curve(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    losses = []
    tokens = torch.randint(0, SIZES["vocab_size"], (4, 16), generator=torch.manual_seed(1))
    for _ in range(4):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_trains_as_with_multipliers_in_the_forward_pass(family) -> None:
    multiplied = model_of(family)
    moved = copy.deepcopy(multiplied)
    end_to_end.multiply_in_the_forward_pass(multiplied)
    optimizer = end_to_end.optimizer_of(dict(multiplied.named_parameters()), DECAY)
    for group in optimizer.param_groups:
        group["lr"] = RATE * group["ratio"]
    expected = curve(multiplied, optimizer)
    settings = SimpleNamespace(base_hidden_size=48, base_layers=1)
    feature = Completep(SimpleNamespace(model=Model.from_config(moved.config), settings=settings))
    with torch.no_grad():
        for name, factor in feature.initial_factors().items():
            moved.get_parameter(name).mul_(factor)
    options = {"lr": RATE, "eps": end_to_end.EPSILON}
    groups = parameter_groups(moved, DECAY, options, feature.option_factors())
    found = curve(moved, torch.optim.AdamW(groups, **options, betas=(0.9, 0.95)))
    assert found == pytest.approx(expected, rel=1e-6)
    assert expected[0] - expected[-1] > 0.1
    with pytest.raises(KeyError):  # of a parameter without factors, as under another name
        parameter_groups(moved, DECAY, options, dict([*feature.option_factors().items()][1:]))


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ("--base_layers 2", "2 has no effect without --parametrization completep"),
        ("--parametrization completep --learning_rate 1e-3", "needs --base_hidden_size"),
        (FLAGS.replace("--learning_rate 1e-3", ""), "needs --learning_rate"),
        (f"{FLAGS} --model_config tied.json", "ties the embeddings"),
        (f"{FLAGS} --model_config gemma2.json", "which projections of gemma2 end its residual"),
        (f"{FLAGS} --model_config opt.json", "normalizes after each block"),
        (f"{FLAGS} --model_config narrow.json", "unknown kind: model.decoder.project_out.weight"),
        (f"{FLAGS} --deepspeed_config lion.json", "optimizer.type: Lion: the scaling of its step"),
        (f"{FLAGS} --deepspeed_config l2.json", "optimizer.params.adam_w_mode: false"),
        (f"{FLAGS} --deepspeed_config ds_scheduler.json", "one learning rate for all parameters"),
    ],
)
def test_what_completep_does_not_cover_is_refused_with_the_reason(base, flags, reason) -> None:
    problems = refusal(base, flags.strip())
    assert any(reason in line for line in problems), problems


def test_the_plan_has_a_line_for_each_group(base) -> None:
    plan = check.check(command(base, f"{FLAGS} --deepspeed_config fp32.json --base_layers 4"), {})
    lines = {name: line for name, line in plan.derived.items() if name.startswith("completep: ")}
    assert lines["completep: output projection"] == (
        "4 tensors with 24,576 values, initial deviation 0.02828, learning rate 0.001, "
        "decay 0.1, epsilon 5e-09"
    )
    assert len(lines) == 6 and "decay 0," in lines["completep: norm"]
    assert any("effect of gradient_clipping depends" in line for line in plan.notices)
    uneven = check.check(command(base, f"{FLAGS} --base_hidden_size 40"), {}).notices
    assert any("no model of hidden size 40 has heads of 16" in line for line in uneven)
    assert not any("completep" in line for line in check.check(command(base), {}).derived)


def test_weights_of_another_parametrization_or_base_are_refused():
    settings = SimpleNamespace(base_hidden_size=48, base_layers=1)
    same = {"parametrization": "completep", "base_hidden_size": 48, "base_layers": 1}
    for theirs, words in (
        (same, None),
        ({}, "was not trained with it, so its weights have a different scale. Remove --init_from"),
        ({**same, "base_layers": 2}, "--base_layers 1, but runs/a@9 has --parametrization"),
    ):
        initial = SimpleNamespace(source="runs/a@9", parametrization=theirs)
        found = list(completep._source_problems(settings, initial, "run.json: completep"))
        assert len(found) == (words is not None) and all(words in line for line in found)
    assert completep.recorded({"settings": same}) == same
    assert completep.recorded({"settings": {**same, "parametrization": "standard"}}) == {}
