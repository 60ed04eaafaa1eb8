"""The proof of divided experts passes for every fused mixture, and fails for wrong exchanges."""

import pytest
import torch
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.end_to_end.test_expert_parallel import MODELS
from tests.model_families.toy_configs import toy_config
from zerolm.common.errors import Findings
from zerolm.ds_config.profile import Profile
from zerolm.model import experts
from zerolm.model.architecture import ConfigKey, meta_model, num_experts
from zerolm.model.model import Model
from zerolm.parts.settings import RunSettings
from zerolm.preflight import expert_proof
from zerolm.preflight.model_proof import computable_copy
from zerolm.preflight.observed_model import quiet

STAGES = Profile.parse({"zero_optimization": {"stage": 1}, "pipeline": {"stages": 2}}, "ds.json")
# Their experts are a loop of their own, or a product of another shape.
NOT_FUSED = {"dbrx", "doge", "jetmoe", "llama4", "llama4_text", "longcat_flash"}


def proven(config, profile=None) -> list[str]:
    model = Model("m.json", config, {})
    settings = RunSettings(expert_parallel=2, check=True, model_config="m.json")
    return expert_proof.problems(model, settings, Findings(), profile)


@pytest.mark.parametrize("name", MODELS)
def test_divided_experts_have_the_gradients_of_whole_ones(name):
    assert proven(AutoConfig.for_model(**MODELS[name])) == []


@pytest.mark.parametrize("name", MODELS)
def test_stages_with_divided_experts_have_the_gradients_of_a_whole_model(name):
    assert proven(AutoConfig.for_model(**MODELS[name]), STAGES) == []


def test_without_the_flag_or_with_other_problems_nothing_is_computed(monkeypatch):
    monkeypatch.setattr(expert_proof, "differences", None)
    model = Model("m.json", AutoConfig.for_model(**MODELS["mixtral"]), {})
    assert expert_proof.problems(model, RunSettings(check=True), Findings()) == []
    settings = RunSettings(expert_parallel=2, check=True)
    assert expert_proof.problems(model, settings, Findings(["another"])) == []


def test_a_run_that_began_with_whole_experts_is_proven_when_it_divides_them(monkeypatch):
    recorded = {"settings": {}}
    monkeypatch.setattr(expert_proof, "find_run_json", lambda run_dir: recorded)
    monkeypatch.setattr(expert_proof, "was_proven", lambda model, settings: True)
    monkeypatch.setattr(expert_proof, "differences", lambda *_: {"logits": 1.0})
    model = Model("m.json", AutoConfig.for_model(**MODELS["mixtral"]), {})
    settings = RunSettings(expert_parallel=2, run_dir="run")
    assert len(expert_proof.problems(model, settings, Findings())) == 1
    recorded["settings"]["expert_parallel"] = 4
    assert expert_proof.problems(model, settings, Findings()) == []


def scaled(self, hidden_NH, chosen_NK, weights_NK):
    return 1.01 * experts.exchanged(self, hidden_NH, chosen_NK, weights_NK)


def of_own_rows(self, hidden_NH, chosen_NK, weights_NK):
    """Forget that another rank sent rows, whose experts then get no gradient from them."""
    exchange, self.zerolm_exchange = self.zerolm_exchange, lambda rows, *numbers: rows
    try:
        return experts.exchanged(self, hidden_NH, chosen_NK % self.num_experts, weights_NK)
    finally:
        self.zerolm_exchange = exchange


@pytest.mark.parametrize("wrong", [scaled, of_own_rows])
def test_wrong_experts_are_refused_by_name(wrong, monkeypatch):
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    def register() -> None:
        ALL_EXPERTS_FUNCTIONS.register(experts.IMPLEMENTATION, wrong)

    monkeypatch.setattr(experts, "_register", register)
    for profile, words in ((None, "logits"), (STAGES, "in pipeline stages, loss")):
        [line] = proven(AutoConfig.for_model(**MODELS["mixtral"]), profile)
        assert "--expert_parallel: 2: m.json: mixtral" in line and line.endswith("of the flag.")
        assert words in line or "cannot be computed" in line


@pytest.mark.soak
def test_all_fused_mixtures_pass():
    passed, not_fused = {}, set()
    for model_type in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        try:
            config = AutoConfig.for_model(**toy_config(model_type))
            model = meta_model(config)
        except Exception:  # tests/model_families says which cannot be built, and why
            continue
        if not all(num_experts(config)) or not any("expert" in n for n, _ in model.named_modules()):
            continue
        if not experts.expert_modules(model):
            not_fused.add(model_type)
            continue
        with quiet(), torch.random.fork_rng():
            copy = computable_copy(ConfigKey.of(config), 24)
            passed[model_type] = expert_proof.differences(*copy)
    print(f"{len(passed)} pass: {', '.join(passed)}; not fused: {', '.join(sorted(not_fused))}")
    assert {name: wrong for name, wrong in passed.items() if wrong} == {}
    assert len(passed) >= 55 and not_fused <= NOT_FUSED
