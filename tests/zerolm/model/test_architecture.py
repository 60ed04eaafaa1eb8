"""Compared with models of transformers and with published parameter counts."""

import json
import subprocess
import sys

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from tests import ROOT, tracked
from zerolm.common.errors import ConfigError
from zerolm.model.architecture import (
    meta_model,
    num_active_parameters,
    num_parameters,
    parameter_shapes,
    router_loss_coefficient,
)
from zerolm.model.config_file import load_model_config
from zerolm.model.model import Model

SHIPPED = tracked("model_configs/*.json")
LLAMA = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 128}


# As the models' cards, or the checkpoints themselves, have them.
PUBLISHED = {
    "gpt2": 124_439_808,
    "llama-7b": 6_738_415_616,
    "llama-13b": 13_015_864_320,
    "llama-70b": 68_976_648_192,
    "mixtral-8x7b": 46_702_792_704,
    "olmoe-1b-7b": 6_919_161_856,
    "mistral-7b": 7_241_732_096,
    "pythia-160m": 162_322_944,
    "qwen3-0.6b": 596_049_920,
    "llama-160m": 162_417_408,
    "moe-1.6b": 1_581_974_528,  # of our own
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_shipped_configs_have_the_published_parameter_counts(name):
    config = load_model_config(ROOT / "model_configs" / f"{name}.json")
    assert num_parameters(parameter_shapes(config)) == PUBLISHED[name]


# Mixtral 8x7B's card: 12.9 B a token; OLMoE's paper: 1.3 B; the third is a shape of our own.
ACTIVE = {"mixtral-8x7b": 12_879_925_248, "olmoe-1b-7b": 1.3e9, "moe-1.6b": 0.64e9}


@pytest.mark.parametrize("name", ACTIVE)
def test_shipped_mixtures_have_the_stated_active_parameters_and_a_balance_loss(name):
    config = load_model_config(ROOT / "model_configs" / f"{name}.json")
    shapes = parameter_shapes(config)
    assert num_active_parameters(config, shapes) == pytest.approx(ACTIVE[name], rel=0.02)
    assert config.output_router_logits and config.router_aux_loss_coef > 0


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.stem)
def test_shipped_configs_are_accepted_and_name_no_special_tokens(file):
    config = load_model_config(file)
    assert config.bos_token_id is config.eos_token_id is config.pad_token_id is None
    assert config.architectures == [type_name(config)]
    of_other_heads = ("summary_first_dropout", "classifier_dropout")
    dropouts = [key for key in config.to_dict() if "drop" in key and key not in of_other_heads]
    assert all(getattr(config, key) == 0.0 for key in dropouts)


def type_name(config):
    from zerolm.model.architecture import causal_lm_class

    return causal_lm_class(config).__name__


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "llama", "num_key_value_heads": 2},
        {"model_type": "llama", "tie_word_embeddings": True},
        {"model_type": "gpt2"},
        {"model_type": "mixtral", "num_key_value_heads": 2, "num_local_experts": 4},
    ],
    ids=["llama", "llama-tied", "gpt2", "mixtral"],
)
def test_shapes_equal_those_of_the_real_model(changes):
    small = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = AutoConfig.for_model(**small, **changes)
    model = AutoModelForCausalLM.from_config(config)
    shapes = parameter_shapes(config)
    assert shapes == {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert num_parameters(shapes) == model.num_parameters()


def test_measuring_does_not_change_the_config():
    config = AutoConfig.for_model(**LLAMA)
    before = config.to_dict()
    parameter_shapes(config)
    assert config.to_dict() == before


def test_all_parameters_of_a_dense_model_are_active():
    config = AutoConfig.for_model(**LLAMA)
    shapes = parameter_shapes(config)
    assert num_active_parameters(config, shapes) == num_parameters(shapes)


def test_a_config_without_a_buildable_model_is_refused():
    config = AutoConfig.for_model(**LLAMA, hidden_act="sillu")
    with pytest.raises(ConfigError, match=r"cannot be built .*hidden_act: 'sillu' is not known"):
        parameter_shapes(config)
    rope = {"rope_type": "spiral", "rope_theta": 1e4}
    config = AutoConfig.for_model(**LLAMA, rope_parameters=rope)
    with pytest.raises(ConfigError, match=r"rope_parameters.rope_type: 'spiral' is not known"):
        parameter_shapes(config)


def test_a_config_file_without_a_buildable_model_is_named(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**LLAMA, "hidden_act": "sillu"}))
    with pytest.raises(ConfigError) as refused:
        Model.load(str(path))
    assert str(refused.value).startswith(f"{path}: hidden_act: 'sillu' is not known")


def test_the_text_part_of_a_larger_config_can_be_asked_for_its_router_loss():
    """The start check of `--document_mask` has only this part, which names no causal model."""
    assert router_loss_coefficient(AutoConfig.for_model("emu3").get_text_config()) is None


def test_import_is_cheap():
    code = (
        "import sys, zerolm.model.architecture, zerolm.model.flops; print('torch' in sys.modules)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60
    )
    assert ran.stdout.strip() == "False", ran.stderr


@pytest.mark.parametrize(
    "values",
    [
        {"model_type": "llama", "num_hidden_layers": 10_000},
        {"model_type": "mpt", "n_layers": 10_000},
    ],
    ids=lambda values: values["model_type"],
)
def test_a_model_of_too_many_parts_is_refused_while_it_is_built(values):
    """The number of layers may be within its limit, and so may that of experts in each."""
    config = AutoConfig.for_model(**values)
    with pytest.raises(ConfigError, match=r"more than 15,000 modules .* fewer layers"):
        meta_model(config)
