"""Every word that a config.json should take from a list is refused by key if it is another."""

import copy

import pytest
from transformers import CONFIG_MAPPING

from tests.launching import LLAMA, write_json
from tests.model_families.sweep import FAMILIES
from tests.model_families.toy_configs import toy_config
from zerolm.common.errors import ConfigError
from zerolm.model.config_file import load_model_config
from zerolm.model.config_words import FREE, word_problems
from zerolm.model.model import Model

WORDS = {
    "afmoe": ("layer_types",),
    "axk1": ("mlp_layer_types", "hidden_act"),  # an unknown kind would be a dense layer
    "dbrx": ("ffn_config.ffn_act_fn.name",),
    "deepseek_v2": ("topk_method",),
    "emu3": ("text_config.hidden_act",),
    "gemma3_text": ("rope_parameters.full_attention.rope_type", "hidden_activation"),
    "gpt_neo": ("attention_types",),  # an unknown kind would be global
    "gpt2": ("activation_function",),
    "mpt": ("norm_type",),
    "recurrent_gemma": ("block_types",),
    "xlnet": ("attn_type",),
    "zamba": ("layers_block_type",),
    "zamba2": ("rope_parameters.rope_type",),  # without attention, nothing would look it up
}


def with_word(values, path, word):
    *parts, last = path.split(".")
    values = copy.deepcopy(values)
    part = values
    for name in parts:
        part = part[name]
    part[last] = replaced(part[last], word)
    return values


def replaced(value, word):
    return [replaced(value[0], word), *value[1:]] if isinstance(value, list) else word


@pytest.mark.parametrize("family", WORDS)
def test_a_word_that_no_code_knows_is_refused_by_its_key(family, tmp_path):
    for path in WORDS[family]:
        write_json(tmp_path / "m.json", with_word(toy_config(family), path, "wrong_word"))
        with pytest.raises(ConfigError) as refused:
            load_model_config(tmp_path / "m.json")
        (line,) = refused.value.problems
        assert line.startswith(f"{tmp_path}/m.json: {path}: 'wrong_word' is not known to the code")


@pytest.mark.parametrize("dtype", ["load", "int8", "torch.float32", 5, ["float32"], {"": "load"}])
@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_a_dtype_must_be_a_floating_point_dtype_of_torch(key, dtype, tmp_path):
    write_json(tmp_path / "m.json", {**LLAMA, key: dtype})
    with pytest.raises(ConfigError) as refused:
        Model.load(str(tmp_path / "m.json"))
    (line,) = refused.value.problems
    assert f"{key}: {dtype!r} is not a floating-point dtype of torch. Use" in line


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", None])
def test_the_dtypes_of_published_files_are_accepted(dtype, tmp_path):
    for key in ("dtype", "torch_dtype"):
        write_json(tmp_path / "m.json", {**LLAMA, key: dtype})
        Model.load(str(tmp_path / "m.json")).config.to_json_string()


def test_a_kind_of_attention_is_no_kind_of_mlp_layer():
    values = {"mlp_layer_types": ["full_attention", "sparse"]}
    (line,) = word_problems("m.json", CONFIG_MAPPING["axk1"], values).values()
    assert "'full_attention' is not known" in line


def test_no_word_of_a_family_itself_is_refused():
    for family in FAMILIES[::6]:
        values = {key: value for key, value in toy_config(family).items() if "limit" not in key}
        assert not word_problems(family, CONFIG_MAPPING[family], values)


def test_names_of_the_user_are_no_words():
    values = {"languages": ["xx_YY"], "default_language": "xx_YY"}
    assert not word_problems("m.json", CONFIG_MAPPING["xmod"], values)
    assert FREE.search("_name_or_path") and not FREE.search("hidden_act")
