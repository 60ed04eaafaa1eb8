"""Weights of published files equal those that `from_pretrained` loads; others are refused."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2Model

from tests.zerolm.pretrained.small_models import (
    FAMILIES,
    SMALL,
    change_tensors,
    config_of,
    save_model,
)
from zerolm.common.errors import ConfigError
from zerolm.model.initialization import InitialWeights
from zerolm.pretrained.loaded_weights import LoadedWeights
from zerolm.pretrained.safetensors_files import SafetensorsFiles

NORM = "model.layers.0.input_layernorm.weight"


def load(directory, family="llama", config=None, **changes):
    source = config_of(family, **changes)
    files = SafetensorsFiles(directory)
    return LoadedWeights(config or source, source, files, "SOURCE", seed=7)


def values_of(weights, dtype=torch.float32):
    found = {}
    for number, names in enumerate(weights.units):
        values = weights.compute(number, dtype)
        assert set(values) == set(names)
        assert not found.keys() & values.keys(), "a parameter is in two units"
        found |= values
    return found


def refusal(directory, family="llama", **changes):
    with pytest.raises(ConfigError) as refused:
        load(directory, family, **changes)
    return str(refused.value)


@pytest.mark.parametrize("family", FAMILIES)
def test_values_equal_those_of_from_pretrained(tmp_path, family) -> None:
    save_model(tmp_path, family, size="12KB")
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    expected = {
        name: parameter
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if name not in model.all_tied_weights_keys
    }
    expected |= {name: b for name, b in model.named_buffers() if name in model.state_dict()}
    found = values_of(load(tmp_path, family))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


def test_bf16_files_give_their_values_in_float32(tmp_path) -> None:
    save_model(tmp_path).to(torch.bfloat16).save_pretrained(tmp_path)
    expected = load_file(tmp_path / "model.safetensors")[NORM]
    found = values_of(load(tmp_path))[NORM]
    assert expected.dtype == torch.bfloat16 and found.dtype == torch.float32
    assert torch.equal(found, expected.float())


def test_a_base_model_with_a_tied_head_is_complete(tmp_path) -> None:
    GPT2Model(config_of("gpt2")).save_pretrained(tmp_path)
    published = load_file(tmp_path / "model.safetensors")
    assert "h.0.ln_1.weight" in published, "it has no prefix"
    found = values_of(load(tmp_path, "gpt2"))
    assert torch.equal(found["transformer.h.0.mlp.c_fc.weight"], published["h.0.mlp.c_fc.weight"])


def test_names_and_buffers_of_old_releases_are_read(tmp_path) -> None:
    save_model(tmp_path, "gpt2")
    mask = torch.ones(1, 1, 32, 32, dtype=torch.uint8)
    change_tensors(tmp_path, **{"transformer.h.0.attn.bias": mask})
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    norm = tensors.pop("transformer.ln_f.weight")
    save_file({**tensors, "transformer.LayerNorm.gamma": norm}, path)
    # LayerNorm.gamma is renamed, to a weight that GPT-2 does not have: named in the refusal
    assert "transformer.LayerNorm.weight" in refusal(tmp_path, "gpt2")
    save_file({**tensors, "transformer.ln_f.weight": norm}, path)
    assert torch.equal(values_of(load(tmp_path, "gpt2"))["transformer.ln_f.weight"], norm)


@pytest.mark.parametrize(
    ("name", "tensor", "expected"),
    [
        (NORM, None, f"SOURCE: {NORM}: missing"),
        ("model.layers.9.weird", torch.zeros(2), "model.layers.9.weird: LlamaForCausalLM has no"),
        (NORM, torch.zeros(31), f"{NORM}: has shape (31,), but its config implies (32,)"),
        (NORM, torch.zeros(32, dtype=torch.int8), f"{NORM}: I8: only bfloat16, float16, float32"),
    ],
)
def test_weights_that_do_not_fit_are_refused_by_name(tmp_path, name, tensor, expected) -> None:
    save_model(tmp_path)
    change_tensors(tmp_path, **{name: tensor})
    assert expected in refusal(tmp_path)


def test_a_missing_expert_is_refused(tmp_path) -> None:
    save_model(tmp_path, "mixtral")
    change_tensors(tmp_path, **{"model.layers.1.block_sparse_moe.experts.3.w2.weight": None})
    text = refusal(tmp_path, "mixtral")
    assert "model.layers.1.mlp.experts.down_proj: has shape (3, 32, 48)" in text


def test_tied_weights_that_differ_are_refused(tmp_path) -> None:
    save_model(tmp_path, tie_word_embeddings=True)
    embedding = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    change_tensors(tmp_path, **{"lm_head.weight": embedding.clone()})
    found = values_of(load(tmp_path, tie_word_embeddings=True))
    assert torch.equal(found["model.embed_tokens.weight"], embedding)
    change_tensors(tmp_path, **{"lm_head.weight": embedding + 1})
    text = refusal(tmp_path, tie_word_embeddings=True)
    assert "lm_head.weight and model.embed_tokens.weight differ" in text


def test_a_tied_weight_may_be_published_under_its_other_name(tmp_path) -> None:
    save_model(tmp_path, tie_word_embeddings=True)
    embedding = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    change_tensors(tmp_path, **{"model.embed_tokens.weight": None, "lm_head.weight": embedding})
    found = values_of(load(tmp_path, tie_word_embeddings=True))
    assert torch.equal(found["model.embed_tokens.weight"], embedding)


@pytest.mark.parametrize("tied", [False, True])
def test_a_larger_vocabulary_adds_rows_of_a_new_model(tmp_path, tied) -> None:
    model = save_model(tmp_path, tie_word_embeddings=tied)
    larger = config_of("llama", vocab_size=80, tie_word_embeddings=tied)
    weights = load(tmp_path, config=larger, tie_word_embeddings=tied)
    found = values_of(weights)
    new = InitialWeights(larger, 7)
    fresh = values_of(new)
    names = {"model.embed_tokens.weight"} | (set() if tied else {"lm_head.weight"})
    assert set(weights.extended) == names
    for name, parameter in model.named_parameters():
        assert torch.equal(found[name][: len(parameter)], parameter)
        if name in names:
            assert torch.equal(found[name][64:], fresh[name][64:])


def test_reading_does_not_keep_files_open(tmp_path) -> None:
    save_model(tmp_path, size="12KB")
    weights = load(tmp_path)
    weights._read_bytes = 1 << 30
    weights.compute(0, torch.float32)
    assert not weights._tensors._open
    assert SMALL["vocab_size"] == 64
