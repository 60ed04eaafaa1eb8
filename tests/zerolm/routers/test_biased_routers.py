"""Biases that choose experts: found in every family, and counted once, exactly."""

import importlib.util
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

from tests.feature_problems import problems_of
from tests.model_families.toy_configs import toy_config
from zerolm.model.activation_checkpointing import checkpoint_kwargs
from zerolm.parts.settings import RunSettings
from zerolm.routers.biased_routers import (
    BIASES,
    ExpertLoads,
    biased_routers,
    move_biases_to_buffers,
    unsupported_reason,
    update_biases,
)

TOKENS = 32
USUAL = ("deepseek_v3", "hy_v3", "laguna", "lfm2_moe")  # a bias in the router, the block, ...


def families() -> list[str]:
    """Return the model types whose code names a bias."""
    models = Path(importlib.util.find_spec("transformers").origin).parent / "models"
    named = {
        path.parent.name for path in models.glob("*/modeling_*.py")
        if any(bias in path.read_text() for bias in BIASES)
    }  # fmt: skip
    return sorted(model_type for model_type in CAUSAL if model_type.removesuffix("_text") in named)


def config_of(model_type: str):
    values = toy_config(model_type)
    if model_type == "nemotron_h":
        values.pop("time_step_limit")  # infinite, which JSON does not have
    if model_type == "deepseek_v3":
        values["first_k_dense_replace"] = 1
    return AutoConfig.for_model(values.pop("model_type"), **values)


@pytest.mark.parametrize(
    "model_type",
    [
        pytest.param(name, marks=() if name in USUAL else pytest.mark.soak)
        for name in families()
        if name != "longcat_flash"
    ],
)
def test_the_bias_chooses_the_experts_that_are_counted(model_type) -> None:
    config = config_of(model_type)
    assert unsupported_reason(config) is None
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    move_biases_to_buffers(model)
    names = [name for name, _ in model.named_buffers() if name.endswith(BIASES)]
    routers = biased_routers(model)
    assert sorted(router.name for router in routers) == sorted(names) and names
    loads = ExpertLoads(routers)
    favoured = 3
    for router in routers:
        router.bias.view(-1)[favoured] = 1000.0
    input_ids = torch.randint(8, 500, (1, TOKENS))
    with torch.no_grad():
        model(input_ids=input_ids, use_cache=False)
        assert not loads.counts().any()
        with loads.counting():
            model(input_ids=input_ids, use_cache=False)
    for counts in loads.counts().split(loads.num_experts):
        assert counts[favoured] == TOKENS, "each token has chosen the favoured expert"
        assert counts.sum() % TOKENS == 0 and counts.max() == TOKENS


def test_experts_without_weights_and_routers_without_a_bias_are_refused() -> None:
    assert "zero_expert_num" in str(unsupported_reason(config_of("longcat_flash")))
    settings = RunSettings(
        balance_rate=0.001, compile=True, model_config="m.json",
        origins={"balance_rate": "command line: --balance_rate"},
    )  # fmt: skip
    problems = "\n".join(problems_of(settings, config_of("mixtral"), "cpu"))
    assert "--balance_rate: 0.001, but mixtral has no router with a bias" in problems
    assert "--balance_rate: 0.001 is not supported together with --compile" in problems
    assert not problems_of(RunSettings(balance_rate=0.001), config_of("deepseek_v3"), "cpu")


@pytest.mark.parametrize("recompute", [True, "selective"])
def test_a_recomputed_forward_pass_is_not_counted_again(recompute) -> None:
    model = AutoModelForCausalLM.from_config(config_of("deepseek_v3")).train()
    loads = ExpertLoads(biased_routers(model))
    input_ids = torch.randint(8, 500, (2, TOKENS))

    def count() -> torch.Tensor:
        loads.reset()
        with loads.counting():
            outputs = model(input_ids=input_ids, use_cache=False)
        outputs.logits.sum().backward()
        return loads.counts().clone()

    plain = count()
    old_method = model.gradient_checkpointing_enable  # renamed between 5.17 and 5.23
    enable = getattr(model, "activation_checkpointing_enable", old_method)
    enable(checkpoint_kwargs(recompute))
    assert torch.equal(count(), plain) and plain.sum() > 0


def test_a_bias_moves_towards_the_mean_load() -> None:
    model = AutoModelForCausalLM.from_config(config_of("laguna"))
    move_biases_to_buffers(model)
    [router] = biased_routers(model)
    update_biases([router], [[7, 1, 4, 4]], 0.25)
    update_biases([router], [[0, 0, 0, 1]], 0.25)
    assert router.bias.tolist() == [0.0, 0.5, 0.25, -0.25]
    assert router.bias.dtype == torch.float32
