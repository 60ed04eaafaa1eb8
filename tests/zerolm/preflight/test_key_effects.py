"""Values of a config.json that change nothing are named, compared with transformers alone."""

import json

import pytest

from tests.launching import LLAMA, ROOT, write_json
from tests.model_families.keys import has_effect
from zerolm.common.errors import Findings
from zerolm.model.model import Model
from zerolm.preflight import key_effects

YARN = {
    "rope_type": "yarn", "rope_theta": 500000.0, "factor": 2.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
SMALL = {**LLAMA, "num_key_value_heads": 2, "max_position_embeddings": 64}
OLMO3 = {**SMALL, "model_type": "olmo3", "num_hidden_layers": 4, "sliding_window": 16}
GEMMA3 = {**SMALL, "model_type": "gemma3_text", "num_hidden_layers": 6, "sliding_window": 16}
QWEN2 = {**SMALL, "model_type": "qwen2"}
GPT2 = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 512}


def effects(values, folder) -> Findings:
    write_json(folder / "m.json", values)
    model, found = Model.load(str(folder / "m.json")), Findings([])
    key_effects.check(model, 1024, found)
    strip = f"{folder}/m.json: "
    return Findings(
        [line.removeprefix(strip) for line in found.problems],
        [line.removeprefix(strip) for line in found.notices],
    )


@pytest.mark.parametrize(
    ("base", "key", "value", "line"),
    [
        (SMALL, "initializer_range", 0.0, "initializer_range: 0.0 has no effect on this model: a "
         "small copy has the same logits and initial weights with 0.02, the default"),
        (SMALL, "partial_rotary_factor", 0.5, "partial_rotary_factor: 0.5 has no effect"),
        (SMALL, "rope_parameters", {**YARN, "mscale": 0.7}, "rope_parameters.mscale: 0.7 has no"),
        (SMALL, "rope_parameters", {**YARN, "beta_fast": 0}, "rope_parameters.beta_fast: 0 has no"),
        (SMALL, "rope_scaling", {"factor": 4.0}, "rope_scaling.factor: 4.0 has no effect"),
        (SMALL, "rope_parameters", {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0,
         "attention_factor": 2.0}, "rope_parameters.attention_factor: 2.0 has no effect"),
        (QWEN2, "max_window_layers", 1, "max_window_layers: 1 has no effect"),
        (GPT2, "reorder_and_upcast_attn", True, "reorder_and_upcast_attn: true has no effect"),
    ],
)  # fmt: skip
def test_a_value_without_an_effect_is_named(base, key, value, line, tmp_path):
    found = effects({**base, key: value}, tmp_path)
    assert not found.problems
    assert len(found.notices) == 1
    assert found.notices[0].startswith(line)
    without = {name: each for name, each in base.items() if name != key}
    if isinstance(value, dict):
        last = list(value)[-1]
        without |= {key: {name: each for name, each in value.items() if name != last}}
    assert has_effect(without, {**base, key: value}) is False


@pytest.mark.parametrize("base", [OLMO3, GEMMA3])
@pytest.mark.parametrize("rope", [YARN, {"rope_type": "default", "rope_theta": 5e5}])
def test_rotary_embeddings_for_all_layers_are_refused_where_kinds_of_layers_have_their_own(
    base, rope, tmp_path
):
    (problem,) = effects({**base, "rope_parameters": rope}, tmp_path).problems
    assert "rope_parameters.rope_theta: 500000.0 " in problem.replace(",", " ")
    assert ("rope_type" in problem) == (rope is YARN)
    assert "Give entries for full_attention and sliding_attention, or remove" in problem
    assert has_effect(base, {**base, "rope_parameters": rope}) is False
    by_kind = {"full_attention": rope, "sliding_attention": {"rope_type": "default"}}
    theta = {"rope_theta": 1e4}
    by_kind["sliding_attention"] |= theta
    found = effects({**base, "rope_parameters": by_kind}, tmp_path)
    assert not found.problems and not found.notices
    assert has_effect(base, {**base, "rope_parameters": by_kind})


@pytest.mark.parametrize(
    "values",
    [
        {**SMALL, "rope_parameters": YARN},
        {**SMALL, "head_dim": 16},  # the class would derive the same
        {**SMALL, "hidden_act": "swish"},  # another name of the default
        {**SMALL, "tie_word_embeddings": True},
        {**SMALL, "model_type": "mistral", "sliding_window": 2000},  # longer than the rows
        {**QWEN2, "use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
        {**OLMO3, "rope_theta": 5e5, "rope_scaling": {"rope_type": "yarn", "factor": 8.0}},
        {
            **SMALL,
            "rope_theta": 5e5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
        },
    ],
)
def test_a_value_with_an_effect_is_not_named(values, tmp_path):
    found = effects(values, tmp_path)
    assert not found.problems and not found.notices


def test_the_narrow_copy_of_a_large_model_keeps_its_frequencies(tmp_path):
    """In heads of 16, `truncate` would round nothing away."""
    large = {
        **LLAMA, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
        "intermediate_size": 14336, "num_hidden_layers": 32, "max_position_embeddings": 65536,
        "rope_parameters": {
            **YARN, "original_max_position_embeddings": 8192, "beta_fast": 31, "truncate": False,
        },
        "initializer_range": 0.0,
    }  # fmt: skip
    (notice,) = effects(large, tmp_path).notices
    assert notice.startswith("initializer_range: 0.0 has no effect")


def test_no_shipped_config_has_a_value_without_an_effect(tmp_path):
    for name in ("gpt2", "mixtral-tiny", "qwen3-0.6b"):
        values = json.loads((ROOT / "model_configs" / f"{name}.json").read_text())
        found = effects(values, tmp_path)
        assert not found.problems and not found.notices
