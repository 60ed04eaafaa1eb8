"""The proof of a cut passes for most families, and fails for wrong cuts."""

import pytest
import torch
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.model_families.toy_configs import toy_config
from zerolm.common.errors import Findings
from zerolm.ds_config.profile import Profile
from zerolm.model import loss, stages
from zerolm.model.architecture import router_loss_coefficient
from zerolm.model.model import Model
from zerolm.parts.settings import RunSettings
from zerolm.preflight import stage_proof

LLAMA = AutoConfig.for_model(**toy_config("llama"))
ROUTED = {"output_router_logits": True, "router_aux_loss_coef": 0.1}
PROFILE = Profile.parse({"zero_optimization": {"stage": 1}, "pipeline": {"stages": 4}}, "ds.json")


def proven(config) -> list[str]:
    settings = RunSettings(check=True, model_config="m.json")
    return stage_proof.problems(Model("m.json", config, {}), settings, PROFILE, Findings())


@pytest.mark.parametrize(
    "kind", ["llama", "gemma2", "gpt2", "granite", "qwen3_moe", "recurrent_gemma"]
)
def test_a_cut_model_has_the_bits_of_a_whole_one(kind):
    assert proven(AutoConfig.for_model(**toy_config(kind))) == []


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
