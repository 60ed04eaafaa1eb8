"""Compared with AutoConfig of transformers, and with keys that published config.json files have."""

import json
import re

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from tests.model_families.toy_configs import toy_config
from tests.zerolm.model.test_architecture import LLAMA
from zerolm.common.errors import ConfigError
from zerolm.model.config_file import load_model_config
from zerolm.model.initialization import InitialWeights
from zerolm.model.model import Model


@pytest.fixture
def refusal(tmp_path):
    """Return the problems for which a config.json is refused."""

    def problems(content):
        file = tmp_path / "config.json"
        file.write_text(content if isinstance(content, str) else json.dumps(content))
        with pytest.raises(ConfigError) as refused:
            load_model_config(file)
        assert all(str(file) in problem for problem in refused.value.problems)
        assert all("\n" not in problem for problem in refused.value.problems)
        return refused.value.problems

    return problems


def test_directory_with_a_config_and_keys_of_older_releases_are_accepted(tmp_path):
    published = {
        **LLAMA,
        "_name_or_path": "somewhere",
        "architectures": ["LlamaForCausalLM"],
        "max_sequence_length": 2048,
        "pretraining_tp": 1,
        "rope_scaling": None,
        "rope_theta": 50000.0,
        "torch_dtype": "float16",
        "transformers_version": "4.28.1",
    }
    (tmp_path / "config.json").write_text(json.dumps(published))
    config = load_model_config(tmp_path)
    assert config.rope_parameters["rope_theta"] == 50000.0


def test_published_gpt2_and_neox_spellings_are_accepted(tmp_path):
    gpt2 = {"model_type": "gpt2", "n_ctx": 1024, "n_layer": 2, "task_specific_params": {}}
    neox = {"model_type": "gpt_neox", "rotary_pct": 0.25, "rotary_emb_base": 10000}
    for published in (gpt2, neox):
        (tmp_path / "config.json").write_text(json.dumps(published))
        assert load_model_config(tmp_path).model_type == published["model_type"]


def test_all_problems_are_reported_at_once(refusal):
    problems = refusal({**LLAMA, "hidden_sise": 64, "vocab_size": "many", "num_hidden_layers": 1.5})
    assert len(problems) == 3
    assert any("vocab_size: Field 'vocab_size' expected int, got str" in line for line in problems)
    assert any("num_hidden_layers" in line for line in problems)
    assert any(
        "hidden_sise: LlamaConfig has no such key, and nothing reads it. Did you mean "
        '"hidden_size"?' in line
        for line in problems
    )


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("{", "cannot be read as JSON"),
        ("[]", "[] must be a JSON object"),
        (
            {"modeltype": "llama"},
            'model_type: missing. Name an architecture, for example "llama"',
        ),
        (
            {"model_type": "lama"},
            "model_type: 'lama' is unknown to the installed transformers. Did you mean",
        ),
        ({"model_type": "t5"}, "has no causal language model"),
        (
            {"model_type": "orion", "auto_map": {"AutoModel": "model.Model"}},
            "'orion' is unknown to the installed transformers. The code named in auto_map is",
        ),
        ({"model_type": "gpt2", "n_head": 0}, "num_attention_heads: 0 must be at least 1"),
        ({"model_type": "musicgen"}, "'musicgen' holds several text models"),
        ({**LLAMA, "hidden_size": 65}, "not a multiple of the number of attention heads"),
        ({**LLAMA, "num_key_value_heads": 3}, "must divide num_attention_heads, 4"),
        ({**LLAMA, "num_hidden_layers": 0}, "num_hidden_layers: 0 must be at least 1"),
        ({**LLAMA, "num_hidden_layers": 10**9}, "num_hidden_layers: 1000000000 must be at most"),
        ({**LLAMA, "rms_norm_eps": -1.0}, "rms_norm_eps: -1.0 must not be negative"),
        ({"model_type": "mixtral", "num_experts_per_tok": 9}, "must be from 1 to 8"),
    ],
)
def test_unusable_configs_are_refused(refusal, content, complaint):
    problems = refusal(content)
    assert len(problems) == 1
    assert complaint in problems[0]


def test_missing_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"nothing.json: no such file. Name a Hugging Face"):
        load_model_config(tmp_path / "nothing.json")


def load(folder, values):
    """Return the config, and the notices without the path."""
    file = folder / "config.json"
    file.write_text(json.dumps(values))
    notices = []
    config = load_model_config(file, notices)
    return config, [line.removeprefix(f"{file}: ") for line in notices]


@pytest.mark.parametrize(
    ("values", "unread"),
    [
        ({"model_type": "gpt2", "n_ctx": 1024, "task_specific_params": {}}, "n_ctx, task_specific"),
        ({"model_type": "starcoder2", "norm_type": "layer_norm"}, "norm_type"),
        (
            {"model_type": "deepseek_v3", "ep_size": 1, "scoring_func": "sigmoid", "n_group": 8},
            "ep_size, scoring_func",
        ),
        ({"model_type": "gemma2", "hidden_act": "gelu", "cache_implementation": "hybrid"}, ""),
        (
            {"model_type": "gemma3", "text_config": {"final_logits": 1, "sliding_window": 512}},
            "text_config.final_logits",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else value["model_type"],
)
def test_keys_that_nobody_reads_are_reported_in_one_line(tmp_path, values, unread):
    _, notices = load(tmp_path, values)
    assert len(notices) == 1 and unread in notices[0]
    assert not any(key in notices[0] for key in ("n_group", "sliding_window"))


# Read by getattr, from **kwargs, through an attribute map, and as a parameter of a rotary table.
READ_BUT_NOT_DECLARED = {
    "qwen3_moe": {"head_dim": 128, "num_experts": 8},
    "glm4_moe": {"head_dim": 128},
    "exaone4": {"head_dim": 64, "sliding_window_pattern": 4},
    "gpt_neox": {"rotary_pct": 0.25, "rotary_emb_base": 10000},
    "llama": {"rope_theta": 5e5, "rope_scaling": None, "torch_dtype": "float16"},
    "falcon": {"n_embed": 4544},
}


@pytest.mark.parametrize("model_type", READ_BUT_NOT_DECLARED)
def test_keys_that_modeling_code_reads_are_kept_without_a_word(tmp_path, model_type):
    values = {"model_type": model_type, **READ_BUT_NOT_DECLARED[model_type]}
    config, notices = load(tmp_path, values)
    assert notices == []
    expected = AutoConfig.for_model(**values).to_dict()
    assert config.to_dict() == expected


# {name: (family, keys of the file, key without effect, reason, keys with which it has one)}
SPARSE = {"output_router_logits": False, "router_aux_loss_coef": 0.2}
WINDOW = {"sliding_window": 5, "num_hidden_layers": 2, "layer_types": None}
ROPE = {"rope_theta": 5e5, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
IDLE = {
    "mixtral": ("mixtral", SPARSE, "router_aux_loss_coef", "output_router_logits is false",
                {"output_router_logits": True}),
    "jetmoe": ("jetmoe", {"output_router_logits": False, "aux_loss_coef": 0.2}, "aux_loss_coef",
               "output_router_logits is false", {"output_router_logits": True}),
    "no coefficient": ("olmoe", {"output_router_logits": True, "router_aux_loss_coef": 0.0},
                       "output_router_logits", "router_aux_loss_coef is 0",
                       {"router_aux_loss_coef": 0.2}),
    "window": ("qwen2", WINDOW, "sliding_window", "use_sliding_window is false",
               {"use_sliding_window": True, "max_window_layers": 0}),
    "window of later layers": ("qwen2", {**WINDOW, "use_sliding_window": True}, "sliding_window",
                               "max_window_layers 28 is not below the 2 layers",
                               {"max_window_layers": 1}),
    "heads": ("falcon", {"num_kv_heads": 2}, "num_kv_heads", "new_decoder_architecture is false",
              {"new_decoder_architecture": True}),
    "two bases": ("llama", ROPE, "rope_theta", "another key sets rope_theta to 10000.0",
                  {"rope_parameters": None}),
    "mlp": ("qwen3_moe", {"intermediate_size": 96}, "intermediate_size", "",
            {"mlp_only_layers": [0]}),
    "experts": ("deepseek_v3", {"moe_intermediate_size": 24, "first_k_dense_replace": 2},
                "moe_intermediate_size", "", {"first_k_dense_replace": 0}),
    "dropout": ("phi3", {"embd_pdrop": 0.5}, "embd_pdrop", "", {}),
    "z-loss": ("bamba", {"z_loss_coefficient": 0.1}, "z_loss_coefficient", "--z_loss", {}),
}  # fmt: skip


def training_loss(values):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**values)).train()
    ids = torch.arange(32)[None]
    return float(model(input_ids=ids, labels=ids, use_cache=False).loss)


@pytest.mark.parametrize(("family", "changes", "key", "why", "more"), IDLE.values(), ids=list(IDLE))
def test_a_key_that_another_one_switches_off_is_named(tmp_path, family, changes, key, why, more):
    values = toy_config(family) | changes
    for removed in [name for name, value in values.items() if value is None]:
        del values[removed]
    other = {**values, key: not values[key] if values[key] is True else values[key] * 2}

    def noticed(given):
        (tmp_path / "config.json").write_text(json.dumps(given))
        lines = Model.load(str(tmp_path)).notices
        return [line for line in lines if re.search(rf"[:,] {key}\b", line) and why in line]

    assert len(noticed(values)) == 1
    if family != "bamba":  # transformers adds it to its own loss
        assert training_loss(values) == training_loss(other)
    if more:
        on = {k: value for k, value in {**values, **more}.items() if value is not None}
        assert noticed(on) == []
        assert training_loss(on) != training_loss({**on, key: other[key]})


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("hidden_sise", "hidden_size"),
        ("num_hidden_layer", "num_hidden_layers"),
        ("num_key_value_haeds", "num_key_value_heads"),
        ("hiddensize", "hidden_size"),
        ("rmsNormEps", "rms_norm_eps"),
        ("head_dims", "head_dim"),
    ],
)
def test_typing_errors_of_keys_that_count_are_refused(refusal, key, meant):
    (problem,) = refusal({**LLAMA, key: 8})
    assert f'{key}: LlamaConfig has no such key, and nothing reads it. Did you mean "{meant}"?' in (
        problem
    )


# The first config.json of OLMo-1B. The class has defaults of 32 layers and 4096.
OLMO_1B = {"model_type": "olmo", "d_model": 2048, "n_heads": 16, "n_layers": 16, "mlp_ratio": 8}


def test_sizes_under_names_of_other_families_are_refused(refusal):
    problems = refusal(OLMO_1B)
    for key, meant in (
        ("d_model", "hidden_size"),
        ("n_heads", "num_attention_heads"),
        ("n_layers", "num_hidden_layers"),
    ):
        assert any(
            f": {key}: OlmoConfig has no such key" in each and meant in each for each in problems
        )
    assert len(problems) == 3


def test_a_part_that_the_class_does_not_have_is_refused(refusal):
    part = {"hidden_size": 64, "num_hidden_layers": 2}
    (problem,) = refusal({"model_type": "ministral3", "text_config": part})
    assert "text_config: Ministral3Config has no such part" in problem


@pytest.mark.parametrize(
    "values",
    [
        {"model_type": "mamba", "hidden_size": 64, "num_hidden_layers": 2, "n_layer": 4},
        {"model_type": "olmo", "d_model": 4096, "n_heads": 32, "n_layers": 32},  # the defaults
        {"model_type": "dbrx", "d_model": 64, "n_heads": 2, "n_layers": 2},
        {"model_type": "gptj", "num_hidden_layers": 2, "num_layers": 4, "n_embd": 64},
    ],
    ids=["both names", "equal to the default", "declared", "mapped"],
)
def test_sizes_under_other_names_that_change_nothing_are_accepted(tmp_path, values):
    load(tmp_path, values)


def test_infinity_as_transformers_writes_it_is_read(tmp_path):
    written = json.loads(AutoConfig.for_model("mamba2").to_json_string())
    assert written["time_step_limit"][1] == {"__float__": "Infinity"}
    config, _ = load(tmp_path, written)
    assert config.to_dict() == AutoConfig.for_model("mamba2").to_dict()


def test_a_whole_number_is_accepted_for_a_float(tmp_path, refusal):
    config, _ = load(tmp_path, {"model_type": "dbrx", "ffn_config": {"moe_jitter_eps": 0}})
    assert config.ffn_config.moe_jitter_eps == 0.0
    assert "moe_top_k" in refusal({"model_type": "dbrx", "ffn_config": {"moe_top_k": 1.5}})[0]


@pytest.mark.parametrize("model_type", ["dots3_note_text", "gemma4_text", "phimoe"])
def test_what_transformers_writes_is_read_back(tmp_path, model_type):
    if model_type not in CONFIG_MAPPING:
        pytest.skip("transformers is older than the family")
    config = AutoConfig.for_model(model_type)
    read, notices = load(tmp_path, json.loads(config.to_json_string()))
    assert read.to_dict() == config.to_dict() and notices == []


def test_keys_about_the_published_weights_do_not_reach_the_config(tmp_path):
    about = {"auto_map": {"AutoModel": "model.Model"}, "quantization_config": {"bits": 4}}
    config, (notice,) = load(tmp_path, {**LLAMA, **about})
    assert not set(about) & set(config.to_dict())
    assert "auto_map (the model's code, which is never executed)" in notice
    assert "quantization_config (training uses unquantised weights)" in notice


def test_keys_about_the_form_of_outputs_do_not_reach_the_model(tmp_path):
    """With tuples as outputs the first step would fail, and attention weights prevent an export."""
    form = {"return_dict": False, "output_attentions": True, "output_hidden_states": True}
    config, notices = load(tmp_path, {**LLAMA, **form})
    assert config.to_dict() == load(tmp_path, LLAMA)[0].to_dict()
    assert all(f"{key}: ignored" in notice for key, notice in zip(form, notices, strict=True))


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"hidden_size": 10**9}, "hidden_size: 1000000000 must be at most 100,000,000"),
        ({"head_dim": 10**9}, "head_dim: 1000000000 must be at most 100,000,000"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers: 1000000000 must be at most 10,000"),
        (
            {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": -1},
            "num_experts_per_tok: -1 must be from 1 to 8",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_sizes_that_would_take_all_memory_are_refused_before_the_model_is_built(
    refusal, values, text
):
    assert any(text in line for line in refusal(LLAMA | values))


def test_a_table_without_a_usual_key_is_refused_by_its_shape(tmp_path):
    path = tmp_path / "config.json"
    bert = {"model_type": "bert", "is_decoder": True, "hidden_size": 64, "intermediate_size": 64}
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 10**9}
    path.write_text(json.dumps(bert | sizes))
    with pytest.raises(ConfigError, match=r"max_position_embeddings: .* the shape .1000000000, 64"):
        Model.load(str(path))


@pytest.mark.parametrize(
    ("model_type", "key", "value"),
    [("rwkv", "attention_hidden_size", 0), ("mamba2", "time_step_max", 0.0)],
)
def test_values_that_break_the_initialization_are_refused(model_type, key, value):
    config = AutoConfig.for_model(model_type, num_hidden_layers=1, **{key: value})
    with pytest.raises(ConfigError, match=f"weights of a '{model_type}' model cannot be initial"):
        InitialWeights(config, seed=0)
