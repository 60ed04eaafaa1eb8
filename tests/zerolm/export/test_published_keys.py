"""Exports have the keys of published files that transformers 5 leaves out and others need."""

import json
import math

import pytest
from transformers import CONFIG_MAPPING

from zerolm.export.older_keys import add_older_keys, dropped
from zerolm.model.config_file import load_model_config
from zerolm.model.published_keys import FAMILIES, PERIODS, published_keys
from zerolm.pretrained.source_config import compare

# From the config.json of published models.
PUBLISHED = {
    "apertus": {"mlp_bias": False, "post_norm": False, "qk_norm": True},
    "bamba": {"attn_rotary_emb": 64},  # half of a head; readers rotate the whole head without it
    "bailing_hybrid": {"head_dim": 128, "layer_group_size": 6, "first_k_dense_replace": 2},
    "cohere2": {"rotary_pct": 1.0, "sliding_window_pattern": 4},  # Command R7B
    "deepseek_v2": {"scoring_func": "softmax", "moe_layer_freq": 1},
    "deepseek_v3": {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1},
    "dots3_note_text": {
        "swa_qk_nope_head_dim": 192,
        "swa_head_dim": 256,
        "sliding_window_size": 512,
    },
    "falcon": {"num_kv_heads": 1},  # 7B: one key head; the class has a default of 71
    "fuyu": {"hidden_size": 4096},
    "gemma3": {"vocab_size": 262208},
    "gemma4_text": {"global_head_dim": 512},
    "gemma3_text": {"sliding_window_pattern": 6},
    "gemma4_unified_text": {"moe_intermediate_size": None},
    "glm4_moe": {"head_dim": 42},
    "glm4_moe_lite": {"first_k_dense_replace": 1},
    "gpt2": {"n_ctx": 1024},
    "kimi_linear": {"first_k_dense_replace": 1, "moe_layer_freq": 1, "mla_use_nope": True},
    "lfm2": {"block_dim": 2560},
    "longcat_flash": {"attention_method": "MLA", "zero_expert_type": "identity"},
    "mimo_v2_flash": {"sliding_window_size": 128, "swa_num_key_value_heads": 8},
    "minimax_m2": {"scoring_func": "sigmoid", "shared_intermediate_size": 0, "rotary_dim": 128},
    "qwen3_next": {"full_attention_interval": 4},
    "qwen4_exp_text": {"layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 10},
}


def written(config, directory) -> dict:
    config.save_pretrained(directory)
    add_older_keys(directory, config)
    return json.loads((directory / "config.json").read_text())


@pytest.mark.parametrize("model_type", sorted(FAMILIES.keys() - {"mllama_text_model"}))
def test_an_export_has_the_keys_and_reads_back_the_same(model_type, tmp_path):
    if model_type not in CONFIG_MAPPING:
        pytest.skip("transformers is older than the family")
    config = CONFIG_MAPPING[model_type]()
    values = written(config, tmp_path)
    missing = FAMILIES[model_type](config).keys() - values.keys()
    assert not missing, "transformers reads another model with these keys"
    expected = PUBLISHED.get(model_type, {})
    assert {key: values.get(key) for key in expected} == expected
    again = load_model_config(tmp_path)
    assert not compare(config, "given", again, "export").problems, "--init_from accepts the export"


@pytest.mark.parametrize("model_type", ["bamba", "mamba2", "nemotron_h"])
def test_infinity_is_written_as_in_published_files(model_type, tmp_path):
    values = written(CONFIG_MAPPING[model_type](), tmp_path)
    assert "__float__" not in (tmp_path / "config.json").read_text()
    assert values["time_step_limit"] == [0.0, math.inf]
    assert tuple(load_model_config(tmp_path).time_step_limit) == (0.0, math.inf)


def test_an_export_has_no_layers_for_several_tokens(tmp_path):
    """transformers does not build them, so a reader that expects their weights would fail."""
    given = CONFIG_MAPPING["deepseek_v3"](num_nextn_predict_layers=1)
    assert written(given, tmp_path)["num_nextn_predict_layers"] == 0
    assert not compare(given, "given", load_model_config(tmp_path), "export").problems


def test_parts_of_dbrx_have_the_keys_that_version_4_accepts(tmp_path):
    values = written(CONFIG_MAPPING["dbrx"](), tmp_path)
    assert values["attn_config"].keys() <= {"attn_pdrop", "clip_qkv", "kv_n_heads", "rope_theta"}
    assert values["ffn_config"]["moe_num_experts"] == 4
    assert not {"id2label", "return_dict"} & values["ffn_config"].keys()


@pytest.mark.parametrize("model_type", ["zamba", "zamba2"])
def test_layers_of_zamba_have_the_names_of_version_4(model_type, tmp_path):
    config = CONFIG_MAPPING[model_type](
        num_hidden_layers=2, layers_block_type=["linear_attention", "hybrid"]
    )
    values = written(config, tmp_path)
    assert values["layers_block_type"] == ["mamba", "hybrid"]
    assert load_model_config(tmp_path).layers_block_type == ["linear_attention", "hybrid"]


def test_a_text_part_of_mllama_names_the_kind_of_its_rotary_embeddings(tmp_path):
    default = {"rope_type": "default", "rope_theta": 1e4}
    config = CONFIG_MAPPING["mllama"](text_config={"rope_parameters": default})
    assert written(config, tmp_path)["text_config"]["rope_scaling"] == {"rope_type": "default"}
    again = load_model_config(tmp_path)
    assert not compare(config, "given", again, "export").problems


def test_modernbert_has_the_window_under_both_names(tmp_path):
    """transformers 5 reads `sliding_window` first, version 4 half of `local_attention` only."""
    config = CONFIG_MAPPING["modernbert-decoder"](sliding_window=8)
    values = written(config, tmp_path)
    assert (values["sliding_window"], values["local_attention"]) == (8, 16)
    assert load_model_config(tmp_path).sliding_window == 8


@pytest.mark.parametrize(("model_type", "key"), sorted(PERIODS.items()))
def test_layers_without_a_period_are_named_and_have_no_key_for_it(model_type, key, tmp_path):
    """Readers take a default period where the key is missing, so the export says so."""
    other = "sliding_attention" if key == "sliding_window_pattern" else "linear_attention"
    full, few = "full_attention", {"num_hidden_layers": 4}
    regular = CONFIG_MAPPING[model_type](layer_types=[other, full] * 2, **few)
    regular.save_pretrained(tmp_path)
    assert not add_older_keys(tmp_path, regular)
    config = CONFIG_MAPPING[model_type](layer_types=[full, other, other, full], **few)
    assert key not in published_keys(config)
    config.save_pretrained(tmp_path)
    (notice,) = add_older_keys(tmp_path, config)
    assert f"{model_type}'s layer_types are not periodic, so {key} cannot" in notice


@pytest.mark.parametrize(
    ("family", "kind", "base", "programs"),
    [
        ("llama", "default", 5e5, []),
        ("llama", "llama3", 5e5, ["ctranslate2"]),
        ("gemma", "linear", 1e4, ["ctranslate2", "mlx-lm"]),
        ("gpt_neox", "default", 5e5, ["ctranslate2"]),
        ("gpt_neox", "default", 1e4, []),
        ("phi3", "longrope", 1e4, []),
    ],
)
def test_programs_that_drop_rotary_embeddings_are_named(family, kind, base, programs):
    """As `python -m tests.readers` found with the variants of its models."""
    config = CONFIG_MAPPING[family]()
    config.rope_parameters = {"rope_type": kind, "rope_theta": base}
    assert [line.split()[0] for line in dropped(config)] == programs
