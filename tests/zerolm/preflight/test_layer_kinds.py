"""Models that lack a kind of layer which their family has."""

import pytest
from transformers import CONFIG_MAPPING

from tests.launching import LLAMA
from tests.model_families.toy_configs import toy_config
from zerolm.model.architecture import parameter_shapes
from zerolm.model.model import Model
from zerolm.preflight import layer_kinds
from zerolm.preflight.small_copy import small_copies

NARROW = {key: LLAMA[key] for key in ("hidden_size", "intermediate_size", "vocab_size")}
NARROW |= {"num_attention_heads": 4, "num_key_value_heads": 2}


def config(family, **values):
    return CONFIG_MAPPING[family](**values)


def notices(family, **values):
    return layer_kinds.notices(Model("m.json", config(family, **values), {}))


@pytest.mark.parametrize(
    ("family", "values", "first", "kind"),
    [
        ("gemma3_text", {**NARROW, "head_dim": 16}, 6, 'layer_types "full_attention"'),
        ("smollm3", {**NARROW, "pad_token_id": None}, 4, "no_rope_layers 0"),
        ("cohere2", {**NARROW, "pad_token_id": None}, 4, 'layer_types "full_attention"'),
        ("jamba", {}, 5, 'class of layer "JambaAttentionDecoderLayer"'),
        ("deepseek_v3", {}, 4, 'class of mlp "DeepseekV3MoE"'),
    ],
)
def test_a_kind_of_layer_that_few_layers_lack_is_named(family, values, first, kind):
    (notice,) = notices(family, **values, num_hidden_layers=first - 1)
    default = config(family).num_hidden_layers
    assert notice.startswith(f"m.json: num_hidden_layers: {first - 1}: too few for all kinds of")
    assert f"with its default of {default} layers, some have {kind} (from layer {first})" in notice
    assert notices(family, **values, num_hidden_layers=first) == []


def test_lists_by_layer_that_a_file_sets_are_intended():
    layers = ["sliding_attention", "sliding_attention"]
    assert notices("gemma3_text", **NARROW, num_hidden_layers=2)
    assert notices("gemma3_text", **NARROW, num_hidden_layers=2, layer_types=layers)  # the default
    layers = ["full_attention", "full_attention"]
    assert not notices("gemma3_text", **NARROW, num_hidden_layers=2, layer_types=layers)


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral", "mistral"])
def test_families_of_equal_layers_lack_nothing(family):
    assert notices(family, num_hidden_layers=1) == []


def test_a_nested_text_config_is_read():
    values = toy_config("llama4")
    text = {**values["text_config"], "num_hidden_layers": 3}
    for key in ("layer_types", "no_rope_layers", "moe_layers"):
        text.pop(key, None)
    (notice,) = notices("llama4", text_config=text)
    assert "no_rope_layers 0 (from layer 4)" in notice


def test_small_copies_keep_the_layers_without_positions():
    whole = config("smollm3", pad_token_id=None)
    small = next(small_copies(whole, parameter_shapes(whole))).config
    built = (layer_kinds.layer_kinds(each) for each in (whole, small))
    kinds, copied = (set(each) for each in built)
    assert len(kinds) == len(copied) == 2 and small.num_hidden_layers == 4
