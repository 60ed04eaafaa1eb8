"""The proof of a cut passes for most families, and fails for wrong cuts."""

import pytest
import torch
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.model_families.toy_configs import toy_config
from zerolm.common.errors import Findings
from zerolm.ds_config.profile import Profile
from zerolm.model import loss, stages
from zerolm.model.architecture import parameter_shapes, router_loss_coefficient
from zerolm.model.model import Model
from zerolm.parts.settings import RunSettings
from zerolm.plan import stage_rules
from zerolm.preflight import model_proof, stage_proof

LLAMA = AutoConfig.for_model(**toy_config("llama"))
ROUTED = {"output_router_logits": True, "router_aux_loss_coef": 0.1}
ZERO1 = {"zero_optimization": {"stage": 1}}
PROFILE = Profile.parse({**ZERO1, "pipeline": {"stages": 2}}, "ds.json")


def proven(config, layers=(), bf16=False) -> list[str]:
    """Prove the cut into two stages, or with these numbers of blocks."""
    settings = RunSettings(check=True, model_config="m.json", seq_len=32)
    block = {"stages": len(layers) or 2, **({"layers": [*layers]} if layers else {})}
    profile = Profile.parse({**ZERO1, "bf16": {"enabled": bf16}, "pipeline": block}, "ds.json")
    if lines := [*stage_rules.problems(settings, config, profile)]:
        return lines
    model = Model("m.json", config, parameter_shapes(config))
    return stage_proof.problems(model, settings, profile, Findings())


@pytest.mark.parametrize(
    "kind", ["llama", "gemma2", "gpt2", "granite", "qwen3_moe", "recurrent_gemma", "llama4"]
)
def test_a_cut_model_has_the_bits_of_a_whole_one(kind):
    assert proven(AutoConfig.for_model(**toy_config(kind))) == []


def test_stages_expect_float32_states_where_a_bf16_model_has_them(monkeypatch):
    """Mamba adds its residuals in float32."""
    config = AutoConfig.for_model(**toy_config("mamba"))
    assert proven(config, bf16=True) == []
    monkeypatch.setattr(stages.Passed, "in_float32", False)
    [problem] = proven(config, bf16=True)
    assert "sends torch.float32 of shape (2, 24, 64)" in problem and "not torch.bfloat16" in problem


SHARED = ["full", "full", "shared", "shared"] * 2


@pytest.mark.parametrize(("layers", "runs"), [((4, 4), True), ((3, 5), False)])
def test_the_copy_is_cut_where_the_run_cuts_the_model(layers, runs):
    """Layers of GLM's sparse attention use the choice of an earlier one, of their stage."""
    more = {"num_hidden_layers": 8, "layer_types": None, "mlp_layer_types": None}
    config = AutoConfig.for_model(**toy_config("glm_moe_dsa") | more | {"indexer_types": SHARED})
    found = proven(config, layers)
    assert (found == []) is runs and all("Shared DSA layers require" in each for each in found)


def test_a_model_with_random_changes_is_refused(monkeypatch):
    config = AutoConfig.for_model(**toy_config("mixtral") | {"router_jitter_noise": 0.1})
    [problem] = proven(config)
    assert "router_jitter_noise is 0.1" in problem
    monkeypatch.setattr(stage_rules, "problems", lambda *_: ())
    [problem] = proven(config)
    assert "draws other random numbers than a whole model" in problem


def test_another_division_is_proven_again(monkeypatch):
    """A run's record says with which division it was proven."""
    recorded = {"ds_config": {**ZERO1, "pipeline": {"stages": 2, "layers": [2, 2]}}}
    monkeypatch.setattr(stage_proof, "find_run_json", lambda run_dir: recorded)
    monkeypatch.setattr(stage_proof, "was_proven", lambda model, settings: True)
    monkeypatch.setattr(stage_proof, "_wrong", lambda *_: "has been proven")
    config = AutoConfig.for_model(**toy_config("llama") | {"num_hidden_layers": 4})
    model = Model("m.json", config, parameter_shapes(config))
    for layers, expected in (([2, 2], 0), ([3, 1], 1), ([1, 1, 1, 1], 1)):
        block = {"stages": len(layers), "layers": layers}
        profile = Profile.parse({**ZERO1, "pipeline": block}, "ds.json")
        found = stage_proof.problems(model, RunSettings(run_dir="r"), profile, Findings())
        assert len(found) == expected, layers


def test_without_stages_or_with_other_problems_nothing_is_computed(monkeypatch):
    monkeypatch.setattr(stage_proof, "differences", None)
    model, settings = Model("m.json", LLAMA, {}), RunSettings(check=True)
    plain = Profile.parse({"zero_optimization": {"stage": 1}}, "ds.json")
    assert stage_proof.problems(model, settings, plain, Findings()) == []
    assert stage_proof.problems(model, settings, PROFILE, Findings(["another"])) == []


def wrong_states(self, hidden_states, *_, **__):
    """Forget a part of the received states."""
    found = right(self, hidden_states)
    return found * 1.0000002 if torch.is_tensor(found) else found


def of_embeddings(self, hidden_states, *_, **__):
    """Ignore what the previous stage sent."""
    self._stage.received = hidden_states
    return right(self, hidden_states)


right = stages._OtherBlock.forward


@pytest.mark.parametrize("wrong", [wrong_states, of_embeddings])
def test_wrong_cuts_are_refused_by_name(wrong, monkeypatch):
    monkeypatch.setattr(stages._OtherBlock, "forward", wrong)
    [problem] = proven(LLAMA)
    assert ("differ by" in problem) == (wrong is wrong_states) and "pipeline.stages" in problem


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "gpt_oss", "olmoe"])
def test_the_parts_of_a_router_loss_are_the_models_own_loss(kind):
    assert proven(AutoConfig.for_model(**toy_config(kind) | ROUTED)) == []


def test_wrong_parts_of_a_router_loss_are_refused(monkeypatch):
    def of_own_routers(probabilities_E, counts):
        return right_loss(probabilities_E, counts) * 1.001

    right_loss = loss.pooled_balance_loss
    monkeypatch.setattr(loss, "pooled_balance_loss", of_own_routers)
    [problem] = proven(AutoConfig.for_model(**toy_config("mixtral") | ROUTED))
    assert "router loss" in problem and "differ by 1.0e-03" in problem


@pytest.mark.soak
def test_the_families_that_can_be_cut():
    """Of all that can be trained whole, into two stages; in bf16, as most runs."""
    wrong, tried = {}, 0
    for kind in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        found = Findings()
        try:
            config = AutoConfig.for_model(**toy_config(kind))
            model = Model("m.json", config, parameter_shapes(config))
            model_proof.check(model, 32, found)
        except Exception:  # tests/model_families says which cannot be built, and why
            continue
        if not found.problems:
            tried += 1
            if lines := proven(config, bf16=True):
                wrong[kind] = lines[0][:200]
    print(f"{tried - len(wrong)} of {tried} families can be cut", *wrong.items(), sep="\n")
    assert tried - len(wrong) >= 125


@pytest.mark.soak
def test_router_losses_of_all_model_types():
    wrong, tried = {}, 0
    for kind in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        try:
            config = AutoConfig.for_model(**toy_config(kind) | {"output_router_logits": True})
            has_loss = router_loss_coefficient(config)
        except Exception:  # tests/model_families says which cannot be built, and why
            continue
        if has_loss:
            tried += 1
            if lines := proven(config):
                wrong[kind] = lines
    print(f"{tried - len(wrong)} of {tried} pass", wrong)
    assert wrong.keys() <= {"deepseek_v4", "doge", "jetmoe"} and tried >= 26


def test_a_model_that_fails_is_refused():
    [problem] = proven(AutoConfig.for_model(**toy_config("opt")))
    assert "opt" in problem and "Use ZeRO-3" in problem
